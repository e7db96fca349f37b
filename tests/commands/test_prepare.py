"""`parapos prepare` for every data set: what it reports, what it refuses, and that it resumes."""

import inspect
import re
import shutil
from importlib import import_module

import pytest

from parapos import cli
from parapos.commands import prepare
from parapos.commands.base import UserError
from parapos.data.events_tree import make_dvsgesture, make_gen1
from parapos.data.preparations import PREPARATIONS, Preparation, register_preparation
from parapos.data.readers import TruncatedWarning
from parapos.data.ucf101 import ucf101

STORED = {  # generated items, a row, a problem of an incomplete copy
    "ucf101": (64, "prepared clips", "videos: found 64, expected 13,320"),
    "dvsgesture": (10, "prepared recordings", "recordings in trials_to_train.txt: found 8, expected 98"),
    "gen1": (4, "prepared clips", "train clips: found 2, expected 1,460"),
}


@pytest.fixture
def run(capsys):
    """Runs `parapos prepare` with these words; (exit code, what it said)."""

    def call(*words):
        code = 0
        try:
            args = cli.parser().parse_args(["prepare", *map(str, words)])
            args.run(args)
        except UserError as error:
            return 2, str(error)
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().out

    return call


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("events")
    make_dvsgesture(root / "dvsgesture", users=(4, 22, 24), seconds=0.1, rate=4000)
    make_gen1(root / "gen1", seconds=0.5, rate=8000)
    return root


@pytest.fixture
def trees(made, tmp_path):
    """Copies that a test may break."""
    return shutil.copytree(made, tmp_path / "copy")


@pytest.mark.parametrize("name", PREPARATIONS)
def test_every_option_is_used_and_every_function_is_there(name):
    preparation = PREPARATIONS[name]
    module = import_module(preparation.module)
    needed = ("synthetic", "survey", *(("open_store", "make") if preparation.items else ("prepare",)))
    assert all(callable(getattr(module, function)) for function in needed)
    for option in preparation.options:
        assert f'"{option.name}"' in inspect.getsource(module)


@pytest.mark.parametrize("name", STORED)
def test_command(name, run, tmp_path):
    count, row, problem = STORED[name]
    items, root = PREPARATIONS[name].items, tmp_path / "new"
    code, told = run(name, "--root", root, "--synthetic")
    assert code == 0
    assert f"prepared {count} {items}, 0 were prepared before" in told
    assert re.search(rf"\| +{row} +\| +{count} \|", told)
    code, told = run(name, "--root", root, "--partial")
    assert (code, f"prepared 0 {items}, {count} were prepared before" in told) == (0, True)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    code, told = run(name, "--root", root, "--check", "--partial")
    assert (code, "prepared files missing, cut or damaged" in told) == (0, True)
    code, told = run(name, "--root", root, "--check")
    assert (code, problem in told) == (1, True)
    assert run(name, "--root", root)[0] == 1
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    code, told = run(name, "--root", root, "--synthetic")
    assert (code, told.endswith("not empty, expected a new folder")) == (2, True)
    assert run(name, "--root", tmp_path / "none", "--check")[0] in (1, 2)
    assert "not allowed with argument" in run(name, "--synthetic", "--check")[1]


