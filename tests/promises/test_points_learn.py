"""A small Point Transformer V3 learns a few generated rooms and shapes by heart, within a minute of one core."""

import pytest
import torch

import parapos
from parapos.data import create_dataset
from parapos.data.augment.points import PointAugment
from parapos.data.objects import ObjectAugment
from parapos.data.sampling import Key
from parapos.tasks import create_task

STILL = dict(dropout=0, turn=0, tilt=0, scale=(1.0, 1.0), flip=0, jitter=0, elastic=0, contrast=0, tint=0, grain=0)
SMALL = dict(enc_dims=(16, 32, 64), enc_depths=(1, 1, 2), patch=32, drop_path=0.0, parabolas=4)


def fit(model, task, dataset, steps, batch):
    """Accuracy of the last answers in training, over a whole epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(steps):
        start = step * batch % len(dataset)
        loss = task.loss(model, task.collate([dataset[Key(i, 0)] for i in range(start, start + batch)]))
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(("rooms", "step", "steps"), [(2, 0.4, 60), pytest.param(8, 0.25, 120, marks=pytest.mark.full)])
def test_rooms_by_heart(rooms, step, steps):
    """Tables and benches, lamps and balls differ in height alone, so position must be seen."""
    dataset = create_dataset("rooms", "train", train=rooms, step=step, grid_size=step, augment=PointAugment(**STILL))
    task = create_task("segmentation", dataset)
    torch.manual_seed(0)
    model = parapos.create_model("ptv3_nano", num_classes=9, grid_size=step, **SMALL)
    size = min(rooms, 4)
    fit(model, task, dataset, steps, size)
    right = total = 0
    with torch.no_grad():
        for first in range(0, rooms, size):  # statistics of the batch: those of training lag behind in short runs
            batch = task.collate([dataset[Key(i, 0)] for i in range(first, first + size)])
            logits = model(*(batch[name] for name in model.inputs))
            right += int((logits.argmax(-1) == batch["segment"]).sum())
            total += len(logits)
    assert right / total > 0.9


@pytest.mark.parametrize(
    ("points", "size", "steps"), [(80, 0.2, 30), pytest.param(200, 0.1, 60, marks=pytest.mark.full)]
)
def test_five_kinds_of_shapes_by_heart(points, size, steps):
    still = ObjectAugment(scale=(1.0, 1.0), shift=0.0)
    dataset = create_dataset("shapes", "train", train=12, points=points, grid_size=size, augment=still)
    dataset.labels, dataset.names = dataset.labels[:5] * 2, dataset.names[:5] * 2
    load = dataset.load
    dataset.load = lambda index: load(index % 5 + 12 * (index // 5))
    task = create_task("classification", dataset)
    torch.manual_seed(0)
    model = parapos.create_model("ptv3_nano", num_classes=12, task="classification", grid_size=size, **SMALL)
    fit(model, task, dataset, steps, 10)
    batch = task.collate([dataset[Key(i, 0)] for i in range(10)])
    with torch.no_grad():
        logits = torch.stack([model(*(batch[name] for name in model.inputs)) for _ in range(8)]).mean(0)
    assert (logits.argmax(-1) == batch["label"]).float().mean() > 0.9
