"""Segmentation: losses and metrics against the reference's files and by hand, ignored labels, votes, exports."""

import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from parapos.data import create_dataset
from parapos.tasks import Segmentation, create_task
from parapos.tasks.lovasz import lovasz_softmax
from parapos.tasks.segmentation import mixed

from ..marks import full

GOLDEN = Path(os.environ.get("PARAPOS_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "golden"))


def cases(pattern):
    for path in sorted(GOLDEN.glob(pattern)):
        with np.load(path) as file:
            held = {key: torch.from_numpy(np.asarray(file[key])) for key in file.files}
        for case in sorted({key.split(":")[0] for key in held}):
            arrays = {key.split(":")[1]: value for key, value in held.items() if key.startswith(f"{case}:")}
            yield pytest.param(arrays, id=f"{path.stem}-{case}")


class Data:
    class_names = ("a", "b", "c")
    classes = 3
    names = ("x", "y")


class Fixed:
    """A model that gives these logits."""

    inputs = ("logits",)

    def __call__(self, logits):
        return logits


def data(classes):
    made = Data()
    made.class_names, made.classes = tuple(map(str, range(classes))), classes
    return made


@pytest.mark.parametrize("given", list(cases("ptv3-loss*.npz")))
def test_golden_losses(given):
    task = Segmentation(data(given["logits"].shape[1]))
    logits = given["logits"].clone().requires_grad_()
    batch = {"logits": logits, "segment": given["label"], "offset": torch.tensor([len(logits)])}
    loss = task.loss(Fixed(), batch)
    count = (given["label"] != -1).sum()
    assert loss.weight == count
    for name, key in (("cross_entropy", "ce"), ("lovasz", "lovasz")):
        assert loss.parts[name] / count == pytest.approx(float(given[key]), abs=1e-5)
    assert torch.equal(loss.total.detach(), loss.parts["cross_entropy"] + loss.parts["lovasz"])
    (loss.total / loss.weight).backward()
    assert torch.allclose(logits.grad, given["ce_grad"] + given["lovasz_grad"], atol=1e-5)


@pytest.mark.parametrize("given", list(cases("ptv3-metric*.npz")))
def test_golden_metrics(given):
    task = Segmentation(data(int(given["classes"])))
    evaluators = []
    for found, label in zip(
        given["pred"].split(given["sizes"].tolist()), given["label"].split(given["sizes"].tolist()), strict=True
    ):
        evaluator = task.evaluator()
        evaluator.count(found, label)
        evaluators.append(evaluator)
    evaluator = task.evaluator()
    evaluator.merge([one.state() for one in evaluators])
    iou, _, target = evaluator.by_class()
    assert torch.allclose(iou, given["iou"], atol=1e-9)
    assert torch.equal(target, given["target"])
    assert torch.equal(evaluator.counts.diag().double(), given["intersection"])
    found = evaluator.compute()
    for name, key in (("miou", "mIoU"), ("macc", "mAcc"), ("allacc", "allAcc")):
        assert found[name] == pytest.approx(float(given[key]), abs=1e-9)
    assert list(found) == [metric.name for metric in task.metrics]


def test_lovasz_is_the_jaccard_loss_of_hard_answers():
    for truth in product((0, 1), repeat=4):
        for answer in product((0, 1), repeat=4):
            labels, found = torch.tensor(truth), torch.tensor(answer)
            expected = []
            for c in set(truth):
                both = ((labels == c) & (found == c)).sum()
                either = ((labels == c) | (found == c)).sum()
                expected.append(1 - both / either)
            hard = torch.nn.functional.one_hot(found, 2).float()
            assert lovasz_softmax(hard, labels) == pytest.approx(float(torch.stack(expected).mean()), abs=1e-6)


def test_perfect_and_ignored():
    task = Segmentation(Data())
    logits = (40.0 * torch.eye(3)).requires_grad_()
    perfect = task.loss(Fixed(), {"logits": logits, "segment": torch.arange(3), "offset": torch.tensor([3])})
    assert float(perfect.total.detach()) == pytest.approx(0, abs=1e-6)
    nothing = task.loss(Fixed(), {"logits": logits, "segment": torch.full((3,), -1), "offset": torch.tensor([3])})
    assert (float(nothing.total.detach()), int(nothing.weight)) == (0, 0)
    nothing.total.backward()
    assert torch.equal(logits.grad, torch.zeros(3, 3))


def test_scores_of_a_confusion_by_hand():
    """Class a: 3 of its 4 points found; b: both, and one too many; c, in neither, counts as 0."""
    evaluator = Segmentation(Data()).evaluator()
    evaluator.count(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 0, 0]))
    evaluator.count(torch.tensor([1, 1, 2]), torch.tensor([1, 1, -1]))  # the last has no label
    found = evaluator.compute()
    assert [found[f"iou_{name}"] for name in "abc"] == pytest.approx([3 / 4, 2 / 3, 0])
    assert found["miou"] == pytest.approx((3 / 4 + 2 / 3) / 3)
    assert found["macc"] == pytest.approx((3 / 4 + 1) / 3)
    assert found["allacc"] == pytest.approx(5 / 6)


def test_without_labels_scores_are_not_numbers():
    evaluator = Segmentation(Data()).evaluator()
    evaluator.count(torch.tensor([0, 1]), torch.tensor([-1, -1]))
    assert all(np.isnan(value) for value in evaluator.compute().values())


