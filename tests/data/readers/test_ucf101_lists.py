"""The lists of UCF101: what is odd about the real ones is read, what is wrong is told with its line."""

import os
from pathlib import Path

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.readers.ucf101_lists import (
    COUNTS,
    FOLDS,
    SPLITS,
    Clip,
    find_clips,
    read_classes,
    read_fold,
    read_list,
)

from .fuzz import mutations, overwrite

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[4] / "shared"))
SAMPLES = SHARED / "samples" / "ucf101"
real = pytest.mark.skipif(not SAMPLES.is_dir(), reason="no sample lists here")
CLASSES = ["Archery", "HandstandPushups"]
INDEX = b"1 Archery\r\n2 HandstandPushups\r\n"
TRAIN = b"Archery/v_Archery_g08_c01.avi 1\r\nHandstandPushups/v_HandStandPushups_g09_c12.avi 2\r\n"


@pytest.fixture
def put(tmp_path):
    def write(data, name="list.txt"):
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    "data",
    [INDEX, INDEX.replace(b"\r", b""), b"\xef\xbb\xbf" + INDEX, b"\n2\tHandstandPushups  \n\n1   Archery"],
)
def test_classes(data, put):
    assert read_classes(put(data)) == CLASSES


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no classes"),
        (b"1 A\n3 B\n", "class 2 is missing, expected numbers from 1 on"),
        (b"0 A\n", "class 1 is missing"),
        (b"1 A\n1 B\n", "line 2: class 1 B is not the first of its number or name"),
        (b"1 A\n2 a\n", "line 2: class 2 a is not the first"),
        (b"1 A\n\nArchery\n", "line 3: expected a number and a class, got 'Archery'"),
        (b"1 A B\n", "line 1: expected a number and a class"),
        (b"1 A\n2 \xff\n", "line 2: not text"),
        (b"9" * 5000 + b" A\n", "line 1: expected a number"),
    ],
)
def test_bad_classes(data, told, put):
    with pytest.raises(FormatError, match=rf"list\.txt: {told}"):
        read_classes(put(data))


def test_lists(put):
    want = [
        Clip("Archery/v_Archery_g08_c01.avi", 0, 8),
        Clip("HandstandPushups/v_HandStandPushups_g09_c12.avi", 1, 9),
    ]
    assert read_list(put(TRAIN), CLASSES) == want
    assert read_list(put(TRAIN.replace(b" 1", b"").replace(b" 2", b"")), CLASSES) == want  # a test list
    assert read_list(put(TRAIN.replace(b"\r\n", b"\r")), CLASSES) == want
    other = read_list(put(TRAIN.replace(b"HandstandPushups/", b"handStandPushups/")), CLASSES)
    assert (other[1].label, other[1].path) == (1, "handStandPushups/v_HandStandPushups_g09_c12.avi")  # verbatim


def test_names_need_not_be_ascii(put):
    line = "Bogenschießen/v_Bogenschießen_g01_c02.avi"
    assert read_list(put(f"{line} 1\r\n".encode()), ["Bogenschießen"]) == [Clip(line, 0, 1)]
    with pytest.raises(FormatError, match="line 2: not text in UTF-8"):
        read_list(put(b"Archery/v_g01_c01.avi\n" + line.encode("latin-1")), CLASSES)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"Archery/v_Archery_g08_c02.avi 2", "class 2, expected 1, the number of Archery"),
        (b"Archery/v_Archery_g08_c02.avi one", "class one, expected 1"),
        (b"Bowling/v_Bowling_g08_c02.avi 3", "folder Bowling is none of the 2 classes"),
        (b"Archery/v_Archery_g08_c01.avi 1", "v_Archery_g08_c01.avi is there twice"),
        (b"Archery/v_archery_g08_c01.avi 1", "is there twice"),
        (b"v_Archery_g08_c02.avi 1", "expected <Class>/<name>_gGG_cCC.avi and perhaps a class number, got 'v_Arch"),
        (b"Archery/v_Archery_c02.avi 1", "expected <Class>/<name>_gGG_cCC.avi"),
        (b"Archery/v_Archery_g08_c02.mp4 1", "expected <Class>/<name>_gGG_cCC.avi"),
        (b"../v_Archery_g08_c02.avi 1", "expected <Class>/<name>_gGG_cCC.avi"),
        (b"../Archery/v_Archery_g08_c02.avi 1", "expected <Class>/<name>_gGG_cCC.avi"),
        (b"Archery\\v_Archery_g08_c02.avi 1", "expected <Class>/<name>_gGG_cCC.avi"),
        (b"Archery/v_Archery_g08_c02.avi 1 1", "expected <Class>/<name>_gGG_cCC.avi"),
        (b"Archery/v_Archery_g" + b"1" * 5000 + b"_c02.avi 1", "expected <Class>/<name>_gGG_cCC.avi"),
    ],
)
def test_bad_lines(line, told, put):
    with pytest.raises(FormatError) as error:
        read_list(put(TRAIN + b"\r\n" + line + b"\r\n"), CLASSES)
    assert str(error.value).startswith(str(put(b"")))
    assert f": line 4: {told}" in str(error.value) or (told in str(error.value) and ": line 4: " in str(error.value))
    assert len(str(error.value)) < len(str(put(b""))) + 300


