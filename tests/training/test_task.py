"""The loss by hand, and a step that is the same however its batch is cut into parts."""

import dataclasses

import pytest
import torch

from parapos.data.batch import collate
from parapos.data.digits import Digits
from parapos.data.sampling import EvalBatches, Plan
from parapos.training import recipe
from parapos.training.task import Classification, _mixers

SMALL = {"model.options.depth": "1", "model.options.dim": "16", "model.options.mlp_dim": "16", "optim.ema": "0"}


def make(**changes):
    chosen = recipe.load("digits_smoke", {**SMALL, **{k.replace("__", "."): v for k, v in changes.items()}})
    torch.manual_seed(0)
    task = Classification(chosen.model.build(10), chosen, 10)
    torch.nn.init.normal_(task.model.classifier.weight, std=0.3)
    return task


@pytest.fixture(scope="module")
def digits():
    return Digits("train", size=16)


@pytest.fixture(scope="module")
def batch(digits):
    return collate([digits[i] for i in range(6)])


def test_smoothed_cross_entropy(batch):
    task = make(augment__mixup="0", augment__cutmix="0", model__options__drop_path="0").eval()
    logits = task(batch).log_softmax(-1)
    target = torch.nn.functional.one_hot(batch["label"], 10) * 0.9 + 0.01
    assert torch.allclose(task.losses(batch), -(target * logits).sum(-1), atol=1e-6)


@pytest.mark.parametrize(
    ("mixup", "cutmix", "names"), [(0.8, 1.0, ["MixUp", "CutMix"]), (0, 1, ["CutMix"]), (0, 0, [])]
)
def test_mixed_labels_sum_to_one(mixup, cutmix, names, batch):
    task = make(augment__mixup=str(mixup), augment__cutmix=str(cutmix))
    assert [type(mixer).__name__ for mixer in task.mixers] == names
    for mixer in _mixers(task.recipe, 10):
        images, labels = mixer(batch["image"], batch["label"])
        assert images.shape == batch["image"].shape
        assert labels.shape == (6, 10)
        assert torch.allclose(labels.sum(-1), torch.ones(6))
        assert (labels > 0).sum(-1).max() == 2


def gradients(task, plan, digits, step):
    """Of one step over all processes and parts, as DDP and Lightning would put them together."""
    task.zero_grad()
    for rank in range(plan.world):
        task.plan = dataclasses.replace(plan, rank=rank)
        for turn in range(plan.accumulate):
            keys = plan.keys(step, task.plan.part_of(turn))
            batch = collate([digits[key] for key in keys or [0]])
            batch["image"] = batch["image"].double()
            (task.training_step(batch, turn) / plan.accumulate / plan.world).backward()
    return [p.grad.clone() for p in task.model.parameters()]


@pytest.mark.parametrize("samples", [24, 19, 14, 13])
def test_processes_and_parts_make_the_same_step(samples, digits):
    """With drop path and mixing on. 19, 14 and 13 leave 7, 2 and 1 samples for the 4 parts of the second step."""
    task = make(model__options__drop_path="0.5").double()
    plans = [Plan(samples=samples, batch=12, part=3, world=world) for world in (1, 2, 4)]
    task.progress.step = 1
    want, *others = (gradients(task, plan, digits, 1) for plan in plans)
    assert max(g.abs().max() for g in want) > 1e-3
    for found in others:
        for a, b in zip(want, found, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("samples", [24, 19, 13])
def test_a_step_is_the_mean_over_its_samples(samples, digits):
    task = make(augment__mixup="0", augment__cutmix="0", model__options__drop_path="0").double()
    plan = Plan(samples=samples, batch=12, part=3, world=2)
    task.progress.step = 1
    found = gradients(task, plan, digits, 1)
    batch = collate([digits[key] for part in range(plan.parts) for key in plan.keys(1, part)])
    assert len(batch["id"]) == samples - 12
    task.zero_grad()
    task.losses({**batch, "image": batch["image"].double()}).mean().backward()
    for a, b in zip(task.model.parameters(), found, strict=True):
        assert torch.allclose(a.grad, b, rtol=1e-10, atol=1e-14)


def test_randomness_is_that_of_the_step(batch):
    task = make(model__options__drop_path="0.5")
    task.plan = Plan(samples=100, batch=12, part=6)
    losses = []
    for step, turn in ((0, 0), (0, 1), (1, 0), (0, 0)):
        task.progress.step = step
        torch.rand(3)
        losses.append(task.training_step(batch, turn).item())
    assert losses[0] == losses[3]
    assert len(set(losses)) == 3


def test_a_stand_in_does_not_count(batch):
    task = make().eval()
    for real, want in ((True, 6), (False, 0)):
        task.eval_batches = EvalBatches(samples=6, batch=6, world=2, rank=0 if real else 1)
        task.validation_step(batch, 0)
        assert int(task.loss.weight) == want
        task.loss.reset()
        task.metrics.reset()


def test_metrics_by_hand(batch):
    task = make().eval()
    task.eval_batches = EvalBatches(samples=12, batch=6)
    with torch.no_grad():
        for turn in (0, 1):
            task.validation_step(batch, turn)
        task.on_validation_epoch_end()
        logits = task(batch)
    right = (logits.argmax(-1) == batch["label"]).float().mean().item()
    assert task.results["top1"] == pytest.approx(right)
    assert task.results["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, batch["label"]).item())
    assert int(task.loss.weight) == 0


def test_answers_among_some_classes(monkeypatch):
    """Two of four answers are right among ten classes, three among the subset; without one nothing is added."""
    logits = torch.zeros(4, 10)
    logits[torch.arange(4), torch.tensor([0, 5, 9, 2])] = 3.0
    logits[[0, 2], [2, 5]] = 1.0  # the best of the subset, once right and once wrong
    monkeypatch.setattr(Classification, "forward", lambda self, batch: logits)
    plain = make()
    task = Classification(plain.model, plain.recipe, 10, subset=[2, 5, 7])
    labels = {"label": torch.tensor([2, 5, 7, 2])}
    for _ in range(2):  # a second evaluation begins anew
        task.judge(labels)
        found = task.score()
        assert (found["top1"], found["top1_3"]) == (0.5, 0.75)
    plain.judge(labels)
    assert list(found) == [*plain.score(), "top1_3"]
