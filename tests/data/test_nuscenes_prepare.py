"""Preparing nuScenes, and files that are cut, missing or of another size: what is wrong is told."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from parapos.data import FormatError, nuscenes_prepare, preparations
from parapos.data.nuscenes_tree import write_tiny
from parapos.data.readers.nuscenes_tables import TABLES

from ..driving import driving, tree


@pytest.fixture
def copy(tmp_path):
    root = tmp_path / "nuscenes"
    shutil.copytree(tree(), root)
    return root


def test_prepare_resumes_and_checks(tmp_path):
    write_tiny(root := tmp_path / "nuscenes", keyframes=1)
    job = preparations.Job(root, complete=False)
    first = preparations.prepare(nuscenes_prepare, job)
    assert (first.now, first.before) == (2, 0)
    again = preparations.prepare(nuscenes_prepare, job)
    assert (again.now, again.before) == (0, 2)
    store = nuscenes_prepare.open_store(job)
    (store.folder / "train" / "scene-0061" / "points.npy").unlink()
    assert preparations.check(nuscenes_prepare, job).problems
    repaired = preparations.prepare(nuscenes_prepare, job)
    assert (repaired.now, repaired.before) == (1, 1)
    assert not preparations.check(nuscenes_prepare, job).problems
    whole = preparations.check(nuscenes_prepare, replace(job, complete=True)).problems
    assert any("train: scenes: found 1, expected 8" in problem for problem in whole)
    with pytest.raises(FormatError, match="is there already"):
        write_tiny(root)


def test_a_digit_of_a_calibration_is_noticed(tmp_path):
    """Which changes the geometry of every frame and not the size of a file."""
    write_tiny(root := tmp_path / "nuscenes", keyframes=1)
    job = preparations.Job(root, complete=False)
    preparations.prepare(nuscenes_prepare, job)
    before = driving("val", root).frames[0].lidar2global
    path = root / "v1.0-mini" / "calibrated_sensor.json"
    size = path.stat().st_size
    assert "1.84" in path.read_text()  # the height of the LiDAR
    path.write_text(path.read_text().replace("1.84", "1.85"))
    assert path.stat().st_size == size
    assert f"{path}: changed since it was prepared" in " ".join(preparations.check(nuscenes_prepare, job).problems)
    again = preparations.prepare(nuscenes_prepare, job)
    assert (again.now, again.before) == (2, 0)
    moved = driving("val", root).frames[0].lidar2global - before
    assert np.linalg.norm(moved[:3, 3]) == pytest.approx(0.01)
    assert not preparations.check(nuscenes_prepare, job).problems


def test_tables_are_hashed_once(tmp_path, monkeypatch):
    """However many scenes they have: those of the full data set have gigabytes."""
    write_tiny(root := tmp_path / "nuscenes", keyframes=1)
    opened, digest = [], hashlib.file_digest
    monkeypatch.setattr(
        "parapos.data.prepared.hashlib.file_digest", lambda f, kind: opened.append(f.name) or digest(f, kind)
    )
    job = preparations.Job(root, complete=False)
    preparations.prepare(nuscenes_prepare, job)
    preparations.check(nuscenes_prepare, job)
    tables = [Path(name).name for name in opened if Path(name).parent == root / "v1.0-mini"]
    assert sorted(tables) == sorted(f"{name}.json" for name in TABLES)


def test_what_is_not_prepared_or_damaged_is_told(copy, tmp_path):
    write_tiny(root := tmp_path / "raw", keyframes=1)
    with pytest.raises(FormatError, match=r"no prepared frames of val.*parapos prepare nuscenes --tables v1.0-mini"):
        driving("val", root)
    with pytest.raises(FormatError, match="3 prepared frames of val, expected 81"):
        driving("val", copy, complete=True)
    with pytest.raises(FormatError, match=r"v1\.0-mini has train, val"):
        driving("test", copy)
    folder = copy / "prepared" / "v1.0-mini" / "val" / "scene-0103"
    (folder / "frames.json").write_text(json.dumps([{"token": 1}]))
    with pytest.raises(FormatError, match=r"frames\.json: damaged"):
        driving("val", copy)
    (folder / "objects.npy").write_bytes(b"no array")
    with pytest.raises(FormatError, match=r"objects\.npy: expected"):
        driving("val", copy)


def test_check_reads_every_file(copy):
    frame = driving("val", copy).frames[2]
    older = next(sweep for sweep in frame.sweeps if sweep.file.startswith("sweeps/"))
    (copy / older.file).write_bytes(b"cut")
    Image.new("RGB", (10, 10)).save(copy / frame.cameras[3].file)
    problems = preparations.check(nuscenes_prepare, preparations.Job(copy, complete=False)).problems
    assert any(older.token in problem and older.file in problem for problem in problems)
    assert any(frame.cameras[3].token in problem for problem in problems)


def test_a_missing_sensor_file_is_a_problem(copy):
    frame = driving("val", copy).frames[0]
    (copy / frame.cameras[0].file).unlink()
    whole = preparations.check(nuscenes_prepare, preparations.Job(copy, quick=True)).problems
    assert any(frame.cameras[0].file in problem and frame.cameras[0].token in problem for problem in whole)


def test_a_cut_sweep_names_file_and_token(copy):
    data = driving("val", copy)
    sweep = data.frames[0].sweeps[0]
    (copy / sweep.file).write_bytes((copy / sweep.file).read_bytes()[:-7])
    with pytest.raises(FormatError, match=f"{sweep.file}: at byte .*; sample_data {sweep.token}"):
        data[0]
    (copy / sweep.file).write_bytes(b"")
    for one in data.frames[0].sweeps:
        (copy / one.file).write_bytes(b"")
    assert data[0]["points"].shape == (0, 5)  # no point is no mistake
    (copy / sweep.file).unlink()
    with pytest.raises(FormatError, match=f"{sweep.file}: No such file.*sample_data {sweep.token}"):
        data[0]


def test_an_image_of_another_size_names_file_and_token(copy):
    data = driving("val", copy)
    camera = data.frames[1].cameras[2]
    Image.new("RGB", (300, 225)).save(copy / camera.file)
    with pytest.raises(FormatError, match=f"{camera.file}: 300 x 225 pixels, expected 400 x 225.*{camera.token}"):
        data[1]
    (copy / camera.file).write_bytes(b"no picture")
    with pytest.raises(FormatError, match=f"{camera.file}: .*; sample_data {camera.token}"):
        data[1]
    (copy / camera.file).unlink()
    with pytest.raises(FormatError, match=f"sample_data {camera.token}"):
        data[1]
    masked = driving("val", copy, missing="mask")[1]
    assert masked["image_mask"].tolist() == [True, True, False, True, True, True]
    assert masked["lidar2image"][2].any()