@pytest.mark.parametrize("name", PREPARATIONS)
def test_a_root_that_links_to_itself_is_one_line(name, run, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for words in ((), ("--check",), ("--synthetic",)):
        code, told = run(name, "--root", tmp_path / "loop", *words)
        link = f"{tmp_path / 'loop'}: a symbolic link that leads back to itself, expected a folder"
        assert (code, told) == (2, f"parapos prepare {name}: {link}")


def test_what_is_shown_of_clips(run, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(prepare, "track", lambda items, name: shown.append(name) or items)
    root = tmp_path / "tiny"
    run("ucf101", "--synthetic", "--root", root)
    assert ucf101("train", root=root, complete=False).prepared.all()
    code, told = run("ucf101", "--partial", "--check", "--sample", 5, "--root", root)
    assert shown == ["clips", "videos", "prepared clips"]
    assert "of 5 read, unreadable" in told
    code, told = run("ucf101", "--partial", "--root", root, "--cache", tmp_path / "fast")
    assert "prepared 64 clips" in told
    assert ucf101("val", root=root, cache=tmp_path / "fast", complete=False).prepared.all()
    code, told = run("ucf101", "--partial", "--root", root, "--spacing", "gaps")
    assert (code, "prepared 64 clips, 0 were" in told) == (0, True)
    path = ucf101("test", root=root, complete=False, spacing="gaps").path(3)
    path.write_bytes(b"broken")
    code, told = run("ucf101", "--partial", "--root", root, "--spacing", "gaps")
    assert code == 1
    assert "prepared 0 clips, 63 were prepared before" in told
    assert f"failed: {path}: " in told
    assert '1 clips could not be prepared; data.options.corrupt = "skip" trains without them' in told


def test_missing_recordings_are_listed(run, trees):
    root = trees / "dvsgesture"
    (root / "user22_led.aedat").unlink()
    (root / "user24_led_labels.csv").unlink()
    code, told = run("dvsgesture", "--root", root, "--check")
    assert code == 1
    assert f"{root / 'user22_led.aedat'}: not there" in told
    assert f"{root / 'user24_led_labels.csv'}: not there" in told
    assert "test: gestures: found 12, expected 288" in told
    assert run("dvsgesture", "--root", root)[0] == 1
    assert not (root / "prepared").exists()
    code, told = run("dvsgesture", "--root", root, "--partial")
    assert (code, "prepared 4 recordings" in told) == (0, True)


def test_missing_halves_of_clips_are_listed(run, trees):
    root = trees / "gen1"
    (events,) = (root / "val").glob("*_td.dat")
    (labels,) = (root / "test").glob("*_bbox.npy")
    events.unlink()
    labels.unlink()
    code, told = run("gen1", "--root", root, "--check")
    assert code == 1
    assert f"{events}: not there" in told
    assert f"{labels}: not there" in told
    code, told = run("gen1", "--root", root, "--partial")
    assert (code, "prepared 2 clips" in told) == (0, True)
    shutil.rmtree(root / "test")
    assert f"{root / 'test'}: no such folder" in run("gen1", "--root", root, "--check")[1]
    assert run("gen1", "--root", root, "--partial")[0] == 0


@pytest.mark.parametrize(("name", "count"), [("dvsgesture", 6), ("gen1", 4)])
def test_truncated_files_are_kept_on_request(name, count, run, trees):
    path = next((trees / name).rglob("*.aedat" if name == "dvsgesture" else "*_td.dat"))
    path.write_bytes(path.read_bytes()[:-5])
    code, told = run(name, "--root", trees / name, "--partial", "--cache", trees / "whole")
    assert (code, "truncated='keep' takes" in told) == (1, True)
    with pytest.warns(TruncatedWarning, match="kept the"):
        code, told = run(name, "--root", trees / name, "--partial", "--keep-truncated", "--cache", trees / "cache")
    assert (code, f"prepared {count} " in told) == (0, True)
    assert (trees / "cache" / "manifest.jsonl").is_file()
    assert not (trees / name / "prepared").exists()


def test_many_problems_are_counted(run, trees):
    for path in (trees / "dvsgesture").glob("user*"):
        path.unlink()
    with open(trees / "dvsgesture" / "trials_to_test.txt", "a") as file:
        file.writelines(f"user{i}_lab.aedat\n" for i in range(30, 60))
    told = run("dvsgesture", "--root", trees / "dvsgesture", "--check")[1]
    assert told.count(": not there") < 20
    assert re.search(r"and \d\d more", told)


def test_a_data_set_from_outside(run, tmp_path, monkeypatch):
    monkeypatch.setattr("parapos.data.preparations.PREPARATIONS", dict(PREPARATIONS))
    mine = Preparation("parapos.data.gen1_scan", "Mine.", "clips")
    register_preparation("mine", mine)
    code, told = run("mine", "--synthetic", "--root", tmp_path / "new", "--workers", 2)
    assert (code, "prepared 4 clips" in told) == (0, True)
    with pytest.raises(ValueError, match="data set 'mine' has a preparation already"):
        register_preparation("mine", mine)
