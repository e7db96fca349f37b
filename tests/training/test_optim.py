"""The learning rate by hand, who is decayed, and the average of the weights."""

import math

import numpy as np
import pytest
import torch

import parapos
from parapos.training.optim import Average, learning_rate, make_optimizer, make_schedule, warmup_steps
from parapos.training.schema import Bad, Optim
from tests import golden

IMAGENET = Optim(epochs=300, batch=1024, lr=6e-4, warmup=0.05)


def test_the_rate_of_the_paper():
    steps = 1239 * 300
    assert warmup_steps(IMAGENET, steps) == 18_585
    assert learning_rate(IMAGENET, 1, steps) == pytest.approx(6e-4 / 18_585)
    assert learning_rate(IMAGENET, 18_585, steps) == 6e-4
    middle = 18_585 + (steps - 18_585) // 2
    assert learning_rate(IMAGENET, middle, steps) == pytest.approx(3e-4, rel=1e-4)
    assert learning_rate(IMAGENET, steps, steps) == 0
    for step in (0, steps + 1):
        with pytest.raises(ValueError, match=f"got {step}"):
            learning_rate(IMAGENET, step, steps)


def test_the_rate_ends_where_it_is_told():
    gesture = Optim(epochs=1, batch=1, lr=5e-5, final_lr=5e-7, warmup=0.1)
    assert learning_rate(gesture, 100, 1000) == 5e-5
    assert learning_rate(gesture, 550, 1000) == pytest.approx((5e-5 + 5e-7) / 2)
    assert learning_rate(gesture, 1000, 1000) == 5e-7
    video = Optim(epochs=1, batch=1, lr=3e-5, warmup=0.1)
    known = {1: 3e-7, 50: 1.5e-5, 100: 3e-5, 550: 1.5e-5, 1000: 0}
    assert [learning_rate(video, step, 1000) for step in known] == pytest.approx(list(known.values()), abs=1e-20)


@pytest.mark.parametrize("warmup", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_short_trainings_have_a_rate(warmup, steps):
    optim = Optim(epochs=1, batch=1, lr=1.0, warmup=warmup)
    rates = [learning_rate(optim, step, steps) for step in range(1, steps + 1)]
    assert all(0 <= rate <= 1 and math.isfinite(rate) for rate in rates)
    assert rates[-1] == 0


def test_decay(name):
    size = dict(dim=48, heads=12, depth=2, mlp_dim=64, patch=4, num_classes=5)
    model = parapos.create_model("vit_nano_patch4", encoding=name, **{**size, "pool": "cls"})
    (group,) = make_optimizer(model, Optim(epochs=1, batch=1, lr=1.0)).param_groups
    assert len(group["params"]) == len(list(model.parameters()))
    assert group["weight_decay"] == 0.05
    groups = make_optimizer(model, Optim(epochs=1, batch=1, lr=1.0, decay="matrices")).param_groups
    assert [g["weight_decay"] for g in groups] == [0.05, 0.0]
    spared = {id(p) for p in groups[1]["params"]}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    for key, p in model.named_parameters():
        vector = key.endswith("bias") or "norm" in key or key == "cls"
        frequencies = name == "rope_mixed" and ".encoding." in key
        assert (id(p) in spared) >= (vector or frequencies), key
        if key.endswith(("qkv.weight", "fc1.weight", "embedding.weight", "w_a")):
            assert id(p) not in spared, key


def test_average():
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    average = Average(model, decay=0.5)
    model.weight.data.fill_(3.0)
    average.update(1)
    assert average.values["weight"].item() == pytest.approx(1 + 2 * (1 - 2 / 11))  # early steps forget faster
    average.update(100)
    want = (1 + 2 * 9 / 11 + 3) / 2
    assert average.values["weight"].item() == pytest.approx(want)
    average.swap(True)
    average.swap(True)
    assert model.weight.item() == pytest.approx(want)
    average.swap(False)
    assert model.weight.item() == 3
    assert average.values["weight"].item() == pytest.approx(want)


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("final", [0.0, 1e-3])
def test_one_cycle_is_that_of_torch(warmup, final):
    optim = Optim(epochs=1, batch=1, lr=0.5, final_lr=final, warmup=warmup, schedule="onecycle")
    stand_in = torch.optim.AdamW([torch.zeros(1)], lr=1.0)
    factor = 0.5 / 25 / final if final else 1e4
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        stand_in, 0.5, total_steps=20, pct_start=warmup, final_div_factor=factor
    )
    at = make_schedule(optim, 20)
    found = []
    for step in range(1, 21):
        group = stand_in.param_groups[0]
        assert at(step) == {"lr": pytest.approx(group["lr"]), "betas": pytest.approx(group["betas"])}
        found.append(at(step)["lr"])
        stand_in.step()
        if step < 20:
            cycle.step()
    assert at(3) == at(3)
    assert found[-1] == pytest.approx(final or 0.5 / 25 / 1e4)
    with pytest.raises(ValueError, match=r"step must be in 1\.\.20, got 21"):
        at(21)


