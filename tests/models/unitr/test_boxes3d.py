"""Overlap of turned boxes by hand and by drawing points, and what suppression keeps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parapos.models.unitr.boxes3d import (
    corners,
    diou_axis_aligned,
    iou_3d,
    overlap_area,
    rectangles,
    rotated_iou,
    rotated_nms,
)  # fmt: skip


def rectangle(x=0.0, y=0.0, length=1.0, width=1.0, yaw=0.0):
    return torch.tensor([x, y, length, width, yaw], dtype=torch.float64)


def test_known_overlaps():
    square = rectangle()
    assert float(overlap_area(square, rectangle(yaw=math.pi / 4))) == pytest.approx(2 * (math.sqrt(2) - 1), abs=1e-9)
    assert float(rotated_iou(square, rectangle(yaw=math.pi / 4))) == pytest.approx(0.7071067811865, abs=1e-9)
    assert float(rotated_iou(square, square)) == pytest.approx(1, abs=1e-9)
    assert float(rotated_iou(square, rectangle(yaw=math.pi / 2))) == pytest.approx(1, abs=1e-6)
    assert float(rotated_iou(square, rectangle(x=3))) == 0
    assert float(rotated_iou(square, rectangle(x=1))) == pytest.approx(0, abs=1e-5)  # they touch
    assert float(rotated_iou(square, rectangle(length=0.5, width=0.5))) == pytest.approx(0.25, abs=1e-9)
    assert float(rotated_iou(square, rectangle(x=0.5))) == pytest.approx(1 / 3, abs=1e-9)
    far = rectangle(x=5e4, y=-3e4, yaw=0.3)
    assert float(rotated_iou(far, far)) == pytest.approx(1, abs=1e-9)


@given(st.integers(0, 2**31))
def test_overlap_is_the_share_of_points_that_fall_in_both(seed):
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(5, generator=g, dtype=torch.float64) * torch.tensor([2, 2, 3, 3, 6.3]) for _ in range(2))
    a[2:4] += 0.3
    b[2:4] += 0.3
    points = torch.rand(40_000, 2, generator=g, dtype=torch.float64) * 12 - 5

    def inside(r):
        d = points - r[:2]
        c, s = r[4].cos(), r[4].sin()
        local = torch.stack([d[:, 0] * c + d[:, 1] * s, d[:, 1] * c - d[:, 0] * s], 1)
        return (local.abs() <= r[2:4] / 2).all(1)

    drawn = float((inside(a) & inside(b)).double().mean()) * 144
    assert float(overlap_area(a, b)) == pytest.approx(drawn, abs=0.12)
    assert float(overlap_area(a, b)) == pytest.approx(float(overlap_area(b, a)), abs=1e-9)
    turned = [torch.cat([x[:4], x[4:] + math.pi]) for x in (a, b)]
    assert float(overlap_area(*turned)) == pytest.approx(float(overlap_area(a, b)), abs=1e-9)


def test_corners_go_around():
    found = corners(rectangle(1, 2, 4, 2, math.pi / 2))
    assert torch.allclose(found, torch.tensor([[0, 4], [0, 0], [2, 0], [2, 4]], dtype=torch.float64))


def test_heights_count_from_the_centre():
    box = torch.tensor([0, 0, 1.0, 2, 2, 2, 0.3])
    above = torch.tensor([0, 0, 2.0, 2, 2, 2, 0.3])
    assert float(iou_3d(box, above)) == pytest.approx(1 / 3, abs=1e-6)
    assert float(iou_3d(box, torch.tensor([0, 0, 3.5, 2, 2, 2, 0.3]))) == 0
    assert iou_3d(torch.rand(3, 1, 9), torch.rand(1, 4, 9)).shape == (3, 4)


def test_distance_is_taken_from_the_overlap():
    a = torch.tensor([[0.0, 0, 0, 2, 2, 2, 1.0]])
    b = torch.tensor([[1.0, 0, 0, 2, 2, 2, -0.4]])
    want = 1 / 3 - 1 / (9 + 4 + 4)
    assert float(diou_axis_aligned(a, b)) == pytest.approx(want, abs=1e-6)  # yaw is not looked at
    assert float(diou_axis_aligned(a, a)) == pytest.approx(1, abs=1e-6)
    assert float(diou_axis_aligned(a, b + torch.tensor([50.0, 0, 0, 0, 0, 0, 0]))) < 0


def test_the_better_of_two_that_overlap_stays():
    boxes = torch.tensor([[0, 0, 0, 2, 1, 1, 0.0], [0.2, 0, 0, 2, 1, 1, 0.0], [5, 0, 0, 2, 1, 1, 0.0]])
    scores = torch.tensor([0.5, 0.9, 0.4])
    assert rotated_nms(rectangles(boxes), scores, 0.2).tolist() == [1, 2]
    assert rotated_nms(rectangles(boxes), scores, 0.95).tolist() == [1, 0, 2]
    chain = torch.tensor([[0, 0, 0, 2, 1, 1, 0.0], [1, 0, 0, 2, 1, 1, 0.0], [2, 0, 0, 2, 1, 1, 0.0]])
    assert rotated_nms(rectangles(chain), torch.tensor([0.9, 0.8, 0.7]), 0.2).tolist() == [0, 2]  # 1 is gone for 2
    same = rotated_nms(rectangles(boxes[[0, 0]]), torch.tensor([0.5, 0.5]), 1.0)
    assert same.tolist() == [0, 1]  # strictly greater
    assert rotated_nms(torch.zeros(0, 5), torch.zeros(0), 0.2).tolist() == []
