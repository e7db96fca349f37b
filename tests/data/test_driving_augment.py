"""What is done to images and to the world, as pixels and as matrices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from parapos.data import rigid
from parapos.data.augment.driving import DrivingAugment, ImageView, World, fixed_view, random_view, random_world

from .. import golden


def test_the_crop_of_the_full_data_set():
    view = fixed_view(1600, 900, (256, 704), 0.48)
    assert (view.left, view.top, view.left + view.width, view.top + view.height) == (32, 176, 736, 432)


@golden.files("unitr-misc*.npz")
def test_image_matrices_are_the_originals(path):
    data = np.load(path)
    keys = [name for name in data.files if "aug" in name and name != "img_aug_matrix"]
    assert "img_aug_matrix" in data.files, keys
    expected = data["img_aug_matrix"]
    for i in range(len(expected)):
        crop = data["crop"][i]
        view = ImageView(
            float(data["resize"][i]),
            *(int(x) for x in crop[:2]),
            *(int(b - a) for a, b in zip(crop[:2], crop[2:], strict=True)),
            bool(data["flip"][i]),
            float(data["rotate"][i]),
        )
        assert np.allclose(view.matrix, expected[i], atol=1e-4)


@pytest.mark.parametrize(("flip", "degrees"), [(False, 0.0), (True, 0.0), (False, 5.0), (True, -5.0)])
def test_a_marked_pixel_moves_as_the_matrix_says(flip, degrees):
    pixels = np.zeros((225, 400, 3), np.uint8)
    pixels[150:156, 220:226] = 255
    view = ImageView(0.48, 9, 44, 176, 64, flip, degrees)
    rows, columns = np.nonzero(np.array(view.apply(Image.fromarray(pixels)))[..., 0] > 100)
    moved = view.matrix @ np.array([223, 153, 0, 1])
    assert abs(columns.mean() + 0.5 - moved[0]) < 1
    assert abs(rows.mean() + 0.5 - moved[1]) < 1


def test_a_crop_beyond_the_edge_is_black():
    view = ImageView(0.38, 0, 21, 176, 64)  # the image is 152 pixels wide then
    found = np.array(view.apply(Image.new("RGB", (400, 225), "white")))
    assert found[:, :150].min() == 255
    assert found[:, 153:].max() == 0


@given(st.integers(0, 10**6))
def test_pixels_of_a_varied_world_are_the_same(seed):
    """Projecting what was moved, with what moved it taken back, is projecting what was there."""
    rng = np.random.default_rng(seed)
    settings = DrivingAugment()
    world, view = random_world(settings, rng), random_view(400, 225, (64, 176), settings, rng)
    points = rng.uniform(-20, 20, (50, 3))
    lens = np.array([[316, 0, 200, 0], [0, 316, 112, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    look = rigid.transform(np.array([[1.0, 0, 0], [0, 0, -1], [0, 1, 0]]), [0, 0, 0.2])
    lidar2image = lens @ look

    def project(matrix, points):
        h = points @ matrix[:3, :3].T + matrix[:3, 3]
        raw = h[:, :2] / h[:, 2:]
        return h[:, 2], raw @ view.matrix[:2, :2].T + view.matrix[:2, 3]

    depth, expected = project(lidar2image, points)
    again, found = project(lidar2image @ np.linalg.inv(world.matrix), rigid.apply(world.matrix, points))
    seen = depth > 0.5
    assert np.allclose(depth, again, atol=1e-9)
    assert np.allclose(expected[seen], found[seen], atol=1e-3)


@given(st.integers(0, 10**6))
def test_boxes_follow_their_corners(seed):
    rng = np.random.default_rng(seed)
    world = random_world(DrivingAugment(), rng)
    boxes = np.concatenate([rng.uniform(-20, 20, (9, 3)), rng.uniform(0.5, 5, (9, 3)), rng.normal(0, 3, (9, 3))], 1)
    moved = world.boxes(boxes)
    for before, after in zip(rigid.corners(boxes), rigid.corners(moved), strict=True):
        expected = rigid.apply(world.matrix, before)
        gaps = np.linalg.norm(expected[:, None] - after[None], axis=-1)
        assert gaps.min(1).max() < 1e-9  # the same corners, perhaps in another order
    ahead = np.stack([np.cos(boxes[:, 6]), np.sin(boxes[:, 6])], 1) @ world.matrix[:2, :2].T
    heading = np.stack([np.cos(moved[:, 6]), np.sin(moved[:, 6])], 1)
    assert np.allclose(ahead / world.scale, heading, atol=1e-9)
    assert np.allclose(moved[:, 7:9], boxes[:, 7:9] @ world.matrix[:2, :2].T)
    assert ((moved[:, 6] >= -np.pi) & (moved[:, 6] < np.pi)).all()


def test_flips_are_those_of_the_original():
    box = np.array([[1.0, 2, 0, 4, 2, 1, 0.3, 5, 6]])
    assert np.allclose(World(across_x=True).boxes(box), [[1, -2, 0, 4, 2, 1, -0.3, 5, -6]])
    assert np.allclose(World(across_y=True).boxes(box), [[-1, 2, 0, 4, 2, 1, rigid.wrap(-(0.3 + np.pi)), -5, 6]])


@pytest.mark.parametrize(
    "wrong", [{"resize": (0.5, 0.4)}, {"flip": 1.5}, {"paste": (1, 2)}, {"shift": -1.0}, {"scale": (0.0, 1.0)}]
)
def test_impossible_settings_are_told(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DrivingAugment(**wrong)
