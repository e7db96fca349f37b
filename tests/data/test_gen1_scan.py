"""What `prepare` finds in the clips of GEN1, and what it keeps of them."""

import re
import shutil

import numpy as np
import pytest

from parapos.data import FormatError, gen1_scan, preparations
from parapos.data.events import Events
from parapos.data.gen1 import list_clips, usable
from parapos.data.readers import TruncatedWarning, boxes, dat

from .event_trees import copy_of, made_of, small_gen1
from .event_trees import load_gen1 as load


def job(root, *, quick=False, truncated="error"):
    return preparations.Job(root, complete=False, quick=quick, options={"keep_truncated": truncated == "keep"})


def check(root, **options):
    return preparations.check(gen1_scan, job(root, **options))


def prepare(root, **options):
    """(done now, done before); the first failure is raised."""
    done = preparations.prepare(gen1_scan, job(root, **options))
    if done.failed:
        raise FormatError(done.failed[0])
    return done.now, done.before


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return small_gen1(tmp_path_factory.mktemp("gen1") / "tree")


@pytest.fixture
def tree(made, tmp_path):
    return copy_of(made, tmp_path)


@pytest.mark.parametrize("piece", [1, 977, 10**6])
def test_scans_count(piece, made):
    folder = made / "train"
    name = list_clips(made, "train", complete=False)[0]
    if piece == 1:
        (folder := made / "few").mkdir(exist_ok=True)
        shutil.copy(made / "train" / f"{name}_bbox.npy", folder)
        events = dat.read(made / "train" / f"{name}_td.dat").select(slice(0, None, 50))
        dat.write(folder / f"{name}_td.dat", events)
    found = gen1_scan.scan(folder, name, train=True, piece=piece)
    events = dat.read(folder / f"{name}_td.dat")
    labels = usable(boxes.read(folder / f"{name}_bbox.npy"), train=True)
    inside = (events.x < 304) & (events.y < 240)
    assert (found.events, found.inside, found.backward) == (len(events), inside.sum(), 0)
    assert found.samples == tuple(
        (t, int((labels["t"] == t).sum()), int((inside & (events.t <= t)).sum()))
        for t in sorted(set(labels["t"].tolist()))
    )


@pytest.mark.parametrize("piece", [3, 10**6])
def test_scans_count_steps_back_in_time(piece, tmp_path):
    times = np.array([5, 4, 6, 2, 3, 3, 1, 9])
    dat.write(tmp_path / "a_td.dat", Events.of(times, *[np.zeros(8, int)] * 3))
    boxes.write(tmp_path / "a_bbox.npy", made_of((0, 0, 50, 50), t=4))
    found = gen1_scan.scan(tmp_path, "a", train=True, piece=piece)
    assert (found.backward, found.samples) == (3, ((4, 1, 5),))


def test_preparing_goes_on_where_it_was(tree, monkeypatch):
    scan, left = gen1_scan.scan, iter(range(2))

    def killed(*args, **options):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return scan(*args, **options)

    monkeypatch.setattr(gen1_scan, "scan", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(tree)
    assert len(gen1_scan.load(gen1_scan.open_store(job(tree)))) == 2
    monkeypatch.setattr(gen1_scan, "scan", scan)
    assert prepare(tree) == (2, 2)
    assert prepare(tree) == (0, 4)
    path = next((tree / "val").glob("*_bbox.npy"))
    boxes.write(path, boxes.read(path)[1:])
    assert prepare(tree) == (1, 3)


def test_the_manifest_knows_how_long_samples_are(tree):
    prepare(tree)
    found = load("train", tree, last=9000)
    assert gen1_scan.windows(found) == [len(found.events(i)) for i in range(len(found))]
    path = next((tree / "train").glob("*_bbox.npy"))
    boxes.write(path, boxes.read(path)[:-9])
    with pytest.raises(FormatError, match="is not as it was prepared; run `parapos prepare gen1` again"):
        gen1_scan.windows(load("train", tree))


def test_what_is_wrong_with_clips_is_told(tree):
    first, second = (path for path in sorted((tree / "train").glob("*_td.dat")))
    events = dat.read(first)
    dat.write(first, events.select(np.arange(len(events))[::-1]))
    dat.write(second, Events(events.t, events.x + np.uint16(300), events.y, events.polarity))
    prepare(tree)
    problems = check(tree).problems
    assert problems[0].startswith(f"{first}: time goes back ")
    assert problems[1] == f"{second}: most events are outside 304 x 240"
    assert gen1_scan.survey(job(tree, quick=True))[0].problems == []
    first.write_bytes(b"% Width x\n")
    assert check(tree).problems[0].startswith(f"{first}: at byte 0: Width")


def test_damaged_manifests(tree):
    prepare(tree)
    path = tree / "prepared" / "manifest.jsonl"
    text = path.read_text()
    path.write_text(re.sub(r'"events": \d+', '"events": Infinity', text, count=1))
    with pytest.raises(FormatError, match=r"what the manifest has of train/.* is damaged"):
        gen1_scan.load(gen1_scan.open_store(job(tree)))
    path.write_text(text.replace('"backward"', '"forward"', 1))
    with pytest.raises(FormatError, match=r"what the manifest has of train/.* is damaged"):
        gen1_scan.load(gen1_scan.open_store(job(tree)))


def test_what_was_kept_of_a_truncated_clip_is_not_taken_for_a_whole_one(tree):
    path = next((tree / "val").glob("*_td.dat"))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.warns(TruncatedWarning):
        assert prepare(tree, truncated="keep") == (4, 0)
    assert prepare(tree, truncated="keep") == (0, 4)
    assert len(gen1_scan.windows(load("val", tree, truncated="keep"))) == 4
    with pytest.raises(FormatError, match=r"prepared from a recording that ends early.*'keep' accepts"):
        gen1_scan.windows(load("val", tree))
    with pytest.raises(FormatError, match="truncated='keep' takes"):
        prepare(tree)
