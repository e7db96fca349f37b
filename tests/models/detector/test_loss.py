"""The assigner against plain loops, and the loss against numbers, at its edges, and however boxes are written down."""

from __future__ import annotations

import pytest
import torch

from parapos.models.detector import RawDetections, ciou, detection_loss
from parapos.models.detector.assign import TaskAlignedAssigner
from parapos.models.detector.boxes import decode_boxes, flatten, make_anchors
from parapos.models.detector.loss import distribution_loss

from .targets import BINS, STRIDES, padded, random_case, to_pixels


def by_loops(topk, logits, predicted, anchors, boxes, labels, counts):
    """{(image, anchor): (box, score)}: the assignment as it is described, one pair at a time."""
    found = {}
    pixels = anchors.points * anchors.stride
    for b in range(len(boxes)):
        worth, overlap = (torch.zeros(int(counts[b]), len(pixels)) for _ in range(2))
        for g in range(int(counts[b])):
            x1, y1, x2, y2 = boxes[b, g].tolist()
            for a, (x, y) in enumerate(pixels.tolist()):
                if min(x - x1, y - y1, x2 - x, y2 - y) > 1e-9:
                    overlap[g, a] = ciou(boxes[b, g], predicted[b, a]).clamp(min=0)
                    worth[g, a] = logits[b, labels[b, g], a].sigmoid() ** 0.5 * overlap[g, a] ** 6
        taken = [
            [a for a in worth[g].argsort(descending=True)[:topk].tolist() if worth[g, a] > 0] for g in range(len(worth))
        ]
        owner = {}
        for a in range(len(pixels)):
            takers = [g for g, anchors_of in enumerate(taken) if a in anchors_of]
            if takers:
                owner[a] = takers[0] if len(takers) == 1 else int(overlap[:, a].argmax())
        for a, g in owner.items():
            mine = [other for other, box in owner.items() if box == g]
            best_worth, best_overlap = worth[g, mine].max(), overlap[g, mine].max()
            found[b, a] = g, (worth[g, a] * best_overlap / (best_worth + 1e-9)).item()
    return found


@pytest.mark.parametrize("topk", [1, 3, 10, 500])
@pytest.mark.parametrize("seed", range(3))
def test_the_assigner_agrees_with_plain_loops(topk, seed):
    raw, boxes, labels, counts = random_case(seed, most=8)
    distances, logits = (x.detach() for x in flatten(raw.o2m, 16))
    anchors = make_anchors(raw.o2m, STRIDES)
    args = (logits, decode_boxes(distances, BINS, anchors), anchors, boxes, labels, counts)
    want = by_loops(topk, *args)
    found = TaskAlignedAssigner(topk)(*args)
    pairs = zip(*(x.tolist() for x in found), strict=True)
    found = {(image, anchor): (box, score) for image, anchor, box, score in pairs}
    assert len(want) > 3
    assert found.keys() == want.keys()
    for key, (box, score) in want.items():
        assert found[key] == (box, pytest.approx(score, rel=1e-5, abs=1e-8))


def small_case(topk):
    """A 4 x 4 grid of stride 8; every predicted box reaches 8 px around its centre."""
    anchors = make_anchors([torch.zeros(1, 1, 4, 4)], [8])
    pixels = anchors.points * anchors.stride
    predicted = torch.cat([pixels - 8, pixels + 8], dim=1)[None]
    logits = torch.tensor([0.25, 0.36]).logit()[None, :, None].expand(1, 2, 16)
    boxes = torch.tensor([[[0.0, 0, 16, 16], [4, 4, 28, 28], [0, 0, 0, 0]]])
    labels, counts = torch.tensor([[0, 1, 0]]), torch.tensor([2])
    return TaskAlignedAssigner(topk)(logits, predicted, anchors, boxes, labels, counts)


def test_assignment_fixture():
    found = small_case(10)
    order = found.anchor.argsort()
    assert found.anchor[order].tolist() == [0, 1, 4, 5, 6, 9, 10]
    assert found.box[order].tolist() == [0, 0, 0, 1, 1, 1, 1]
    torch.testing.assert_close(found.score[order], torch.tensor([0.3513] * 3 + [0.41667] * 4), rtol=0, atol=5e-5)
    one = small_case(1)
    assert sorted(one.box.tolist()) == [0, 1]
    torch.testing.assert_close(one.score[one.box.argsort()], torch.tensor([0.3513, 0.41667]), rtol=0, atol=5e-5)


