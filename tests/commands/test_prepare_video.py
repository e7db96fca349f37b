"""`parapos prepare ucf101`, from its options to what it prints and returns."""

import argparse

import pytest

from parapos.commands import prepare_video
from parapos.commands.base import Parser, UserError
from parapos.data.ucf101 import ucf101


def run(*words):
    top = Parser(prog="parapos")
    shown = []

    def track(items, name):
        shown.append(name)
        return items

    prepare_video.add(top.add_subparsers(parser_class=argparse.ArgumentParser), track)
    args = top.parse_args(["ucf101", *map(str, words)])
    args.run(args)
    return shown


@pytest.fixture
def root(tmp_path, capsys):
    run("--synthetic", "--root", tmp_path / "tiny")
    assert "prepared 64 clips, 0 were prepared before" in capsys.readouterr().out
    return tmp_path / "tiny"


def test_all_of_it(root, capsys):
    assert ucf101("train", root=root, complete=False).prepared.all()
    assert run("--partial", "--root", root) == ["clips"]
    assert "prepared 0 clips, 64 were prepared before" in capsys.readouterr().out
    assert run("--partial", "--check", "--sample", 5, "--root", root) == ["videos", "prepared clips"]
    told = capsys.readouterr().out
    assert "of 5 read, unreadable" in told
    assert "prepared clips" in told


def test_another_place(root, tmp_path, capsys):
    run("--partial", "--root", root, "--cache", tmp_path / "fast")
    assert "prepared 64 clips" in capsys.readouterr().out
    assert ucf101("val", root=root, cache=tmp_path / "fast", complete=False).prepared.all()


def test_an_incomplete_copy_is_told(root, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--root", root)
    assert stop.value.code == 1
    told = capsys.readouterr().out
    assert "videos: found 64, expected 13,320" in told


def test_an_unreadable_clip_is_told(root, capsys):
    path = ucf101("test", root=root, complete=False).path(3)
    path.write_bytes(b"broken")
    with pytest.raises(SystemExit) as stop:
        run("--partial", "--root", root)
    assert stop.value.code == 1
    told = capsys.readouterr().out
    assert "prepared 0 clips, 63 were prepared before" in told
    assert f"unreadable: {path}: " in told
    assert "1 clips are unreadable" in told


def test_user_errors_are_one_line(root, tmp_path):
    with pytest.raises(UserError, match=r"parapos prepare ucf101: .*tiny: not empty"):
        run("--synthetic", "--root", root)
    with pytest.raises(SystemExit):
        run("--root", tmp_path / "nowhere")