def test_an_empty_or_missing_list(put, tmp_path):
    with pytest.raises(FormatError, match=r"list\.txt: no clips"):
        read_list(put(b"\r\n"), CLASSES)
    with pytest.raises(FileNotFoundError):
        read_list(tmp_path / "none.txt", CLASSES)


def write_fold(root, train, test):
    folder = root / "ucfTrainTestlist"
    folder.mkdir()
    (folder / "classInd.txt").write_bytes(INDEX)
    for kind, groups in (("train", train), ("test", test)):
        lines = [f"{CLASSES[c]}/v_x_g{g:02d}_c{i:02d}.avi" for c, g in groups for i in (1, 2)]
        (folder / f"{kind}list02.txt").write_text("\n".join(lines))


def test_validation_is_the_first_group_of_each_class(tmp_path):
    write_fold(tmp_path, [(0, 9), (0, 8), (1, 8), (1, 9), (0, 9 + 1)], [(0, 1), (1, 1)])
    fold = read_fold(tmp_path, 2)
    assert fold.classes == CLASSES
    assert {(clip.label, clip.group) for clip in fold.val} == {(0, 9), (1, 8)}
    assert {(clip.label, clip.group) for clip in fold.train} == {(0, 8), (0, 10), (1, 9)}
    assert {(clip.label, clip.group) for clip in fold.test} == {(0, 1), (1, 1)}
    assert [len(part) for part in (fold.train, fold.val, fold.test)] == [6, 4, 4]
    with pytest.raises(ValueError, match="fold must be 1, 2 or 3, got 4"):
        read_fold(tmp_path, 4)


def test_a_group_on_both_sides_is_refused(tmp_path):
    write_fold(tmp_path, [(0, 8), (1, 8)], [(0, 9), (1, 8)])
    with pytest.raises(FormatError, match="group 8 of HandstandPushups is for training and for testing in fold 2"):
        read_fold(tmp_path, 2)


def test_clips_are_found_whatever_their_capitals(tmp_path):
    base = tmp_path / "UCF-101"
    for name in ("Archery/v_Archery_g01_c01.avi", "Archery/V_archery_g01_c02.AVI", "HandStandPushups/v_h_g01_c01.avi"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).touch()
    listed = [
        "Archery/v_Archery_g01_c01.avi",
        "Archery/v_Archery_g01_c02.avi",
        "HandstandPushups/v_H_g01_c01.avi",
        "HandstandPushups/v_H_g01_c02.avi",
        "Bowling/v_Bowling_g01_c01.avi",
    ]
    found = find_clips(tmp_path, [Clip(path, 0, 1) for path in listed])
    spelt = ["Archery/v_Archery_g01_c01.avi", "Archery/V_archery_g01_c02.AVI", "HandStandPushups/v_h_g01_c01.avi"]
    assert found == [*spelt, None, None]
    (base / "Archery" / "v_Archery_g01_c02.avi").touch()  # as listed comes first
    assert find_clips(tmp_path, [Clip(listed[1], 0, 1)]) == [listed[1]]
    with pytest.raises(FormatError, match="none/UCF-101: no such folder"):
        find_clips(tmp_path / "none", [])


def test_mutated_lists_give_clips_or_a_format_error(tmp_path, tenths):
    path, good, bad = tmp_path / "broken.txt", 0, 0
    for i, data in enumerate(mutations([INDEX, TRAIN], 600 * tenths)):
        overwrite(path, data)
        try:
            found = read_classes(path) if i % 2 == 0 else read_list(path, CLASSES)
        except FormatError as error:
            bad += str(error).startswith(f"{path}: ")
        else:
            good += len(found) > 0
    assert good + bad == 600 * tenths
    assert min(good, bad) > 30 * tenths


@real
def test_official_lists():
    """Counts, three disjoint test sets, and groups that never straddle."""
    tested = []
    for fold in FOLDS:
        lists = read_fold(SAMPLES, fold)
        assert len(lists.classes) == 101
        parts = [getattr(lists, split) for split in SPLITS]
        assert tuple(map(len, parts)) == COUNTS[fold]
        groups = [{(clip.label, clip.group) for clip in part} for part in parts]
        assert not groups[0] & groups[1]
        assert not groups[0] & groups[2]
        assert not groups[1] & groups[2]
        assert {group for _, group in groups[1]} == {8 if fold == 1 else 1}
        assert {group for _, group in groups[2]} == set(range(7 * fold - 6, 7 * fold + 1))
        assert len(groups[1]) == 101
        paths = {clip.path for part in parts for clip in part}
        assert len(paths) == 13_320
        tested.append({clip.path for clip in parts[2]})
        trap = [clip for part in parts for clip in part if clip.label == 36]
        assert all(clip.path.startswith("HandstandPushups/v_HandStandPushups_g") for clip in trap)
        assert len(trap) == 128
    assert not tested[0] & tested[1]
    assert not (tested[0] | tested[1]) & tested[2]
    counts = np.bincount([clip.label for clip in read_fold(SAMPLES, 1).test])
    assert (counts.min() > 20, len(counts)) == (True, 101)
