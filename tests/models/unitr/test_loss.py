"""Targets, matching and losses against plain numbers, and boxes that come back as they went in."""

import math

import pytest
import torch

from parapos.models.unitr.boxes3d import iou_3d
from parapos.models.unitr.decode import decode, decode_boxes
from parapos.models.unitr.grid import BevFrame
from parapos.models.unitr.head import BRANCHES, HeadOutputs
from parapos.models.unitr.loss import GAINS, LOSS_PARTS, head_loss, match
from parapos.models.unitr.targets import box_codes, gaussian_radius, heatmap_targets, hill

FRAME = BevFrame((-12.0, -7.2), (0.6, 0.6), 40, 24)  # not square
CLASSES = 10


def boxes(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    low, high = torch.tensor([-11.0, -6.5, -2.0, 0.5, 0.4, 0.8]), torch.tensor([11.0, 6.5, 1.0, 6.0, 3.0, 3.0])
    found = low + (high - low) * torch.rand(count, 6, generator=g)
    yaw = (torch.rand(count, 1, generator=g) * 2 - 1) * math.pi
    return torch.cat([found, yaw, torch.randn(count, 2, generator=g)], 1)


def outputs_of(predicted, labels, logits=None, iou=None, seed=0):
    """What a head says whose boxes (B, Q, 9) are known."""
    g = torch.Generator().manual_seed(seed)
    codes = box_codes(predicted, FRAME).transpose(1, 2)
    parts = dict(zip(("center", "height", "dim", "rot", "vel"), codes.split([2, 1, 3, 2, 2], 1), strict=True))
    size = predicted.shape[:2]
    parts["iou"] = torch.rand(size[0], 1, size[1], generator=g) * 2 - 1 if iou is None else iou
    parts["heatmap"] = torch.randn(size[0], CLASSES, size[1], generator=g) if logits is None else logits
    dense = torch.randn(size[0], CLASSES, FRAME.rows, FRAME.cols, generator=g)
    score = torch.rand(size[0], CLASSES, size[1], generator=g)
    return HeadOutputs(dense, labels, score, **parts, frame=FRAME, small_classes=(8, 9))


def batch_of(true, labels):
    count = torch.full((len(true),), true.shape[1])
    return {"boxes": true, "labels": labels, "count": count}


def example(samples=2, queries=12, count=4):
    true = torch.stack([boxes(count, 10 + b) for b in range(samples)])
    labels = torch.randint(CLASSES, (samples, count))
    predicted = torch.stack([boxes(queries, 20 + b) for b in range(samples)])
    predicted[:, 3] = true[:, 1] + 0.05
    predicted[:, 7] = true[:, 0] - 0.1
    return outputs_of(predicted, torch.randint(CLASSES, (samples, queries))), batch_of(true, labels)


def test_boxes_come_back_as_they_went_in():
    true = boxes(30)[None]
    found = decode_boxes(outputs_of(true, torch.zeros(1, 30, dtype=torch.int64)))
    assert torch.allclose(found, true, atol=1e-4)


def test_radii():
    assert gaussian_radius(4.6 / 0.6, 1.9 / 0.6) == pytest.approx(2.07, abs=0.01)
    assert gaussian_radius(11 / 0.6, 2.9 / 0.6) == pytest.approx(3.79, abs=0.01)


def test_heatmaps_have_a_hill_for_each_object():
    true = torch.zeros(1, 4, 9)
    true[0, :, :2] = torch.tensor([[-11.9, -7.1], [3.1, 2.0], [3.1, 2.0], [100.0, 0.0]])
    true[0, :, 3:6] = torch.tensor([[4.6, 1.9, 1.5], [11.0, 2.9, 3.0], [0.0, 2.0, 1.0], [4.6, 1.9, 1.5]])
    found = heatmap_targets(true, torch.tensor([[0, 3, 4, 0]]), torch.tensor([4]), CLASSES, FRAME)[0]
    assert found.shape == (CLASSES, 24, 40)
    assert (found == 1).nonzero().tolist() == [[0, 0, 0], [3, 15, 25]]  # row is y, column is x
    assert found[4].sum() == 0  # no length
    assert torch.equal(found[0, :3, :3], hill(2)[2:, 2:])  # cut at the border
    assert found[0, 3:].sum() == 0
    assert torch.equal(found[3, 12:19, 22:29], hill(3))
    assert float(hill(3)[3, 6]) == pytest.approx(math.exp(-9 / (2 * (7 / 6) ** 2)), abs=1e-6)


def test_each_box_gets_a_query_of_its_own():
    outputs, batch = example()
    found = match(outputs, batch["boxes"], batch["labels"], batch["count"])
    for b in range(2):
        mine = found.sample == b
        assert sorted(found.box[mine].tolist()) == [0, 1, 2, 3]
        assert len(set(found.query[mine].tolist())) == 4
        pairs = dict(zip(found.box[mine].tolist(), found.query[mine].tolist(), strict=True))
        assert (pairs[1], pairs[0]) == (3, 7)  # those that lie on the boxes
    more = torch.stack([boxes(20, 3), boxes(20, 4)])
    labels = torch.zeros(2, 20, dtype=torch.int64)
    found = match(outputs, more, labels, torch.tensor([20, 20]))
    assert len(found.query) == 24  # as many as there are queries


def by_hand(outputs, batch):
    """The losses, one number after another."""
    found = match(outputs, batch["boxes"], batch["labels"], batch["count"])
    target = heatmap_targets(batch["boxes"], batch["labels"], batch["count"], CLASSES, FRAME)
    sums = dict.fromkeys(LOSS_PARTS, 0.0)
    for logit, t in zip(outputs.dense_heatmap.flatten().tolist(), target.flatten().tolist(), strict=True):
        p = min(max(1 / (1 + math.exp(-logit)), 1e-4), 1 - 1e-4)
        sums["heatmap"] -= (1 - p) ** 2 * math.log(p) if t == 1 else (1 - t) ** 4 * p**2 * math.log(1 - p)
    sums["heatmap"] /= max(int((target == 1).sum()), 1)
    positive = {(b, q): g for b, q, g in zip(*(x.tolist() for x in found), strict=True)}
    samples, _, queries = outputs.heatmap.shape
    predicted = decode_boxes(outputs)
    overlaps, alike = [], []
    for b in range(samples):
        for q in range(queries):
            g = positive.get((b, q))
            for c in range(CLASSES):
                p = 1 / (1 + math.exp(-float(outputs.heatmap[b, c, q])))
                is_true = g is not None and int(batch["labels"][b, g]) == c
                sums["cls"] -= 0.25 * (1 - p) ** 2 * math.log(p) if is_true else 0.75 * p**2 * math.log(1 - p)
            if g is None:
                continue
            code = box_codes(batch["boxes"][b, g], FRAME).tolist()
            said = [float(x) for name in list(BRANCHES)[:5] for x in getattr(outputs, name)[b, :, q]]
            weights = [1.0] * 8 + [0.2, 0.2]
            sums["box"] += sum(w * abs(x - y) for w, x, y in zip(weights, said, code, strict=True))
            iou = float(iou_3d(predicted[b, q], batch["boxes"][b, g]))
            if iou > 0:
                overlaps.append(abs(float(outputs.iou[b, 0, q]) - (2 * iou - 1)))
            a, t = predicted[b, q].tolist(), batch["boxes"][b, g].tolist()
            inner = math.prod(
                max(0, min(a[i] + a[i + 3] / 2, t[i] + t[i + 3] / 2) - max(a[i] - a[i + 3] / 2, t[i] - t[i + 3] / 2))
                for i in range(3)
            )
            outer = sum(
                (max(a[i] + a[i + 3] / 2, t[i] + t[i + 3] / 2) - min(a[i] - a[i + 3] / 2, t[i] - t[i + 3] / 2)) ** 2
                for i in range(3)
            )
            union = math.prod(a[3:6]) + math.prod(t[3:6]) - inner
            d = inner / union - sum((a[i] - t[i]) ** 2 for i in range(3)) / outer
            if d > 0:
                alike.append(1 - d)
    number = max(len(positive), 1)
    sums["cls"] /= number
    sums["box"] /= number
    sums["iou"] = sum(overlaps) / max(len(overlaps), 1)
    sums["iou_reg"] = sum(alike) / max(len(alike), 1)
    return {name: GAINS[name] * value for name, value in sums.items()}


def test_losses_are_those_of_plain_numbers():
    outputs, batch = example()
    found, want = head_loss(outputs, batch), by_hand(outputs, batch)
    for name in LOSS_PARTS:
        assert float(found.parts[name]) == pytest.approx(want[name], rel=1e-4), name
    assert float(found.total) == pytest.approx(sum(want.values()), rel=1e-4)


def test_samples_without_boxes_are_background():
    outputs, batch = example()
    empty = batch_of(torch.zeros(2, 0, 9), torch.zeros(2, 0, dtype=torch.int64))
    want = by_hand(outputs, empty)
    found = head_loss(outputs, empty)
    for name in LOSS_PARTS:
        assert float(found.parts[name]) == pytest.approx(want[name], rel=1e-4, abs=1e-9), name
    assert found.total.isfinite()
    batch["count"] = torch.tensor([0, 4])  # what is padded is not looked at
    junk = {**batch, "boxes": batch["boxes"].clone()}
    junk["boxes"][0] = 1e9
    assert torch.equal(head_loss(outputs, batch).total, head_loss(outputs, junk).total)


def test_wrong_targets_are_refused():
    outputs, batch = example()
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.9"):
        head_loss(outputs, {**batch, "labels": batch["labels"] + 10})
    with pytest.raises(ValueError, match=r"boxes must be \(2, G, 9\)"):
        head_loss(outputs, {**batch, "boxes": batch["boxes"][..., :7]})
    with pytest.raises(ValueError, match=r"count must be \(2,\)"):
        head_loss(outputs, {**batch, "count": batch["count"][:1]})


def test_decoded_scores_and_limits():
    predicted = boxes(6)[None].clone()
    predicted[0, 0, :3] = torch.tensor([61.3, 0.0, 0.0])  # off the limit
    predicted[0, 1, :3] = torch.tensor([61.2, -61.2, 9.9])
    labels = torch.tensor([[0, 1, 2, 3, 4, 5]])
    outputs = outputs_of(predicted, labels, iou=torch.tensor([[[0.0, 0.5, -0.2, -3.0, 3.0, 0.1]]]))
    outputs.query_heatmap_score[0, 5, 5] = 0.0  # suppressed on the map
    (found,) = decode(outputs, limit=(-61.21, -61.21, -10.0, 61.21, 61.21, 10.0))
    assert found.labels.tolist() == [1, 2, 3, 4]
    assert torch.allclose(found.boxes, predicted[0, 1:5], atol=1e-3)
    for row, q in enumerate((1, 2, 3, 4)):
        p = float(outputs.heatmap[0, q, q].sigmoid() * outputs.query_heatmap_score[0, q, q])
        overlap = min(max((float(outputs.iou[0, 0, q]) + 1) / 2, 0), 1)
        assert float(found.scores[row]) == pytest.approx(math.sqrt(p * overlap), rel=1e-5)


def test_only_small_classes_are_thinned_out():
    predicted = boxes(1).repeat(4, 1)[None]
    logits = torch.arange(4.0)[None, None].expand(1, CLASSES, 4)
    for label, kept in ((0, 4), (8, 1), (9, 1)):
        outputs = outputs_of(predicted, torch.full((1, 4), label), logits=logits, iou=torch.ones(1, 1, 4))
        outputs.query_heatmap_score.fill_(0.5)
        (found,) = decode(outputs)
        assert len(found.boxes) == kept
        assert float(found.scores.max()) == pytest.approx(math.sqrt(0.5 * torch.sigmoid(torch.tensor(3.0))), rel=1e-5)
    mixed = outputs_of(predicted, torch.tensor([[8, 9, 8, 0]]), logits=logits, iou=torch.ones(1, 1, 4))
    (found,) = decode(mixed)
    assert sorted(found.labels.tolist()) == [0, 8, 9]


def test_diverged_weights_are_told_by_the_loss():
    outputs, batch = example()
    outputs.center[1] = torch.nan
    with pytest.raises(ValueError, match=r"samples \[1\] .* not finite"):
        decode(outputs)
    assert not head_loss(outputs, batch).total.isfinite()
