"""Anchors, decoding, the best detections and the overlap of boxes."""

from __future__ import annotations

import pytest
import torch

from parapos.models.detector import RawDetections, ciou, decode, postprocess, select_topk
from parapos.models.detector.boxes import make_anchors

from .targets import BINS, STRIDES, random_case


def maps_of(height, width, channels=66, batch=1):
    return [torch.zeros(batch, channels, height // s, width // s) for s in STRIDES]


def test_anchors_are_the_middles_of_cells():
    points, stride = make_anchors(maps_of(32, 32), STRIDES)
    pixels = points * stride
    assert pixels.shape == (21, 2)
    assert pixels[:2].tolist() == [[4, 4], [12, 4]]
    assert pixels[4].tolist() == [4, 12]
    assert pixels[-1].tolist() == [16, 16]
    assert len(make_anchors(maps_of(640, 640), STRIDES).points) == 8400


def test_sure_distances_give_exact_boxes():
    maps = maps_of(64, 96, batch=2)
    for level in maps:
        for side, distance in enumerate((1, 2, 3, 15)):
            level[:, side * 16 + distance] = 1000.0
    boxes, scores = decode(maps, STRIDES, BINS)
    points, stride = make_anchors(maps, STRIDES)
    want = torch.cat([points - torch.tensor([1, 2]), points + torch.tensor([3, 15])], dim=1) * stride
    assert torch.equal(boxes, want.expand(2, -1, -1))
    assert torch.equal(scores, torch.full_like(scores, 0.5))


def test_decoding_is_float32_under_autocast():
    raw, *_ = random_case(0)
    half = [x.detach().bfloat16() for x in raw.o2o]
    with torch.autocast("cpu", torch.bfloat16):
        found = decode(half, STRIDES, BINS)
    for a, b in zip(found, decode([x.float() for x in half], STRIDES, BINS), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_the_best_pairs_of_the_best_anchors():
    scores = torch.tensor([[[0.9, 0.8, 0.1], [0.2, 0.3, 0.05], [0.7, 0.01, 0.02], [0.0, 0.0, 0.0]]])
    boxes = torch.arange(16.0).reshape(1, 4, 4)

    def rows(k):
        return [
            (box[0] // 4, label, round(score, 6)) for *box, score, label in select_topk(boxes, scores, k)[0].tolist()
        ]

    assert rows(2) == [(0, 0, 0.9), (0, 1, 0.8)]
    assert rows(3) == [(0, 0, 0.9), (0, 1, 0.8), (2, 0, 0.7)]
    assert len(rows(100)) == 4


@pytest.mark.parametrize("max_det", [1, 7, 300])
def test_detections_come_best_first(max_det):
    raw, *_ = random_case(1)
    found = postprocess(raw, max_det)
    assert found.shape == (3, min(max_det, 126), 6)
    assert (found[:, :-1, 4] >= found[:, 1:, 4]).all()
    boxes, scores = decode(raw.o2o, STRIDES, BINS)
    for image in range(3):
        for row in found[image]:
            anchor = (boxes[image] == row[:4]).all(1).nonzero()[0, 0]
            assert scores[image, anchor, int(row[5])] == row[4]
    with pytest.raises(ValueError, match="max_det must be at least 1, got 0"):
        postprocess(raw, 0)


def test_anchors_off_the_image_are_not_detected():
    raw, *_ = random_case(2)
    mask = torch.rand(3, 126) < 0.2
    found = postprocess(raw._replace(mask=mask), 126)
    for image in range(3):
        on = int((found[image, :, 4] > 0).sum())
        want = select_topk(*(x[image : image + 1, mask[image]] for x in decode(raw.o2o, STRIDES, BINS)), 126)[0]
        torch.testing.assert_close(found[image, : len(want)], want)
        assert on == min(126, 3 * int(mask[image].sum()))  # classes of anchors on the image, and no other anchor


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ((3, 4, 10, 9), (3, 4, 10, 9), 1.0),
        ((0, 0, 10, 10), (5, 5, 15, 15), 0.031746),
        ((0, 0, 10, 10), (0, 0, 20, 10), 0.446752),
        ((0, 0, 4, 4), (20, 20, 30, 40), -0.526889),
    ],
)
def test_ciou(a, b, want):
    a, b = torch.tensor([a, b], dtype=torch.float32)
    assert ciou(a, b).item() == pytest.approx(want, abs=2e-6)
    assert ciou(b, a).item() == pytest.approx(want, abs=2e-6)


def test_degenerate_boxes_have_finite_overlap_and_gradient():
    a = torch.tensor([[5.0, 5, 5, 5], [0, 0, 0, 8], [0, 0, 8, 0], [1, 1, 3, 3]], requires_grad=True)
    b = torch.tensor([[5.0, 5, 5, 5], [0, 0, 4, 4], [0, 0, 4, 4], [9, 9, 9, 9]])
    overlap = ciou(a, b)
    overlap.sum().backward()
    assert overlap.isfinite().all()
    assert a.grad.isfinite().all()


def test_raw_detections_are_a_tuple():
    """So that tracing, compiling and processes may pass them on."""
    raw = RawDetections((), (), STRIDES, BINS)
    assert raw.mask is None
    assert isinstance(raw, tuple)
