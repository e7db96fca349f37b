"""Datasets of generated content in the true formats and layouts, seconds to write: to try commands, and for tests.

A class is a pattern of stripes with a direction and a colour of its own, so that a model can learn it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2  # type: ignore[import-untyped]

from . import FormatError, cifar10
from .imagenet_tree import CLASS_INDEX, VAL_CSV, VAL_JSON, VARIANTS
from .readers import pickled

LAYOUTS = ("json", "csv", "folders")
_KINDS = ("rgb", "rgb", "rgb", "grey", "cmyk", "png", "turned", "rgb")  # what a few of the real files are


def write_imagenet(
    root: str | Path,
    *,
    classes: int = 12,
    train: int = 20,
    test: int = 3,
    layout: str = "json",
    size: tuple[int, int] = (64, 48),
    seed: int = 0,
) -> list[str]:
    """Writes ImageNet-1K, ImageNetV2 and ImageNet-R with few classes and small images. Returns the wnids.

    train and test are images per class. layout: "json" and "csv" are the official one, ILSVRC/Data/CLS-LOC with flat
    validation images and their labels in a file; "folders" is train/<wnid> and val/<wnid>. ImageNet-R gets every
    third class. The folder must be empty or new.
    """
    root = Path(root)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if not 1 <= classes <= 1000 or train < 1 or test < 1:
        raise ValueError(f"expected 1 to 1000 classes with images, got classes={classes}, train={train}, test={test}")
    if root.exists() and any(root.iterdir()):
        raise FormatError(f"{root}: not empty, expected a new folder")
    g = torch.Generator().manual_seed(seed)
    wnids = [f"n{10_000_000 + 7919 * i:08d}" for i in range(classes)]
    base = root if layout == "folders" else root / "ILSVRC/Data/CLS-LOC"
    answers: dict[str, str] = {}
    for label, wnid in enumerate(wnids):
        for i in range(train):
            _write(base / "train" / wnid / f"{wnid}_{i * 37}.JPEG", label, classes, size, _KINDS[i % 8], g)
    labels = torch.randperm(classes * test, generator=g) % classes
    for number, label in enumerate(labels.tolist(), 1):
        name = f"ILSVRC2012_val_{number:08d}"
        answers[name] = wnids[label]
        folder = base / "val" / wnids[label] if layout == "folders" else base / "val"
        _write(folder / f"{name}.JPEG", label, classes, size, "rgb", g)
    v2_folder = root / f"imagenetv2-{VARIANTS[0]}-format-val"
    for label, wnid in enumerate(wnids):
        for i in range(test):
            _write(v2_folder / str(label) / f"{label * 65537 + i:040x}.jpeg", label, classes, size, "rgb", g)
            if label % 3 == 0:
                _write(root / "imagenet-r" / wnid / f"sketch_{i}.jpg", label, classes, size, "grey", g)
    if layout == "json":
        (root / CLASS_INDEX).write_text(json.dumps({i: [wnid, f"stripes_{i}"] for i, wnid in enumerate(wnids)}))
        (root / VAL_JSON).write_text(json.dumps({f"{name}.JPEG": wnid for name, wnid in answers.items()}))
    elif layout == "csv":
        rows = [f"{name},{wnid} 1 1 {size[0]} {size[1]} " for name, wnid in answers.items()]
        (root / VAL_CSV).write_text("\n".join(["ImageId,PredictionString", *rows]) + "\n")
    return wnids


def write_cifar10(root: str | Path, *, images: int = 40, seed: int = 0) -> None:
    """Writes the six files of CIFAR-10's python version, with so many pictures each, to an empty or new folder."""
    root = Path(root)
    if root.exists() and any(root.iterdir()):
        raise FormatError(f"{root}: not empty, expected a new folder")
    (root / cifar10.FOLDER).mkdir(parents=True)
    g = torch.Generator().manual_seed(seed)
    for name in (*cifar10.TRAIN, *cifar10.TEST):
        labels = (torch.randperm(images, generator=g) % cifar10.CLASSES).tolist()
        pictures = torch.stack([pattern(label, cifar10.CLASSES, (32, 32), g) for label in labels])
        content = {
            "batch_label": f"{name} of generated pictures",
            "labels": labels,
            "data": pictures.flatten(1).numpy(),
            "filenames": [f"stripes_s_{i:06d}.png" for i in range(images)],
        }
        (root / cifar10.FOLDER / name).write_bytes(pickled.dumps(content))


def pattern(label: int, classes: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """uint8 (3, H, W): stripes in the direction and colour of a class, with random phase, period and noise."""
    width, height = size
    phase, period, noise = torch.rand(3, generator=generator).tolist()
    turn = math.pi * label / classes
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    along = (x * math.cos(turn) + y * math.sin(turn)) / (4 + 4 * period)
    wave = 0.5 + 0.5 * torch.sin(2 * math.pi * (along + phase))
    hue = 2 * math.pi * (label / classes + torch.arange(3) / 3)
    colour = 0.5 + 0.5 * torch.cos(hue)
    image = wave * colour[:, None, None] + 0.2 * noise * torch.rand(3, height, width, generator=generator)
    return (image.clamp(0, 1) * 255).to(torch.uint8)


def _write(path: Path, label: int, classes: int, size: tuple[int, int], kind: str, generator: torch.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image: Image.Image = v2.functional.to_pil_image(pattern(label, classes, size, generator))
    if kind == "png":
        image.save(path, "PNG")
    elif kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        image.transpose(Image.Transpose.ROTATE_90).save(path, "JPEG", exif=exif)
    else:
        image.convert({"grey": "L", "cmyk": "CMYK", "rgb": "RGB"}[kind]).save(path, "JPEG")
