"""The learning rate by hand, who is decayed, and the average of the weights."""

import math

import pytest
import torch

import parapos
from parapos.training.optim import Average, learning_rate, make_optimizer, warmup_steps
from parapos.training.schema import Optim

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
