"""What pictures, videos and strips are written."""

import json

import numpy as np
import pytest
from PIL import Image

from parapos import cli
from parapos.data.readers.video import read_frames, write_video
from parapos.predict import drawing
from tests.data.event_trees import load_gen1, small_gen1
from tests.predict.conftest import make_event_detector


def test_a_video_becomes_a_video(detector_run, tmp_path):
    write_video(tmp_path / "v.avi", [np.full((33 // 2 * 2, 48, 3), 20 * i, np.uint8) for i in range(7)], rate=7)
    assert cli.main(["predict", str(detector_run), str(tmp_path / "v.avi"), "--out", str(tmp_path / "out")]) == 0
    (entry,) = json.loads((tmp_path / "out" / "predictions.json").read_text())["files"]
    assert [frame["frame"] for frame in entry["frames"]] == list(range(7))
    assert read_frames(tmp_path / "out" / entry["picture"], range(100)).count == 7


def test_a_video_that_ends_early_keeps_its_frames(detector_run, tmp_path, capsys):
    rng = np.random.default_rng(0)
    write_video(tmp_path / "v.avi", [rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(10)])
    data = (tmp_path / "v.avi").read_bytes()
    (tmp_path / "v.avi").write_bytes(data[: len(data) // 2])
    assert cli.main(["predict", str(detector_run), str(tmp_path / "v.avi"), "--out", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "predictions.json").read_text())
    (entry,), (skipped,) = content["files"], content["skipped"]
    assert 0 < len(entry["frames"]) < 10
    assert f"kept the {len(entry['frames'])} frames before" in skipped["reason"]
    assert read_frames(tmp_path / "out" / entry["picture"], range(100)).count == len(entry["frames"])
    assert "1 of 1 files predicted, 1 with problems" in capsys.readouterr().out


def test_a_recording_becomes_a_strip(tmp_path):
    data = load_gen1("test", small_gen1(tmp_path / "gen1"))
    run = make_event_detector(tmp_path / "run", data.preprocessing)
    words = [str(run), str(data.folder), "--out", str(tmp_path / "out"), "--every", "250"]
    assert cli.main(["predict", *words]) == 0
    entries = json.loads((tmp_path / "out" / "predictions.json").read_text())["files"]
    assert len(entries) == len(data.names)
    for entry in entries:
        with Image.open(tmp_path / "out" / entry["picture"]) as strip:
            cells = len(entry["frames"])
            assert strip.width > min(cells, drawing.COLUMNS) * 304
            assert strip.height > -(-cells // drawing.COLUMNS) * 240


def test_boxes_are_where_they_should_be():
    page = drawing.add_boxes(Image.new("RGB", (400, 300)), [((100, 50, 200, 150), 0, "x", 0.5)])
    pixels = np.array(page)
    assert tuple(pixels[100, 100]) == tuple(pixels[149, 150]) == tuple(pixels[100, 199]) == (0x00, 0x72, 0xB2)
    assert not pixels[60:140, 110:190].any()
    assert not pixels[160:, :].any()


def test_large_pictures_are_reduced_with_their_boxes():
    page = drawing.add_boxes(Image.new("RGB", (3840, 1000)), [((2000, 500, 3000, 900), 0, "x", 0.5)])
    assert page.size == (1920, 500)
    assert tuple(np.array(page)[350, 1001]) == (0x00, 0x72, 0xB2)
    assert not np.array(page)[300:440, 1020:1480].any()


@pytest.mark.parametrize("name", ["x" * 500, "", "Grüße ñ"])
def test_names_of_any_length(name):
    assert drawing.add_bars(Image.new("RGB", (64, 64)), [(name, 1.0)], 5).width == 320
    assert drawing.add_boxes(Image.new("RGB", (64, 64)), [((0, 0, 64, 64), 99, name, 1.0)]).size == (320, 320)


def test_bars_are_as_long_as_scores():
    page = np.array(drawing.add_bars(Image.new("RGB", (400, 400)), [("", 1.0), ("", 0.5), ("", 0.0)], 5))
    bar = np.array([0x9E, 0xCA, 0xE1])
    lengths = (page[400:] == bar).all(-1).sum(1)  # of every row of pixels, 22 to a line
    first, second, third = (int(lengths[22 * i + 5 : 22 * i + 20].max()) for i in range(3))
    assert first == pytest.approx(2 * second, rel=0.02)
    assert third < 5
