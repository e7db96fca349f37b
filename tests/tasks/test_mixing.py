"""What MixUp and CutMix make of a batch, by hand: neighbours are partners, areas weights, smoothing on top."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from parapos.tasks import classification
from parapos.tasks.classification import Classification
from parapos.training import recipe

CLASSES = 10
IMAGENET = recipe.load("imagenet", {"data.root": "somewhere"}).augment


@pytest.fixture
def batch():
    g = torch.Generator().manual_seed(3)
    return {"image": torch.rand(8, 3, 16, 16, generator=g), "label": torch.arange(8), "id": torch.arange(8)}


class Data:
    classes = CLASSES


def make(**changes):
    """A task of classification and its model."""
    chosen = recipe.load("digits_smoke", {"optim.ema": "0", "model.options.drop_path": "0", **changes})
    torch.manual_seed(0)
    model = chosen.model.build({"num_classes": CLASSES})
    torch.nn.init.normal_(model.classifier.weight)
    return chosen.make_task(Data), model


def weight(labels):
    """The share of the own label, one for the whole batch; the rest is the neighbour's."""
    own = labels[torch.arange(8), torch.arange(8)]
    neighbour = labels[torch.arange(8), torch.arange(8).roll(1)]
    torch.testing.assert_close(own + neighbour, torch.ones(8))
    assert own.unique().numel() == 1
    return float(own[0])


def test_the_recipe_mixes_as_the_paper():
    mixers = recipe.load("imagenet", {"data.root": "somewhere"}).make_task(Data).mixers
    assert [(type(mixer).__name__, mixer.alpha) for mixer in mixers] == [("MixUp", 0.8), ("CutMix", 1.0)]
    assert IMAGENET.smoothing == 0.1


def test_mixup_adds_neighbours(batch):
    mixup, _ = make()[0].mixers
    for _ in range(5):
        images, labels = mixup(batch["image"], batch["label"])
        share = weight(labels)
        want = share * batch["image"] + (1 - share) * batch["image"].roll(1, 0)
        torch.testing.assert_close(images, want)


def test_cutmix_counts_the_area_that_is_there(batch):
    """A box that leaves the picture is cut off, and the weight is what remains of it."""
    _, cutmix = make()[0].mixers
    clipped = 0
    for _ in range(40):
        images, labels = cutmix(batch["image"], batch["label"])
        other = (images == batch["image"].roll(1, 0)).all(1) & (images != batch["image"]).any(1)  # (8, 16, 16)
        assert torch.equal(images, torch.where(other[:, None], batch["image"].roll(1, 0), batch["image"]))
        assert weight(labels) == pytest.approx(1 - float(other[0].double().mean()), abs=1e-6)
        rows, cols = other[0].any(1), other[0].any(0)
        clipped += bool(rows[0] or rows[-1] or cols[0] or cols[-1])
        assert other[0].sum() == rows.sum() * cols.sum()  # a box
    assert 0 < clipped < 40


def test_each_takes_its_turn_half_the_time(batch, monkeypatch):
    monkeypatch.setattr(classification, "answer", lambda model, batch: torch.zeros(8, CLASSES))
    task = Classification(Data, mixup=0.8, cutmix=1.0)
    seen = Counter()
    for mixer in task.mixers:
        mixer.register_forward_hook(lambda module, *_: seen.update([type(module).__name__]))
    for step in range(200):
        torch.manual_seed(step)
        task.loss(None, batch)
    assert sum(seen.values()) == 200
    assert 80 <= seen["MixUp"] <= 120


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_smoothing_comes_on_top_of_mixed_labels(kind, batch):
    task, model = make(**{f"augment.{name}": str(float(name == kind)) for name in ("mixup", "cutmix")})
    model.eval()
    (mixer,) = task.mixers
    torch.manual_seed(5)
    torch.randint(1, ())  # the choice of the mixer
    images, labels = mixer(batch["image"], batch["label"])
    want = -((0.9 * labels + 0.1 / CLASSES) * F.log_softmax(model(images), -1)).sum(-1)
    torch.manual_seed(5)
    loss = task.loss(model, batch)
    torch.testing.assert_close(loss.by_sample, want)
    torch.testing.assert_close(loss.total, want.sum())
    assert loss.weight == 8
