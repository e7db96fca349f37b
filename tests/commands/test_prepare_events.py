"""`parapos prepare` for event data: what it reports, what it refuses, and that it goes on where it was."""

import re
import shutil

import pytest

from parapos.commands import prepare_events
from parapos.commands.base import Parser, UserError
from parapos.data.events_tree import make_dvsgesture, make_gen1
from parapos.data.readers import TruncatedWarning


@pytest.fixture
def run(capsys):
    """Runs `parapos prepare` with these words; (exit code, what it said)."""
    top = Parser(prog="parapos prepare")
    prepare_events.add(top.add_subparsers(), lambda items, name: items)

    def call(*words):
        code = 0
        try:
            args = top.parse_args([str(word) for word in words])
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


CASES = {
    "dvsgesture": (10, 6, "prepared recordings", "recordings in trials_to_train.txt: found 8, expected 98"),
    "gen1": (4, 4, "clips scanned", "train clips: found 2, expected 1,460"),
}


@pytest.mark.parametrize("name", CASES)
def test_command(name, run, tmp_path):
    count, _, row, problem = CASES[name]
    root = tmp_path / "new"
    code, told = run(name, "--root", root, "--synthetic")
    assert code == 0
    assert f"prepared {count} recordings, 0 were prepared before" in told
    assert re.search(rf"\| +{row} +\| +\d+ \|", told)
    code, told = run(name, "--root", root, "--partial")
    assert (code, f"prepared 0 recordings, {count} were prepared before" in told) == (0, True)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    code, told = run(name, "--root", root, "--check")
    assert (code, problem in told) == (1, True)
    assert run(name, "--root", root)[0] == 1
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    code, told = run(name, "--root", root, "--synthetic")
    assert (code, told.endswith("not empty, expected a new folder")) == (2, True)
    assert run(name, "--root", tmp_path / "none", "--check")[0] == 2
    assert "not allowed with argument" in run(name, "--synthetic", "--check")[1]


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
    assert (code, "prepared 2 recordings" in told) == (0, True)
    shutil.rmtree(root / "test")
    assert f"{root / 'test'}: no such folder" in run("gen1", "--root", root, "--check")[1]
    assert run("gen1", "--root", root, "--partial")[0] == 0


@pytest.mark.parametrize("name", CASES)
def test_truncated_files_are_kept_on_request(name, run, trees):
    path = next((trees / name).rglob("*.aedat" if name == "dvsgesture" else "*_td.dat"))
    path.write_bytes(path.read_bytes()[:-5])
    code, told = run(name, "--root", trees / name, "--partial")
    assert (code, "truncated='keep' takes" in told) == (1, True)
    with pytest.warns(TruncatedWarning, match="kept the"):
        code, told = run(name, "--root", trees / name, "--partial", "--keep-truncated", "--cache", trees / "cache")
    assert (code, f"prepared {CASES[name][1]} recordings" in told) == (0, True)
    assert (trees / "cache" / "manifest.json").is_file()
    assert not (trees / name / "prepared").exists()


def test_many_problems_are_counted(run, trees):
    for path in (trees / "dvsgesture").glob("user*"):
        path.unlink()
    with open(trees / "dvsgesture" / "trials_to_test.txt", "a") as file:
        file.writelines(f"user{i}_lab.aedat\n" for i in range(30, 60))
    told = run("dvsgesture", "--root", trees / "dvsgesture", "--check")[1]
    assert told.count(": not there") < 20
    assert re.search(r"and \d\d more", told)