def test_distribution_fixture():
    sides = torch.tensor([[0, 3.25, 7.5, 20]])
    assert distribution_loss(torch.zeros(1, 4, 16), sides).item() == pytest.approx(2.772589, abs=1e-5)
    assert distribution_loss(0.1 * BINS.expand(1, 4, 16), sides).item() == pytest.approx(2.983151, abs=1e-5)


def sine_case():
    def level(number, side):
        axes = (torch.arange(float(n)) for n in (3, 67, side, side))
        b, c, i, j = torch.meshgrid(*axes, indexing="ij")
        return torch.sin(0.1 * c + 0.7 * i + 1.3 * j + number + 0.5 * b).requires_grad_()

    maps = tuple(level(number, side) for number, side in enumerate((8, 4, 2)))
    boxes = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.25, 0.3, 0.2, 0.3], [0.6, 0.4, 0.7, 0.6]])
    targets = padded(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0]), to_pixels(boxes, 64, 64), 3)
    return RawDetections(maps, maps, STRIDES, BINS), targets


def divided(sums):
    """(3, 2): box, cls and dfl of both branches, each divided by its own weight."""
    return torch.stack([part.sum(0) for part in sums.parts.values()]) / sums.weight.clamp(min=1)


def test_loss_fixture():
    raw, targets = sine_case()
    sums = detection_loss(raw, *targets)
    want = torch.tensor([[6.721812, 1.248588], [227.209106, 273.568329], [4.175416, 0.772652]])
    torch.testing.assert_close(divided(sums), want, rtol=1e-4, atol=0)
    torch.testing.assert_close(sums.weight, torch.tensor([1.203868, 0.184610]), rtol=1e-4, atol=0)
    assert 3 * divided(sums).sum().item() == pytest.approx(1541.08777, rel=1e-4)
    none = detection_loss(
        raw, torch.zeros(3, 0, 4), torch.zeros(3, 0, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    )
    assert (3 * divided(none).sum(1)).tolist() == [0, pytest.approx(1641.793213, rel=1e-4), 0]


def gradients(raw, sums):
    levels = [*raw.o2m, *raw.o2o]
    return torch.autograd.grad(divided(sums).sum(), levels, retain_graph=True)


def assert_same(raw, a, b):
    for name in a.parts:
        torch.testing.assert_close(a.parts[name], b.parts[name], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.weight, b.weight)
    for x, y in zip(gradients(raw, a), gradients(raw, b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_the_order_of_boxes_and_padding_do_not_matter():
    raw, boxes, labels, counts = random_case(3)
    want = detection_loss(raw, boxes, labels, counts)
    order = torch.stack([torch.cat([torch.randperm(n), torch.arange(n, 6)]) for n in counts.tolist()])
    mixed = boxes.gather(1, order[..., None].expand(-1, -1, 4)), labels.gather(1, order)
    assert_same(raw, detection_loss(raw, *mixed, counts), want)
    wide = torch.cat([boxes, torch.full((3, 4, 4), torch.nan)], dim=1), torch.cat([labels, labels[:, :4]], dim=1)
    assert_same(raw, detection_loss(raw, *wide, counts), want)


def test_an_anchor_learns_one_box_and_a_box_has_its_share():
    """Boxes that overlap may win an anchor that two others want, so only their sum is bound to topk each."""
    for seed in range(4):
        raw, boxes, labels, counts = random_case(seed)
        distances, logits = (x.detach() for x in flatten(raw.o2m, 16))
        anchors = make_anchors(raw.o2m, STRIDES)
        predicted = decode_boxes(distances, BINS, anchors)
        for topk in (1, 10):
            found = TaskAlignedAssigner(topk)(logits, predicted, anchors, boxes, labels, counts)
            places = found.image * len(anchors.points) + found.anchor
            assert len(places.unique()) == len(places)
            assert (found.image.bincount(minlength=3) <= topk * counts).all()
            apart = torch.tensor([[[0.0, 0, 40, 60], [44, 4, 90, 60]]]).expand(3, 2, 4)
            found = TaskAlignedAssigner(topk)(logits, predicted, anchors, apart, labels[:, :2], torch.full((3,), 2))
            assert (found.image * 2 + found.box).bincount(minlength=6).max() <= topk


EDGES = {
    "none": [],
    "thin": [(10.0, 10.0, 10.5, 60.0)],  # between the middles of two columns
    "twice": [(8.0, 8.0, 40.0, 40.0)] * 2,
    "border": [(0.0, 0.0, 96.0, 64.0), (80.0, 50.0, 96.0, 64.0)],
    "flat": [(20.0, 20.0, 20.0, 20.0)],
    "huge": [(-400.0, -400.0, 900.0, 900.0)],
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_are_finite_and_reach_every_map(name):
    raw, *_ = random_case(4, batch=2)
    corners = torch.tensor(EDGES[name]).reshape(-1, 4)
    boxes = torch.stack([corners, torch.zeros_like(corners)])
    labels = torch.zeros(boxes.shape[:2], dtype=torch.long)
    sums = detection_loss(raw, boxes, labels, torch.tensor([len(corners), 0]))
    assert all(part.isfinite().all() for part in sums.parts.values())
    assert all(grad.isfinite().all() for grad in gradients(raw, sums))
    if name in ("none", "thin", "flat"):
        assert sums.weight.tolist() == [0, 0]
        assert sums.parts["box"].eq(0).all()
    assert all(part[1, i] == 0 for part in (sums.parts["box"], sums.parts["dfl"]) for i in (0, 1))


def test_scores_of_zero_and_one_are_finite():
    raw, boxes, labels, counts = random_case(5)
    with torch.no_grad():
        for level in (*raw.o2m, *raw.o2o):
            level[:, 64:] *= 1e4
    sums = detection_loss(raw, boxes, labels, counts)
    assert all(part.isfinite().all() for part in sums.parts.values())
    assert all(grad.isfinite().all() for grad in gradients(raw, sums))


def test_a_batch_twice_has_twice_the_sums_and_weights():
    raw, _, labels, counts = random_case(6)
    with torch.no_grad():  # boxes that the network sees, so that scores are high
        boxes = decode_boxes(flatten(raw.o2m, 16)[0], BINS, make_anchors(raw.o2m, STRIDES))[:, 30:90:10]
    raw = raw._replace(o2o=raw.o2m)
    once = detection_loss(raw, boxes, labels, counts)
    again = raw._replace(
        o2m=tuple(x.repeat(2, 1, 1, 1) for x in raw.o2m), o2o=tuple(x.repeat(2, 1, 1, 1) for x in raw.o2o)
    )
    twice = detection_loss(again, boxes.repeat(2, 1, 1), labels.repeat(2, 1), counts.repeat(2))
    torch.testing.assert_close(twice.weight, 2 * once.weight)
    assert (once.weight > 1).all()
    for name, part in once.parts.items():
        torch.testing.assert_close(twice.parts[name], part.repeat(2, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(6 * divided(twice), 2 * 3 * divided(once), rtol=1e-4, atol=1e-5)


def test_anchors_off_the_image_have_no_part():
    raw, boxes, labels, counts = random_case(7)
    mask = torch.ones(3, 126, dtype=torch.bool)
    same = detection_loss(raw._replace(mask=mask), boxes, labels, counts)
    assert_same(raw, same, detection_loss(raw, boxes, labels, counts))
    mask[:, ::3] = False
    grads = gradients(raw, detection_loss(raw._replace(mask=mask), boxes, labels, counts))
    for maps in (grads[:3], grads[3:]):
        flat = torch.cat([x.flatten(2) for x in maps], dim=2)
        assert flat[:, :, ::3].eq(0).all()
        assert flat[:, 64:, 1::3].ne(0).all()


def test_wrong_shapes_are_told():
    raw, boxes, labels, counts = random_case(8)
    with pytest.raises(ValueError, match=r"boxes must be \(3, G, 4\).*got \(3, 6, 3\)"):
        detection_loss(raw, boxes[..., :3], labels, counts)
    with pytest.raises(ValueError, match="one-to-one branch alone"):
        detection_loss(raw._replace(o2m=()), boxes, labels, counts)


def test_half_precision_maps_are_judged_in_float32():
    raw, boxes, labels, counts = random_case(9)
    half = raw._replace(**{b: tuple(x.detach().bfloat16() for x in getattr(raw, b)) for b in ("o2m", "o2o")})
    whole = raw._replace(**{b: tuple(x.float() for x in getattr(half, b)) for b in ("o2m", "o2o")})
    with torch.autocast("cpu", torch.bfloat16):
        found = detection_loss(half, boxes, labels, counts)
    want = detection_loss(whole, boxes, labels, counts)
    for name, part in want.parts.items():
        assert torch.equal(found.parts[name], part)
