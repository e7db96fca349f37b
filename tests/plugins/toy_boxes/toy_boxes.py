"""A plug-in outside of the package: boxes around bright squares, judged by the mean intersection over union.

An image is a grid of cells of 8 x 8 pixels, and each cell holds a square or nothing, so images have different numbers
of boxes. A box is (left, top, right, bottom) in pixels of its cell. The loss is divided by the boxes of a whole batch,
however it is cut into parts: images without any take part, too.
"""

import json

import torch
from torch import nn

import parapos
from parapos.data.sampling import Key, sample_seed
from parapos.encodings import Claims, Encoding
from parapos.tasks import Evaluator, Loss, Metric, Task, answer

CELL = 8
COUNTS = {"train": 48, "val": 20, "test": 20}


class Squares:
    """{"image": float (3, height, width), "target": {"boxes": (n, 4), "cells": (n,)}, "name": text, "id": int}."""

    preprocessing = {"mean": 0.0, "scale": 1.0}  # noqa: RUF012

    def __init__(self, split: str, *, size: int | tuple[int, int] = 16, seed: int = 0, count: int = 0) -> None:
        self.split, self.seed, self.count = split, seed, count or COUNTS[split]
        self.height, self.width = (size, size) if isinstance(size, int) else size

    def __len__(self):
        return self.count

    def __getitem__(self, key):
        index, epoch = key if isinstance(key, Key) else (key, 0)
        draw = torch.Generator().manual_seed(sample_seed(self.seed, 0, index + 1000 * list(COUNTS).index(self.split)))
        noise = torch.Generator().manual_seed(sample_seed(self.seed, epoch, index))
        rows, cols = self.height // CELL, self.width // CELL
        image = 0.1 * torch.rand(3, self.height, self.width, generator=noise)
        boxes, cells = [], []
        for cell in range(rows * cols):
            if torch.rand((), generator=draw) < 0.6:
                side = int(torch.randint(3, 7, (), generator=draw))
                left, top = torch.randint(0, CELL - side + 1, (2,), generator=draw).tolist()
                y, x = CELL * (cell // cols) + top, CELL * (cell % cols) + left
                image[:, y : y + side, x : x + side] += 0.9
                boxes.append([left, top, left + side, top + side])
                cells.append(cell)
        target = {
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            "cells": torch.tensor(cells, dtype=torch.long),
        }
        return {"image": image, "target": target, "name": f"{self.split}/{index}", "id": index}


class BoxNet(nn.Module):
    """A box (B, cells, 4) for every cell, whether it holds a square or not."""

    inputs = ("image",)
    patch = CELL

    def __init__(self, *, dim: int = 32, heads: int = 2, depth: int = 1, encoding: str = "pape", **options) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, dim, CELL, CELL)
        self.encoder = parapos.Encoder(dim, depth, 2 * dim, heads=heads, encoding=encoding, pos_dim=2, **options)
        self.head = nn.Linear(dim, 4)

    def forward(self, images, position_scale: float = 1.0):
        x = self.embedding(images)
        positions = parapos.grid_positions(*x.shape[2:], scale=position_scale, device=x.device)
        return CELL * self.head(self.encoder(x.flatten(2).transpose(1, 2), positions)).sigmoid()


class Boxes(Task):
    """L1 distance of boxes; `center` weighs that of their centres, which is logged, too."""

    metrics = (
        Metric("miou", "mean IoU", "%", factor=100.0),
        Metric("distance", "L1 distance", "px", higher_is_better=False),
    )
    headline = "miou"
    parts = ("center",)

    def __init__(self, dataset, *, center: float = 0.5) -> None:
        super().__init__(dataset)
        self.center = center

    def collate(self, samples):
        from parapos.data.batch import collate

        return collate(samples, listed=("target.boxes", "target.cells"))

    def loss(self, model, batch):
        found, target = _pairs(model, batch)
        center = (_center(found) - _center(target)).abs().sum()
        total = (found - target).abs().sum() + self.center * center
        return Loss(total, torch.tensor(len(target)), {"center": center.detach()})

    def evaluator(self, *, keep_predictions=False):
        return BoxEvaluator(keep_predictions)

    def export(self, evaluator, folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "boxes.json"
        path.write_text(json.dumps(dict(sorted(evaluator.boxes.items())), indent=1))
        return [path]


class BoxEvaluator(Evaluator):
    def __init__(self, keep: bool) -> None:
        self.keep, self.sums, self.boxes = keep, torch.zeros(3, dtype=torch.float64), {}

    def update(self, model, batch):
        found, target = _pairs(model, batch)
        low, high = torch.maximum(found[:, :2], target[:, :2]), torch.minimum(found[:, 2:], target[:, 2:])
        inner = (high - low).clamp(min=0).prod(1)
        area = [(box[:, 2:] - box[:, :2]).clamp(min=0).prod(1) for box in (found, target)]
        overlap = inner / (area[0] + area[1] - inner)
        values = [overlap.double().sum(), (found - target).abs().mean(1).double().sum(), torch.tensor(len(target))]
        self.sums += torch.stack([value.to(self.sums) for value in values])
        if self.keep:
            counts = [len(boxes) for boxes in batch["target"]["boxes"]]
            parts = found.split(counts)
            self.boxes |= {name: part.tolist() for name, part in zip(batch["name"], parts, strict=True)}

    def state(self):
        return self.sums, self.boxes

    def merge(self, states):
        self.sums = torch.stack([sums for sums, _ in states]).sum(0)
        self.boxes = {name: boxes for _, part in states for name, boxes in part.items()}

    def compute(self):
        overlap, distance, count = self.sums.tolist()
        return {"miou": overlap / count, "distance": distance / count}


def _pairs(model, batch):
    """What a model says of the cells that hold a square, and the boxes there, (n, 4) each."""
    answers, target = answer(model, batch), batch["target"]
    found = [boxes[cells] for boxes, cells in zip(answers, target["cells"], strict=True)]
    return torch.cat(found), torch.cat(target["boxes"]).to(answers)


def _center(boxes):
    return (boxes[:, :2] + boxes[:, 2:]) / 2


class Shift(Encoding):
    """Adds a learned vector times the sum of the coordinates: the smallest encoding that there is."""

    claims = Claims(translation=False, rotation=False, decay=False, direction=True, context=False)

    def __init__(self, **common) -> None:
        super().__init__(**common)
        self.direction = nn.Parameter(torch.zeros(self.dim))

    def add(self, x, r):
        r = r.r if isinstance(r, parapos.Positions) else r
        return x + r.sum(-1, keepdim=True).to(x.dtype) * self.direction


parapos.register_encoding("toy_shift", Shift, label="shift", color="#112233")
parapos.register_model("toy_box_net", BoxNet)
parapos.register_dataset("toy_squares", Squares, task="toy_boxes")
parapos.register_task("toy_boxes", Boxes)
