"""Boxes of a driving scene are drawn where a camera and a view from above have them."""

import numpy as np
import pytest
import torch

from parapos.data import rigid
from parapos.data.nuscenes_frames import Camera
from parapos.predict.driving import ABOVE, DrivingFrame, draw_above, draw_camera, edges_in

from ..driving import driving

LENS = np.array([[316.0, 0, 200, 0], [0, 316, 112, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
FORWARD = np.array([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, -0.5], [0, 0, 0, 1]])  # looks along y, from y = 0.5
CAMERA = Camera("", "", 400, 225, LENS @ FORWARD)


def test_edges_are_between_projected_corners():
    box = np.array([1.0, 10, -0.5, 4, 2, 1.5, 0.3])
    lines = edges_in(box, CAMERA)
    assert len(lines) == 12
    x, y, z = rigid.corners(box[None])[0].T
    want = np.stack([316 * x / (y - 0.5) + 200, 316 * -z / (y - 0.5) + 112], 1)
    ends = np.array(lines).reshape(-1, 2)
    assert all(np.abs(ends - corner).sum(1).min() < 1e-9 for corner in want)
    assert all(np.abs(want - end).sum(1).min() < 1e-9 for end in ends)


def test_what_is_behind_a_camera_is_not_drawn():
    assert edges_in(np.array([1.0, -10, 0, 4, 2, 1.5, 0.0]), CAMERA) == []
    assert edges_in(np.array([80.0, 10, 0, 4, 2, 1.5, 0.0]), CAMERA) == []  # beside the image
    beside = edges_in(np.array([1.5, 0.5, 0, 1, 8, 1, 0.0]), CAMERA)  # reaches from before it to behind it
    assert len(beside) == 8  # the face behind is gone, and four edges are cut
    assert np.isfinite(beside).all()


@pytest.mark.parametrize("kind", ["truth", "answer"])
def test_a_camera_shows_a_true_box_and_an_answer(kind):
    frame = driving("val").frames[0]
    number = next(i for i, row in enumerate(frame.objects) if row["view"] == 0)
    camera, images = frame.cameras[0], driving("val").images(frame)
    one = {"box": frame.objects["box"][number][:7].tolist(), "class": 3, "name": "bus", "score": 0.5}
    given = ([], [one]) if kind == "truth" else ([one], [])
    plain, drawn = (np.array(draw_camera(images[0], camera, *boxes)).astype(int) for boxes in (([], []), given))
    changed = np.argwhere((plain != drawn).any(2))[:, ::-1]
    ends = np.array(edges_in(np.array(one["box"]), camera)).reshape(-1, 2).clip(0, [400, 225])
    assert len(changed) > 20
    if kind == "truth":
        assert (changed.min(0) >= ends.min(0) - 2).all()
        assert (changed.max(0) <= ends.max(0) + 2).all()
        assert (drawn[changed[:, 1], changed[:, 0]] == 255).all()


def test_from_above_x_is_to_the_right_and_y_up():
    points = torch.tensor([[5.0, -8.0, 0, 0, 0], [-6.0, 9.0, 0, 0, 0.5]])  # the second is of an older sweep
    frame = DrivingFrame({"points": points}, torch.empty(0), {}, extent=(-10.0, -10.0, 10.0, 10.0))
    empty = np.array(draw_above(frame, []))
    dot, older = empty[ABOVE - 60, 450], empty[ABOVE - 570, 120]
    assert dot.max() < 250
    assert older.min() == 255
    box = {"box": [5.0, 5.0, 0, 4.0, 2.0, 1, 0.0], "class": 0}  # its front is to the right
    page = np.array(draw_above(frame, [box])).astype(int)
    rows, cols = np.nonzero((page != empty).any(2))
    assert (cols.min(), cols.max()) == pytest.approx((390, 510), abs=2)
    assert (rows.min(), rows.max()) == pytest.approx((ABOVE - 480, ABOVE - 420), abs=2)
    middle = cols[np.abs(rows - (ABOVE - 450)) <= 1]
    assert ((middle > 455) & (middle < 500)).any()
    assert not ((middle > 400) & (middle < 445)).any()
