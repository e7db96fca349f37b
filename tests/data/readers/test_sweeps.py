"""LiDAR sweeps of nuScenes."""

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.readers import sweeps

from ... import golden
from .fuzz import mutations, survive


def test_round_trip_and_empty(tmp_path):
    points = np.arange(35, dtype=np.float32).reshape(7, 5)
    sweeps.write(tmp_path / "a.pcd.bin", points)
    assert np.array_equal(sweeps.read(tmp_path / "a.pcd.bin"), points)
    (tmp_path / "none.pcd.bin").write_bytes(b"")
    assert sweeps.read(tmp_path / "none.pcd.bin").shape == (0, 5)


def test_a_cut_sweep_says_where(tmp_path):
    (path := tmp_path / "a.pcd.bin").write_bytes(bytes(50))
    with pytest.raises(FormatError, match="at byte 40: the file ends within a point: 50 bytes"):
        sweeps.read(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e7])
def test_points_that_cannot_be(tmp_path, value):
    points = np.zeros((3, 5), np.float32)
    points[1, 2] = value
    sweeps.write(path := tmp_path / "a.pcd.bin", points)
    with pytest.raises(FormatError, match="at byte 20: point 1 is"):
        sweeps.read(path)


def test_damaged_sweeps_are_read_or_refused(tmp_path):
    seed = np.random.default_rng(0).normal(0, 20, (30, 5)).astype("<f4").tobytes()
    read, refused = survive(sweeps.read, mutations([seed], 400), tmp_path / "a.bin", per_byte=20, least=100_000)
    assert read > 20
    assert refused > 20


def test_a_real_sweep():
    folder = golden.SAMPLES / "nuscenes" / "samples" / "LIDAR_TOP"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    (path,) = folder.iterdir()
    points = sweeps.read(path)
    assert points.shape == (34_688, 5)
    assert points[:, 3].min() >= 0
    assert points[:, 3].max() <= 255
    assert set(np.unique(points[:, 4])) <= set(range(32))
