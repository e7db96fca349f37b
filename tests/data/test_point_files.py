"""Point clouds of one's own: what each format may say, and normals of points without faces."""

import os
from pathlib import Path

import numpy as np
import pytest

from parapos.data import FormatError, point_files
from parapos.data.meshes import ball
from parapos.data.readers import off, ply

from .readers.fuzz import mutations, survive

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
COORD = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], np.float32)
FACES = np.array([[0, 1, 2], [0, 2, 3]])
COLOR, LABEL = np.full((4, 3), 200, np.uint8), np.array([0, 1, 1, -1])


def columns(**more):
    return {axis: COORD[:, i] for i, axis in enumerate("xyz")} | more


def test_all_that_a_ply_may_have(tmp_path):
    more = dict.fromkeys(("red", "green", "blue"), COLOR[:, 0]) | {"label": LABEL.astype(np.int32)}
    ply.write(tmp_path / "a.ply", columns(**more), FACES)
    cloud, faces = point_files.read(tmp_path / "a.ply")
    assert np.array_equal(cloud.coord, COORD)
    assert np.array_equal(cloud.color, COLOR)
    assert cloud.segment.tolist() == LABEL.tolist()
    assert np.allclose(cloud.normal, [0, 0, 1], atol=1e-6)  # of the faces
    assert len(faces) == 2


def test_a_ply_of_coordinates_alone(tmp_path):
    ply.write(tmp_path / "a.PLY", columns(), form="binary_big_endian")
    cloud, faces = point_files.read(tmp_path / "a.PLY")
    assert (cloud.color, cloud.normal, cloud.segment, faces) == (None, None, None, None)


def test_off(tmp_path):
    off.write(tmp_path / "a.off", COORD, FACES, fused=True)
    cloud, faces = point_files.read(tmp_path / "a.off")
    assert np.array_equal(cloud.coord, COORD)
    assert np.allclose(cloud.normal, [0, 0, 1], atol=1e-6)
    assert np.array_equal(faces, FACES)


@pytest.mark.parametrize("names", [("coord", "color", "normal", "segment"), ("xyz", "rgb", "normals", "labels")])
def test_npz(names, tmp_path):
    normal = np.tile(np.array([0.0, 1.0, 0.0]), (4, 1))
    arrays = dict(zip(names, (COORD.astype(np.float64), COLOR / 255, normal, LABEL.astype(np.float32)), strict=True))
    np.savez(tmp_path / "a.npz", **arrays)
    cloud, faces = point_files.read(tmp_path / "a.npz")
    assert np.array_equal(cloud.coord, COORD)
    assert np.array_equal(cloud.color, COLOR)
    assert np.array_equal(cloud.normal, normal)
    assert cloud.segment.tolist() == LABEL.tolist()
    assert faces is None


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"color": COLOR}, "no array coord or xyz"),
        ({"coord": COORD[:, :2]}, r"array 'coord' is \(4, 2\), expected \(n, 3\)"),
        ({"coord": COORD, "xyz": COORD}, "'coord' and 'xyz' mean the same"),
        ({"coord": COORD, "color": COLOR[:2]}, "color of 2 points, expected 4"),
        ({"coord": COORD * np.nan}, "coordinates"),
        ({"coord": COORD, "color": COLOR.astype(np.int32) * 9}, "colours outside"),
        ({"coord": COORD, "label": LABEL[:2]}, r"labels \(2,\), expected \(4,\)"),
        ({"coord": COORD, "label": LABEL + 0.5}, "not whole numbers"),
        ({"coord": COORD, "label": LABEL, "segment": LABEL}, "'segment' and 'label' mean the same"),
        ({"coord": COORD[:0]}, "no points, expected at least one"),
    ],
)
def test_refused(arrays, told, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(FormatError, match=rf"a\.npz: at byte 0: .*{told}"):
        point_files.read(tmp_path / "a.npz")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.pcd").write_text("VERSION 0.7")
    with pytest.raises(FormatError, match=r"a file \.pcd, expected one of \.ply, \.off, \.npz"):
        point_files.read(tmp_path / "a.pcd")


def test_labels_must_be_classes():
    point_files.check_labels(np.array([-1, 0, 8]), 9)
    for labels in ([0, 9], [-2, 0]):
        with pytest.raises(FormatError, match="expected -1 to 8, the model's classes"):
            point_files.check_labels(np.array(labels), 9)


@pytest.mark.parametrize("away", [False, True])
def test_estimated_normals_of_a_ball(away, monkeypatch):
    monkeypatch.setattr(point_files, "AT_ONCE", 100)
    coord = np.unique(ball(1.0, 0.15).coord.round(6), axis=0)
    normal = point_files.estimate_normals(coord, np.arange(len(coord)), np.zeros(3), away=away)
    inward = -coord / np.linalg.norm(coord, axis=1, keepdims=True)
    cosine = (normal * inward).sum(1) * (-1 if away else 1)
    assert np.quantile(cosine, 0.02) > 0.95
    some = np.array([7, 3])
    assert np.array_equal(point_files.estimate_normals(coord, some, np.zeros(3), away=away), normal[some])


def test_estimated_normals_of_few_points():
    assert point_files.estimate_normals(np.zeros((1, 3)), np.arange(1), np.zeros(3)).tolist() == [[0, 0, 0]]
    assert not point_files.estimate_normals(np.zeros((30, 3)), np.arange(30), np.zeros(3)).any()  # all coincide


@pytest.mark.parametrize("suffix", [".ply", ".off", ".npz"])
@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.full)])
def test_broken_files(suffix, count, tmp_path):
    more = dict.fromkeys(("red", "green", "blue"), COLOR[:, 0]) | {"label": LABEL.astype(np.int32)}
    ply.write(tmp_path / "a.ply", columns(**more), FACES)
    off.write(tmp_path / "a.off", COORD, FACES)
    np.savez(tmp_path / "a.npz", coord=COORD, color=COLOR, label=LABEL)
    files = mutations([(tmp_path / f"a{suffix}").read_bytes()], count)
    good, refused = survive(point_files.read, files, tmp_path / f"b{suffix}", per_byte=200, least=600_000)
    assert good > count // 100
    assert refused > count // 10


@pytest.mark.skipif(not (SHARED / "samples/scannet").is_dir(), reason="no real scenes here")
def test_a_real_scene():
    (path,) = sorted(SHARED.glob("samples/scannet/scans/scene0000_00/*_vh_clean_2.ply"))
    cloud, faces = point_files.read(path)
    assert (len(cloud), len(faces), cloud.color.dtype, cloud.segment) == (81369, 153587, np.uint8, None)
    assert np.allclose(np.linalg.norm(cloud.normal, axis=1)[np.unique(faces)], 1, atol=0.05)
