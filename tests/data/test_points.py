"""Point clouds: cells, fragments, normals, variation; against the files of the reference where they are there."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from parapos.data import FormatError, create_dataset, points
from parapos.data.augment.points import PointAugment, elastic, nodes, stretched, vary
from parapos.data.meshes import ball, box
from parapos.data.objects import ObjectAugment
from parapos.data.sampling import Key

GOLDEN = Path(os.environ.get("PARAPOS_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "golden"))
FILES = sorted(GOLDEN.glob("ptv3-transforms*.npz"))
OFF = dict(dropout=0, turn=0, tilt=0, scale=(1.0, 1.0), flip=0, jitter=0, elastic=0, contrast=0, tint=0, grain=0)


def cases():
    for path in FILES:
        with np.load(path) as file:
            held = {key: file[key] for key in file.files}
        for case in sorted({key.split(":")[0] for key in held}):
            arrays = {key.split(":")[1]: value for key, value in held.items() if key.startswith(f"{case}:")}
            yield pytest.param(arrays, id=f"{path.stem}-{case}")


golden = pytest.mark.skipif(not FILES, reason="no golden files here")


@golden
@pytest.mark.parametrize("given", list(cases()))
def test_golden_cells(given):
    coord, cell = given["coord"], points.cells(given["coord"], 0.02)
    assert np.array_equal(cell, given["grid"])
    assert np.array_equal(points.keys(cell), given["ravel"])
    by = points.group(cell)
    assert len(by.count) == len(given["train_index"]) == len(given["train_grid"])
    pairs = set(zip(by.inverse.tolist(), given["inverse"].tolist(), strict=True))
    assert len(pairs) == len(by.count), "the same partition"
    index, chosen, inverse = points.grid_sample(coord, 0.02, np.random.default_rng(0))
    assert np.array_equal(chosen, cell[index])
    assert np.array_equal(cell[index][inverse], cell)
    found = [index for index, _ in points.fragments(coord, 0.02)]
    assert len(found) == len(given["fragments"])
    assert set(np.concatenate(found).tolist()) == set(range(len(coord)))
    for index, theirs in zip(found, given["fragments"], strict=True):
        assert {tuple(c) for c in cell[index]} == {tuple(c) for c in cell[theirs]}
        assert len(index) == len(theirs)


@golden
@pytest.mark.parametrize("given", list(cases()))
def test_golden_transforms(given):
    coord = given["coord"]
    assert np.allclose(points.center_shift(coord), given["center_shift_z"], atol=1e-5)
    assert np.allclose(points.center_shift(coord, z=False), given["center_shift"], atol=1e-5)
    assert np.allclose(points.normalize(coord), given["normalize"], atol=1e-5)
    moved = coord.astype(np.float64)
    for number, (grain, size) in enumerate(PointAugment().elastic_passes):
        assert nodes(moved, grain) == given[f"noise{number}"].shape[:3]
        moved = elastic(moved, given[f"noise{number}"], grain, size)
    assert np.allclose(moved, given["elastic"], atol=1e-5)
    for key in (key for key in given if key.startswith("autocontrast_blend")):
        blend = float(key.removeprefix("autocontrast_blend"))
        assert np.allclose(stretched(given["color"], blend, "official"), given[key], atol=1e-3)
        flat = given["color"].max(0) == given["color"].min(0)
        ours = stretched(given["color"], blend)
        assert np.array_equal(ours[:, flat], given["color"][:, flat])
        assert np.allclose(ours[:, ~flat], given[key][:, ~flat], atol=1e-3)


def cloud(n=400, seed=0):
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(n, 3))
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    coord, color = rng.uniform(-1, 2, (n, 3)), rng.uniform(20, 200, (n, 3)).astype(np.float32)
    return points.Cloud(coord, color, normal, rng.integers(-1, 3, n))


def test_one_point_and_points_that_coincide():
    for coord in (np.ones((1, 3)), np.ones((5, 3))):
        assert points.cells(coord, 0.02).tolist() == [[0, 0, 0]] * len(coord)
        assert np.array_equal(points.normalize(coord), np.zeros_like(coord))
        assert len(points.grid_sample(coord, 0.02, np.random.default_rng(0))[0]) == 1
        assert len(list(points.fragments(coord, 0.02))) == len(coord)
        varied = vary(points.Cloud(coord), np.random.default_rng(0), PointAugment(dropout=1.0))
        assert np.isfinite(varied.coord).all()
        assert len(varied) >= 1


def test_clouds_that_are_too_large_are_refused():
    wide = np.array([[0.0, 0, 0], [1e6, 0, 0]])
    with pytest.raises(FormatError, match=r"5e\+07 cells of 0\.02 along an axis, expected less than 65536"):
        points.cells(wide, 0.02)
    with pytest.raises(FormatError, match="too large for an elastic distortion"):
        nodes(wide.repeat(2, 0) * np.array([1, 1, 1]) + np.eye(3)[[0, 1, 2, 0]] * 1e5, 0.2)


def test_farthest_points_are_the_corners():
    corners = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)], np.float64)
    inner = np.random.default_rng(0).uniform(0.4, 0.6, (50, 3))
    found = points.farthest(np.concatenate([corners[:1], inner, corners[1:]]), 8)
    assert set(found.tolist()) == {0, *range(51, 58)}
    assert points.farthest(np.zeros((3, 3)), 8).tolist() == [0, 0, 0]


def test_normals_of_known_meshes():
    sphere = ball(2.0, 0.1)
    found = points.vertex_normals(sphere.coord, sphere.faces)
    away = sphere.coord / 2.0
    inside = np.abs(sphere.coord[:, 2]) < 1.9  # poles share degenerate triangles
    assert ((found * away).sum(1)[inside] > 0.98).all()
    cube = box((0, 0, 0), (1, 2, 3), 0.5)
    normal, area = points.face_normals(cube.coord, cube.faces)
    assert area.sum() == pytest.approx(22, abs=1e-3)
    center = cube.coord[cube.faces].mean(1) - np.array([0.5, 1, 1.5])
    assert ((normal * center).sum(1) > 0).all(), "outwards"
    lonely = points.vertex_normals(np.zeros((4, 3)), np.array([[0, 1, 2]]))
    assert np.array_equal(lonely, np.zeros((4, 3), np.float32))


def test_points_on_a_mesh_lie_on_it():
    cube = box((0, 0, 0), (1, 1, 1))
    found = points.sample_mesh(cube.coord, cube.faces, 600, np.random.default_rng(0))
    on = np.isclose(found[:, :3], 0, atol=1e-6) | np.isclose(found[:, :3], 1, atol=1e-6)
    assert on.any(1).all()
    assert np.allclose(np.abs(found[:, 3:]).sum(1), 1, atol=1e-5)
    assert (np.bincount(np.abs(found[:, 3:]).argmax(1)) > 150).all()
    with pytest.raises(FormatError, match="a mesh without area"):
        points.sample_mesh(np.zeros((3, 3)), np.array([[0, 1, 2]]), 5, np.random.default_rng(0))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_turns_take_normals_along(axis):
    one = points.turned(points.Cloud(np.eye(3), normal=np.eye(3)), axis, np.pi / 2)
    second, third = (axis + 1) % 3, (axis + 2) % 3
    assert np.allclose(one.coord[second], np.eye(3)[third])  # right-handed
    assert np.allclose(one.coord[third], -np.eye(3)[second])
    assert np.allclose(one.coord, one.normal)
    about = points.turned(points.Cloud(np.ones((1, 3))), axis, 1.0, np.ones(3))
    assert np.allclose(about.coord, 1)


def test_flips_take_normals_along():
    given = cloud()
    found = vary(given, np.random.default_rng(0), PointAugment(**{**OFF, "flip": 1}))
    assert np.array_equal(found.normal, given.normal * [-1, -1, 1])
    for on in (dict(turn=1.0, turn_chance=1), dict(tilt=0.3, tilt_chance=1)):
        found = vary(given, np.random.default_rng(0), PointAugment(**{**OFF, **on}))
        between = given.coord[1:] - given.coord[:-1]  # turned as normals are, wherever the centre is
        after = found.coord[1:] - found.coord[:-1]
        assert np.allclose((after * found.normal[1:]).sum(1), (between * given.normal[1:]).sum(1))
        assert not np.allclose(found.normal, given.normal, atol=0.1)


def test_nothing_happens_when_all_is_off():
    given = cloud()
    found = vary(given, np.random.default_rng(0), PointAugment(**OFF))
    for name in ("coord", "color", "normal", "segment"):
        assert np.array_equal(getattr(found, name), getattr(given, name)), name


@pytest.mark.parametrize(
    ("on", "check"),
    [
        (dict(dropout=1), lambda a, b: len(b) == 320 and len(np.unique(b.coord, axis=0)) == 320),
        (dict(turn=1.0, turn_chance=1), lambda a, b: np.allclose(a.coord[:, 2], b.coord[:, 2])),
        (dict(tilt=0.2, tilt_chance=1), lambda a, b: np.allclose((b.normal**2).sum(1), 1)),
        (dict(scale=(0.5, 0.6)), lambda a, b: (b.coord / a.coord).min() >= 0.5 and np.ptp(b.coord / a.coord) < 1e-9),
        (dict(scale=(0.5, 2.0), anisotropic=True), lambda a, b: len(np.unique((b.coord / a.coord).round(9))) == 3),
        (dict(shift=0.3), lambda a, b: (np.abs(b.coord - a.coord) <= 0.3).all()),
        (dict(flip=1), lambda a, b: np.allclose(b.coord * [-1, -1, 1], a.coord)),
        (dict(jitter=0.01, jitter_limit=0.015), lambda a, b: 0.014 < np.abs(b.coord - a.coord).max() <= 0.0150001),
        (dict(elastic=1), lambda a, b: 0.05 < np.abs(b.coord - a.coord).max() < 3),
        (dict(contrast=1), lambda a, b: np.ptp(b.color, axis=0).min() > np.ptp(a.color, axis=0).min()),
        (dict(tint=1), lambda a, b: np.ptp(b.color - a.color, axis=0).max() < 1e-3),
        (dict(grain=1), lambda a, b: 10 < (b.color - a.color).std() < 15),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_each_step_does_what_it_says(on, check):
    given = cloud()
    kept = {name: np.array(value) for name, value in vars(given).items() if value is not None}
    settings = PointAugment(**{**OFF, **on})
    found = vary(given, np.random.default_rng(1), settings)
    again = vary(given, np.random.default_rng(1), settings)
    assert np.array_equal(found.coord, again.coord)
    assert not np.array_equal(found.coord, given.coord) or not np.array_equal(found.color, given.color)
    assert check(given, found)
    assert all(np.array_equal(getattr(given, name), value) for name, value in kept.items()), "what is given stays"


def test_scannets_variation_has_the_papers_statistics():
    given = cloud(1000)
    turned, dropped = 0, 0
    for seed in range(60):
        found = vary(given, np.random.default_rng(seed), PointAugment())
        dropped += len(found) == 800
        turned += len(found) == 1000 and abs(float((found.normal * given.normal).sum(1).mean())) < 0.9
    assert 5 <= dropped <= 22  # a fifth of 60
    assert 20 <= turned <= 55


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (dict(flip=2), "flip must be a chance"),
        (dict(scale=(2.0, 1.0)), "scale must be two positive"),
        (dict(dropout_share=1.0), "dropout_share"),
        (dict(jitter=-1), "jitter must be 0 or more"),
        (dict(elastic_passes=((0, 1),)), "elastic_passes"),
        (dict(compat="x"), "compat must be"),
    ],
)
def test_settings_are_checked(wrong, told):
    for cls in (PointAugment, ObjectAugment):
        with pytest.raises(ValueError, match=told):
            cls(**wrong)


def test_crops_keep_the_nearest():
    given = cloud(500)
    index = points.sphere_crop(given.coord, 100, np.random.default_rng(0))
    distance = np.linalg.norm(given.coord - given.coord[index[0]], axis=1)
    assert len(index) == 100
    assert (np.diff(distance[index]) >= 0).all()
    assert distance[index].max() <= np.delete(distance, index).min()
    assert np.array_equal(points.sphere_crop(given.coord, 500, np.random.default_rng(0)), np.arange(500))


def test_features():
    one = replace(cloud(5), color=np.full((5, 3), 255.0))
    found = points.features(one, ("color", "normal", "coord"))
    assert found.shape == (5, 9)
    assert (found[:, :3] == 1).all()
    assert (points.features(points.Cloud(one.coord), ("color",)) == 0).all()
    for wrong in ((), ("colour",), ("color", "color")):
        with pytest.raises(ValueError, match="features must be some of"):
            points.check_features(wrong)


@settings(max_examples=30, deadline=None)
@drawn(count=st.integers(1, 200), size=st.sampled_from([0.1, 0.5, 3.0]), seed=st.integers(0, 5))
def test_samples_and_fragments_of_any_cloud(count, size, seed):
    coord = np.random.default_rng(seed).normal(size=(count, 3))
    cell = points.cells(coord, size)
    assert (cell.min(0) == 0).all()
    index, chosen, inverse = points.grid_sample(coord, size, np.random.default_rng(seed))
    assert len(np.unique(chosen, axis=0)) == len(chosen) == len(np.unique(cell, axis=0))
    assert np.array_equal(chosen, cell[index])
    assert np.array_equal(chosen[inverse], cell)
    passes = list(points.fragments(coord, size))
    assert len(passes) == np.unique(cell, axis=0, return_counts=True)[1].max()
    assert set(np.concatenate([members for members, _ in passes]).tolist()) == set(range(count))
    for members, where in passes:
        assert np.array_equal(where, cell[members])
        assert len(members) == len(chosen)


def test_all_members_of_a_cell_are_taken_alike():
    coord = np.zeros((4, 3)) + np.arange(4)[:, None] * 0.001
    found = [int(points.grid_sample(coord, 1.0, np.random.default_rng(i))[0][0]) for i in range(400)]
    assert np.bincount(found, minlength=4).min() > 70


@pytest.mark.parametrize("make", ["rooms", "shapes"])
def test_what_is_read_is_not_written_to(make):
    dataset = create_dataset(make, "train", train=2)
    held = dataset.load(1)
    before = {k: np.array(v) for k, v in vars(held).items() if v is not None} if make == "rooms" else np.array(held)
    first = dataset[Key(1, 0)]
    for epoch in range(3):
        dataset[Key(1, epoch)]
    again = dataset[Key(1, 0)]
    assert all(torch.equal(torch.as_tensor(first[key]), torch.as_tensor(again[key])) for key in first)
    if make == "rooms":
        assert all(np.array_equal(value, getattr(dataset.load(1), key)) for key, value in before.items())
    else:
        assert np.array_equal(before, dataset.load(1))
