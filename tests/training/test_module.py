"""A step is the same however its batch is cut into parts, whatever it is divided by."""

import dataclasses

import pytest
import torch

from parapos.data.batch import collate
from parapos.data.digits import Digits
from parapos.data.sampling import EvalBatches, Plan
from parapos.tasks import Loss
from parapos.tasks.classification import Classification
from parapos.training import recipe
from parapos.training.module import TrainingModule

SMALL = {"model.options.depth": "1", "model.options.dim": "16", "model.options.mlp_dim": "16", "optim.ema": "0"}


def make(**changes):
    chosen = recipe.load("digits_smoke", {**SMALL, **{k.replace("__", "."): v for k, v in changes.items()}})
    torch.manual_seed(0)
    module = TrainingModule(chosen.model.build({"num_classes": 10}), chosen.make_task(Digits), chosen)
    torch.nn.init.normal_(module.model.classifier.weight, std=0.3)
    return module


@pytest.fixture(scope="module")
def digits():
    return Digits("train", size=16)


@pytest.fixture(scope="module")
def batch(digits):
    return collate([digits[i] for i in range(6)])


def gradients(module, plan, digits, step):
    """Of one step over all processes and parts, as DDP and Lightning would put them together."""
    module.zero_grad()
    sums = []
    for rank in range(plan.world):
        module.plan = dataclasses.replace(plan, rank=rank)
        module.begin_step()
        for turn in range(plan.accumulate):
            keys = plan.keys(step, module.plan.part_of(turn))
            batch = module.task.collate([digits[key] for key in keys or [0]])
            batch["image"] = batch["image"].double()
            (module.training_step(batch, turn) / plan.accumulate / plan.world).backward()
        sums.append(module._sums)
    module.plan = dataclasses.replace(plan, part=plan.batch, world=1)  # all that is left is to rescale
    module._sums = sum(sums)
    module.on_before_optimizer_step(None)
    return [p.grad.clone() for p in module.model.parameters()]