def test_one_cycle_of_any_length():
    """torch divides by zero where the rise takes one step."""
    for steps in (1, 2, 10):
        at = make_schedule(Optim(epochs=1, batch=1, lr=1.0, warmup=0.1, schedule="onecycle"), steps)
        assert all(0 < at(step)["lr"] <= 1 for step in range(1, steps + 1))
    with pytest.raises(Bad, match="the first has no effect"):
        Optim(epochs=1, batch=1, lr=1.0, schedule="onecycle", betas=(0.8, 0.9))


def test_the_average_is_that_of_torch():
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = torch.nn.Linear(3, 2)
    ours, theirs = Average(model, 0.1), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.1))
    theirs.update_parameters(model)  # the first only copies
    for step in range(100, 103):
        torch.nn.init.normal_(model.weight)
        ours.update(step)
        theirs.update_parameters(model)
    torch.testing.assert_close(ours.values["weight"], theirs.module.weight.detach())


@pytest.mark.parametrize(("name", "warm"), [("scannet", 40 / 800), ("modelnet40", 5 / 300)])
def test_the_rates_of_point_clouds(name, warm):
    """Both groups start at a tenth of their largest rate and end at a ten-thousandth; beta 1 stays."""
    recipe = pytest.importorskip("parapos.training.recipe")
    wanted = recipe.load(name)
    with torch.device("meta"):
        model = wanted.model.build({"num_classes": 20})
    groups = make_optimizer(model, wanted.optim).param_groups
    assert [group["factor"] for group in groups] == [1.0, 0.1]
    inside = {id(p) for key, p in model.named_parameters() if "block" in key}
    assert {id(p) for p in groups[1]["params"]} == inside
    assert not {id(p) for p in groups[0]["params"]} & inside
    steps = 6000
    at = make_schedule(wanted.optim, steps)
    peak = round(warm * steps)
    assert wanted.optim.warmup == pytest.approx(warm)
    assert at(1)["lr"] == pytest.approx(wanted.optim.lr / 10)
    assert at(peak)["lr"] == pytest.approx(wanted.optim.lr)
    assert at(steps)["lr"] == pytest.approx(wanted.optim.lr / 1e4)
    assert at(peak // 2)["lr"] < at(peak)["lr"] > at(peak + 2)["lr"]
    assert {at(step)["betas"] for step in (1, peak, steps)} == {(0.9, 0.999)}


def test_rates_by_name():
    model = torch.nn.ModuleDict({"block": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    optim = Optim(epochs=1, batch=1, lr=2.0, decay="matrices", rates={"block": 0.5})
    groups = make_optimizer(model, optim).param_groups
    assert [(g["weight_decay"], g["factor"], len(g["params"])) for g in groups] == [
        (0.05, 1.0, 1),
        (0.05, 0.5, 1),
        (0.0, 1.0, 1),
        (0.0, 0.5, 1),
    ]
    with pytest.raises(ValueError, match="no parameter of the model has 'blok' in its name"):
        make_optimizer(model, Optim(epochs=1, batch=1, lr=1.0, rates={"blok": 0.5}))
    for wrong in ({"block": 0.0}, {"block": "x"}, {"": 1.0}):
        with pytest.raises(Bad, match="expected a positive number for a part of names"):
            Optim(epochs=1, batch=1, lr=1.0, rates=wrong)
    for key, value in (("start_lr", 0.1), ("cycle_beta", False)):
        with pytest.raises(Bad, match=r"has no effect with optim\.schedule = 'cosine'"):
            Optim(epochs=1, batch=1, lr=1.0, **{key: value})
    Optim(epochs=1, batch=1, lr=1.0, schedule="onecycle", cycle_beta=False, betas=(0.8, 0.9))


@golden.files("unitr-misc*.npz")
def test_golden_one_cycle(path):
    """The original counts from 0 to the number of steps, PyTorch's cycle to one less: it has one step more here."""
    case = np.load(path)
    lr, steps = case["lr"], len(case["lr"])
    rise = (int(lr.argmax()) + 1) / (steps + 1)
    cycle = {"schedule": "onecycle", "warmup": rise, "start_lr": float(lr[0]), "final_lr": float(lr.max()) * 1e-5}
    at = make_schedule(Optim(epochs=1, batch=1, lr=float(lr.max()), **cycle), steps + 1)
    found = [at(step) for step in range(1, steps + 1)]
    assert np.allclose([x["lr"] for x in found], lr, rtol=1e-6, atol=1e-12)
    assert np.allclose([x["betas"][0] for x in found], case["beta1"], atol=1e-9)
