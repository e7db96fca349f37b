"""Prepared frames are those of the videos, are taken only while they are good, and are written again where not."""

import numpy as np
import pytest
import torch

from parapos.data import FormatError, preparations
from parapos.data import ucf101 as module
from parapos.data.readers.video import write_video
from parapos.data.ucf101 import load_frames, ucf101
from parapos.data.video_tree import make_ucf101

from .readers.fuzz import mutations, overwrite

SMALL = dict(height=24, width=32, complete=False)
CLIPS = 8
AGAIN = "run `parapos prepare ucf101 --spacing starts` again"


def job(root, cache=None, *, complete=False, quick=False, **options):
    return preparations.Job(root, cache, complete=complete, quick=quick, options=options)


def prepare(*args, **options):
    return preparations.prepare(module, job(*args, **options))


def check(*args, **options):
    return preparations.check(module, job(*args, **options))


def frames_path(cache, file):
    return cache / f"{file}.npy"


@pytest.fixture
def tree(tmp_path):
    make_ucf101(tmp_path, classes=2, groups=4, clips=1, frames=(20, 44), size=(32, 24))
    return tmp_path


def rows(found):
    return {what.strip(): (value, expected) for what, value, expected in found.rows}


def test_prepared_frames_are_those_of_the_videos(tree):
    before = ucf101("train", root=tree, **SMALL)
    done = prepare(tree)
    assert (done.now, done.before, done.failed, done.notes) == (CLIPS, 0, [], [])
    after = ucf101("train", root=tree, **SMALL)
    assert not before.prepared.any()
    assert after.prepared.all()
    for i in range(len(before)):
        one, other = before[i], after[i]
        assert one["tubelets"] == other["tubelets"]
        assert torch.equal(one["video"], other["video"])


def test_prepared_frames_need_no_decoder(tree, monkeypatch):
    prepare(tree, tree / "elsewhere")
    assert not ucf101("test", root=tree, **SMALL).prepared.any()
    dataset = ucf101("test", root=tree, cache=tree / "elsewhere", **SMALL)
    monkeypatch.setattr("parapos.data.ucf101.read_clip", None)
    assert dataset[0]["video"].any()


def test_preparing_goes_on(tree, monkeypatch):
    read, seen = module.read_clip, []

    def failing(path, spacing):
        seen.append(path)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return read(path, spacing)

    monkeypatch.setattr(module, "read_clip", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(tree)
    assert not list((tree / "prepared").rglob("*.part"))
    done = prepare(tree)
    assert (done.now, done.before) == (CLIPS - 3, 3)
    assert len(seen) == 4 + CLIPS - 3
    done = prepare(tree)
    assert (done.now, done.before) == (0, CLIPS)
    assert len(seen) == 4 + CLIPS - 3


def test_what_changed_is_prepared_again(tree):
    prepare(tree)
    train = ucf101("train", root=tree, **SMALL)
    write_video(train.path(0), [np.full((24, 32, 3), 99, np.uint8)] * 3)
    path = frames_path(tree / "prepared", train.files[1])
    path.write_bytes(path.read_bytes()[:-1])
    frames_path(tree / "prepared", train.files[2]).unlink()
    again = ucf101("train", root=tree, **SMALL)
    assert again.prepared.tolist() == [False, False, False, True]
    assert again[0]["tubelets"] == 1
    done = prepare(tree)
    assert (done.now, done.before) == (3, CLIPS - 3)
    assert ucf101("train", root=tree, **SMALL).prepared.all()


def test_bad_clips_do_not_stop_the_others(tree):
    train = ucf101("train", root=tree, **SMALL)
    whole = train.path(1).read_bytes()
    train.path(0).write_bytes(b"broken")
    train.path(1).write_bytes(whole[: whole.index(b"movi") + 3000])
    done = prepare(tree)
    assert (done.now, len(done.failed), len(done.notes)) == (CLIPS - 1, 1, 1)
    assert done.failed[0].startswith(f"{train.path(0)}: cannot be decoded")
    assert done.notes[0] == f"{train.files[1]}: the file ends within a frame"
    assert ucf101("train", root=tree, **SMALL).prepared.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 3, 4, 4), np.uint8),
        np.zeros((12, 3, 4, 4), np.uint8),
        np.zeros((0, 3, 4, 4), np.uint8),
        np.zeros((2, 1, 4, 4), np.uint8),
        np.zeros((2, 3, 4), np.uint8),
        np.zeros((2, 3, 4, 4), np.float32),
        np.array({"a": 1}, object),
    ],
)
def test_other_arrays_are_refused(array, tmp_path):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    told = rf"a\.npy: expected uint8 frames \(2K, 3, H, W\), got .*; remove it and {AGAIN}"
    with pytest.raises(FormatError, match=told):
        load_frames(tmp_path / "a.npy", AGAIN)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04", b"x" * 100])
def test_other_files_are_refused(content, tmp_path):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(FormatError, match=r"a\.npy: expected uint8 frames"):
        load_frames(tmp_path / "a.npy", AGAIN)