@pytest.mark.parametrize("samples", [24, 19, 14, 13])
def test_processes_and_parts_make_the_same_step(samples, digits):
    """With drop path and mixing on. 19, 14 and 13 leave 7, 2 and 1 samples for the 4 parts of the second step."""
    module = make(model__options__drop_path="0.5").double()
    plans = [Plan(samples=samples, batch=12, part=3, world=world) for world in (1, 2, 4)]
    module.progress.step = 1
    want, *others = (gradients(module, plan, digits, 1) for plan in plans)
    assert max(g.abs().max() for g in want) > 1e-3
    for found in others:
        for a, b in zip(want, found, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("samples", [24, 19, 13])
def test_a_step_is_the_mean_over_its_samples(samples, digits):
    module = make(augment__mixup="0", augment__cutmix="0", model__options__drop_path="0").double()
    plan = Plan(samples=samples, batch=12, part=3, world=2)
    module.progress.step = 1
    found = gradients(module, plan, digits, 1)
    batch = collate([digits[key] for part in range(plan.parts) for key in plan.keys(1, part)])
    assert len(batch["id"]) == samples - 12
    module.zero_grad()
    loss = module.task.loss(module.model, {**batch, "image": batch["image"].double()})
    (loss.total / loss.weight).backward()
    for a, b in zip(module.model.parameters(), found, strict=True):
        assert torch.allclose(a.grad, b, rtol=1e-10, atol=1e-14)


def test_randomness_is_that_of_the_step(batch):
    module = make(model__options__drop_path="0.5")
    module.plan = Plan(samples=100, batch=12, part=6)
    module.begin_step()
    losses = []
    for step, turn in ((0, 0), (0, 1), (1, 0), (0, 0)):
        module.progress.step = step
        torch.rand(3)
        losses.append(module.training_step(batch, turn).item())
    assert losses[0] == losses[3]
    assert len(set(losses)) == 3


def test_a_stand_in_does_not_count(batch):
    module = make().eval()
    for real, want in ((True, 6), (False, 0)):
        module.eval_batches = EvalBatches(samples=6, batch=6, world=2, rank=0 if real else 1)
        module.on_validation_epoch_start()
        module.validation_step(batch, 0)
        assert int(module.evaluator.loss[1]) == want


class Weighted(Classification):
    """Normalised by the sum of the labels: what a part weighs is known when it is looked at."""

    parts = ("extra",)

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Loss(loss.total, batch["label"].sum(), parts={"extra": loss.by_sample.sum() * 2})


@pytest.mark.parametrize("samples", [24, 19, 13])
def test_a_normaliser_over_the_whole_batch(samples, digits):
    """However the batch is cut, a step is the sum of all losses over the sum of all weights."""
    module = make(model__options__drop_path="0").double()
    module.task = Weighted(Digits, smoothing=0.1)
    module.progress.step = 1
    batch = collate([digits[key] for key in Plan(samples=samples, batch=12, part=12).keys(1, 0)])
    loss = module.task.loss(module.model, {**batch, "image": batch["image"].double()})
    (loss.total / batch["label"].sum()).backward()
    want = [p.grad.clone() for p in module.model.parameters()]
    for plan in (Plan(samples=samples, batch=12, part=part, world=world) for part, world in ((12, 1), (3, 1), (3, 4))):
        for a, b in zip(want, gradients(module, plan, digits, 1), strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)
        before, value = module.progress.step, float(loss.total.detach() / loss.weight)
        assert module.finish_step(0)[0] == pytest.approx(value)
        assert module.progress.part_sums == {"extra": pytest.approx(2 * value)}
        module.progress.step, module.progress.part_sums = before, {}


def test_a_step_of_no_weight_is_not_divided(digits):
    module = make(model__options__drop_path="0").double()
    module.task = Weighted(Digits)
    zeros = [i for i, label in enumerate(digits.labels) if label == 0][:2]
    batch = collate([digits[i] for i in zeros])
    batch["image"] = batch["image"].double()
    module.plan = Plan(samples=2, batch=2, part=2)
    module.begin_step()
    module.training_step(batch, 0).backward()
    module.on_before_optimizer_step(None)
    found = [p.grad.clone() for p in module.model.parameters()]
    module.zero_grad()
    module.task.loss(module.model, batch).total.backward()
    for p, b in zip(module.model.parameters(), found, strict=True):
        assert torch.allclose(p.grad, b, rtol=1e-10, atol=1e-14)


def test_samples_without_losses_of_their_own_are_all_named(batch):
    """A task that has one sum for a part blames the part."""
    module = make()
    module.task = Weighted(Digits)
    module.plan = Plan(samples=6, batch=6, part=6)
    module.begin_step()
    module.training_step({**batch, "image": batch["image"] * torch.nan}, 0)
    assert module.bad_samples() == batch["id"].tolist()


class Branches(torch.nn.Module):
    """Two heads on the same features, of which the second one does not teach them; with running statistics."""

    inputs = ("image",)

    def __init__(self):
        super().__init__()
        self.features, self.norm = torch.nn.Linear(256, 8), torch.nn.BatchNorm1d(8)
        self.first, self.second = torch.nn.Linear(8, 10), torch.nn.Linear(8, 10)

    def forward(self, images):
        x = self.norm(self.features(images.flatten(2)).transpose(1, 2)).relu().mean(2)
        return self.first(x), self.second(x.detach())


class TwoWeights(Classification):
    """The first branch is divided by the sum of the labels, the second one by a thousandth of it, but at least by 1."""

    parts = ("twice",)
    normalizers = 2
    least_weight = 1.0

    def loss(self, model, batch):
        losses = [torch.nn.functional.cross_entropy(x, batch["label"], reduction="none") for x in model(batch["image"])]
        by_sample = torch.stack(losses, dim=1)
        total, weight = by_sample.sum(0), batch["label"].sum() * torch.tensor([1.0, 0.001])
        return Loss(total, weight, {"twice": 2 * total.detach()}, by_sample.detach())

    def normalizer_of(self, parameter):
        return int(parameter.startswith("second."))

    def gain(self, samples):
        return samples


def by_hand(net, task, digits, keys):
    """A step's loss and gradients from all of its samples at once."""
    batch = collate([digits[key] for key in keys])
    loss = task.loss(net, {**batch, "image": batch["image"].double()})
    value = (loss.total / loss.weight.clamp(min=1)).sum()
    grads = torch.autograd.grad(len(keys) * value, list(net.parameters()))
    return float(value.detach()), grads


@pytest.mark.parametrize("samples", [24, 19, 13])
def test_branches_with_weights_of_their_own(samples, digits):
    """A step is samples x the sum of both shares, however its batch is cut."""
    module = make()
    torch.manual_seed(1)
    module.model, module.task = Branches().double(), TwoWeights(Digits)
    module.model.norm.eval()  # statistics of a part are its own
    module.progress.step = 1
    keys = Plan(samples=samples, batch=12, part=12).keys(1, 0)
    value, want = by_hand(module.model, module.task, digits, keys)
    for part, world in ((12, 1), (3, 1), (3, 4)):
        found = gradients(module, Plan(samples=samples, batch=12, part=part, world=world), digits, 1)
        for a, b in zip(want, found, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)
        assert module.finish_step(0)[0] == pytest.approx(value)
        assert module.progress.part_sums == {"twice": pytest.approx(2 * value)}
        module.progress.step, module.progress.part_sums = 1, {}


@pytest.mark.parametrize("samples", [24, 21, 14])
def test_running_statistics_move_once_a_step(samples, digits, monkeypatch):
    """They are the mean over the step's samples of what each part makes of those before it. 14 leave 2 for 4 parts."""
    module = make()
    found = []
    for world in (1, 2):
        torch.manual_seed(1)
        net = Branches().double()
        module.model, module.task = net, TwoWeights(Digits)
        start = {name: b.clone() for name, b in net.named_buffers()}
        module.progress.step, statistics = 1, []
        sums = []
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, sums=sums: x.copy_(sum(sums)))
        for rank in range(world):
            net.load_state_dict(start, strict=False)
            module._running = type(module._running)(net)
            module.plan = Plan(samples=samples, batch=12, part=3, world=world, rank=rank)
            module.begin_step()
            for turn in range(module.plan.accumulate):
                keys = module.plan.keys(1, module.plan.part_of(turn))
                batch = collate([digits[key] for key in keys or [0, 1]])
                module.training_step({**batch, "image": batch["image"].double()}, turn).backward()
                if keys:
                    statistics.append((len(keys), net.norm.running_mean.clone(), net.norm.running_var.clone()))
            sums.append(torch.cat([total.flatten() for total in module._running._sum]))
        module._running.end_step(samples - 12, world > 1)
        found.append({name: b.clone() for name, b in net.named_buffers()})
        for i, name in ((1, "norm.running_mean"), (2, "norm.running_var")):
            want = sum(entry[0] * entry[i] for entry in statistics) / (samples - 12)
            assert torch.allclose(found[-1][name], want, rtol=1e-12)
        assert found[-1]["norm.num_batches_tracked"] == 1
    for name, buffer in found[0].items():
        assert torch.allclose(buffer, found[1][name], rtol=1e-12), name