@pytest.mark.parametrize(
    ("sizes", "expected"), [([4], [4]), ([4, 5], [9]), ([4, 5, 6], [9, 15]), ([1, 2, 3, 4, 5], [3, 10, 15])]
)
def test_mix3d_joins_pairs(sizes, expected):
    assert mixed(torch.tensor(sizes).cumsum(0)).tolist() == expected


def test_mixing_follows_the_seed():
    task = Segmentation(Data(), mix=0.8)
    seen = []

    class Model(Fixed):
        inputs = ("logits", "offset")

        def __call__(self, logits, offset):
            seen.append(len(offset))
            return logits

    batch = {"logits": torch.zeros(4, 3), "segment": torch.zeros(4, dtype=torch.int64), "offset": torch.tensor([2, 4])}
    for _ in range(2):
        torch.manual_seed(3)
        for _ in range(50):
            task.loss(Model(), batch)
    assert seen[:50] == seen[50:]
    assert 30 <= seen[:50].count(1) <= 48
    for wrong in (dict(mix=2.0), dict(lovasz=-1.0)):
        with pytest.raises(ValueError, match="expected mix from 0 to 1 and lovasz"):
            Segmentation(Data(), **wrong)


class ByHeight:
    """A model that answers by the height of points, in metres, and a little by their place in the batch."""

    inputs = ("feat", "coord", "grid_coord", "offset")

    def __init__(self, classes):
        self.classes = classes

    def __call__(self, feat, coord, grid_coord, offset):
        assert len(feat) == len(coord) == len(grid_coord) == offset[-1]
        place = (coord[:, 2:] - torch.linspace(0, 2.4, self.classes)).abs()
        return -4 * place + 0.3 * feat[:, 3:4]


COARSE = dict(test=3, step=0.25, grid_size=0.25)


def judged(name, batch=2, **options):
    dataset = create_dataset(name, "test", **{**COARSE, **options})
    task = create_task("segmentation", dataset)
    evaluator = task.evaluator(keep_predictions=True)
    for start in range(0, len(dataset), batch):
        samples = [dataset[i] for i in range(start, min(start + batch, len(dataset)))]
        evaluator.update(ByHeight(dataset.classes), task.collate(samples))
    return task, evaluator


def test_quick_and_precise_agree_where_every_cell_has_one_point():
    quick, precise = (judged(name, step=0.2, grid_size=0.001)[1] for name in ("rooms", "rooms_precise"))
    assert torch.equal(quick.counts, precise.counts)
    coarse, fine = (judged(name, grid_size=0.4)[1] for name in ("rooms", "rooms_precise"))
    assert fine.compute()["allacc"] > coarse.compute()["allacc"]


@pytest.mark.parametrize("name", ["rooms", "rooms_precise", full("rooms_tta")])
def test_a_sample_is_judged_alike_in_any_batch_and_on_any_process(name):
    (_, one), (task, two) = judged(name, 1), judged(name, 2)
    assert torch.equal(one.counts, two.counts)
    again = judged(name, 1)[1]
    assert all(torch.equal(again.predictions[i], one.predictions[i]) for i in range(3))
    dataset = create_dataset(name, "test", **COARSE)
    parts = []
    for numbers in ((0, 2), (1,)):
        part = task.evaluator(keep_predictions=True)
        part.update(ByHeight(dataset.classes), task.collate([dataset[i] for i in numbers]))
        parts.append(part.state())
    both = task.evaluator(keep_predictions=True)
    both.merge(parts)
    assert torch.equal(both.counts, one.counts)
    assert set(both.predictions) == set(range(3))


def test_votes_are_sums_in_any_order():
    dataset = create_dataset("rooms_tta", "test", **COARSE)
    assert len(list(dataset.views(dataset.cloud(0)))) == 13
    cloud = dataset[0]["cloud"]
    pieces = list(dataset.pieces(cloud))
    points = len(cloud["coord"])
    totals = []
    for order in (pieces, pieces[::-1]):
        total = torch.zeros(points, 9, dtype=torch.float64)
        for piece, index in order:
            total.index_add_(0, index, ByHeight(9)(**piece).double().softmax(-1))
        totals.append(total)
    assert torch.allclose(*totals, atol=1e-12)
    asked = torch.zeros(points)
    for _, index in pieces:
        asked.index_add_(0, index, torch.ones(len(index)))
    assert asked.min() >= 13


def test_export(tmp_path):
    task, evaluator = judged("rooms_precise")
    task.dataset.submission = [100 + i for i in range(9)]
    paths = task.export(evaluator, tmp_path / "out")
    assert [path.name for path in paths] == [f"test-{i:04d}.txt" for i in range(3)] + ["classes.csv"]
    for i in range(3):
        lines = paths[i].read_text().splitlines()
        assert [int(line) - 100 for line in lines] == evaluator.predictions[i].tolist()
        assert len(lines) == len(task.dataset.cloud(i))
    assert len(paths[-1].read_text().splitlines()) == 10


def test_learned_classes_are_compared():
    task = Segmentation(Data())
    task.adapt({"num_classes": 3, "class_names": ["a", "b", "c"]})
    with pytest.raises(ValueError, match="the model learned"):
        task.adapt({"num_classes": 3, "class_names": ["a", "b", "d"]})
    assert Segmentation.metric("iou_wall").label == "IoU of wall"
    assert Segmentation.outputs(Data()) == {"num_classes": 3}