@pytest.mark.parametrize("corrupt", ["error", "skip"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_errors_of_prepared_frames_are_never_skipped(split, corrupt, tree):
    """A video that cannot be read may be; what was prepared could be."""
    prepare(tree)
    dataset = ucf101(split, root=tree, corrupt=corrupt, **SMALL)
    path = frames_path(tree / "prepared", dataset.files[0])
    path.write_bytes(b"short")
    with pytest.raises(FormatError, match=r"avi\.npy: expected uint8 frames"):
        dataset[0]
    path.unlink()
    with pytest.raises(FormatError, match=rf"avi\.npy: not there, .*; {AGAIN}"):
        dataset[0]
    assert not dataset.skipped.any()


def test_mutated_frames_give_frames_or_a_format_error(tmp_path, tenths):
    path, good, bad = tmp_path / "a.npy", 0, 0
    np.save(path, np.zeros((4, 3, 2, 2), np.uint8))
    for data in mutations([path.read_bytes()], 300 * tenths):
        overwrite(path, data)
        try:
            good += load_frames(path, AGAIN).numel() <= len(data)
        except FormatError as error:
            bad += str(error).startswith(f"{path}: ")
    assert good + bad == 300 * tenths
    assert min(good, bad) > 5 * tenths


def test_frames_of_another_spacing_are_refused_and_replaced(tree):
    prepare(tree)
    told = r"manifest\.jsonl: prepared with .*'starts'.*expected .*'gaps'.*; run `.* ucf101 --spacing gaps` again"
    with pytest.raises(FormatError, match=told):
        ucf101("train", root=tree, spacing="gaps", **SMALL)
    (problem,) = check(tree, complete=False, spacing="gaps").problems
    assert "--spacing gaps` again" in problem
    videos = [module.read_clip(path, "gaps")[0] for path in sorted((tree / "UCF-101").glob("*/*.avi"))]
    assert prepare(tree, spacing="gaps").now == CLIPS
    found = ucf101("train", root=tree, spacing="gaps", **SMALL)
    assert found.prepared.all()
    assert any(torch.equal(found.frames(0), video) for video in videos)
    with pytest.raises(ValueError, match="spacing must be one of starts, gaps, got 'ends'"):
        ucf101("train", root=tree, spacing="ends", **SMALL)


def test_check_counts(tree):
    found = check(tree, complete=False)
    assert found.problems == []
    told = rows(found)
    assert told["classes"] == ("2", "")
    assert told["fold 1, train clips"] == ("4", "")
    assert told["videos"] == ("8", "")
    assert told["of 8 read, unreadable"] == ("0", "0")
    assert told["prepared clips"] == ("0", "")
    prepare(tree)
    told = rows(check(tree, complete=False, sample=3))
    assert told["of 3 read, unreadable"] == ("0", "0")
    assert told["prepared clips"] == ("8", "")
    assert told["prepared files missing, cut or damaged"] == ("0", "0")


def test_check_tells_what_is_missing_and_wrong(tree):
    prepare(tree)
    test = ucf101("test", root=tree, **SMALL)
    path = frames_path(tree / "prepared", test.files[0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # the same size
    path.write_bytes(content)
    found = check(tree, complete=False)
    assert rows(found)["prepared files missing, cut or damaged"] == ("1", "0")
    assert found.problems == [f"{path}: damaged, its SHA-256 differs; remove it and {AGAIN}"]
    test.path(1).unlink()
    test.path(0).write_bytes(b"broken")
    (tree / "UCF-101" / "SquareLeft" / "v_SquareLeft_g30_c01.avi").touch()
    found = check(tree, complete=False)
    told = rows(found)
    assert told["videos"] == ("7", "")
    assert told["listed but not there"] == ("1", "")
    assert told["there but not listed"] == ("1", "")
    assert told["of 7 read, unreadable"] == ("1", "0")
    unreadable, damaged, changed = found.problems
    assert unreadable.startswith(f"unreadable: {test.path(0)}: ")
    assert damaged.startswith(f"{path}: damaged")
    assert changed == f"{test.path(0)}: changed since it was prepared; {AGAIN}"


def test_check_tells_prepared_files_that_are_missing_or_cut(tree):
    prepare(tree)
    train = ucf101("train", root=tree, **SMALL)
    gone, cut = (frames_path(tree / "prepared", train.files[i]) for i in (0, 2))
    size = cut.stat().st_size
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    found = check(tree, complete=False)
    assert rows(found)["prepared clips"] == ("6", "")
    assert rows(found)["prepared files missing, cut or damaged"] == ("2", "0")
    told = f"{size - 1} bytes, expected {size} as in the manifest"
    assert sorted(found.problems) == sorted([f"{gone}: not there; {AGAIN}", f"{cut}: {told}; {AGAIN}"])
    assert check(tree, complete=False, quick=True).problems == []  # what preparing begins with, and mends
    assert prepare(tree).now == 2
    assert check(tree, complete=False).problems == []


def test_another_folder_is_told(tmp_path):
    (problem,) = check(tmp_path / "none").problems
    assert problem.startswith(f"{tmp_path / 'none'}: no folder ucfTrainTestlist, expected the folder of UCF101")


def test_check_expects_the_official_numbers(tree):
    found = check(tree, complete=True)
    assert rows(found)["fold 3, test clips"] == ("2", "3,696")
    assert "classes: found 2, expected 101" in found.problems
    assert "videos: found 8, expected 13,320" in found.problems
    (tree / "ucfTrainTestlist" / "testlist02.txt").unlink()
    found = check(tree, complete=False)
    assert len(found.problems) == 1
    assert "testlist02.txt" in found.problems[0]
