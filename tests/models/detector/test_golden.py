"""Weights of the released detectors give the released outputs; the loss gives the released values and gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from parapos.encodings import ENCODINGS
from parapos.interop import official
from parapos.models.detector import RawDetections, decode, detection_loss, postprocess
from parapos.models.detector.boxes import flatten, make_anchors
from parapos.models.detector.events import newest_on_grid
from parapos.models.detector.loss import ONE_TO_MANY, ONE_TO_ONE

from ...golden import FOLDER
from .targets import BINS, STRIDES, padded, to_pixels

OWN = {"pape", "pape_ri", "rope_mixed"}  # encodings that show in the weights
HEADS = 12  # of all recorded networks, which the weights do not tell


def encoding_of(path: Path) -> str | None:
    """By the name of the file, such as coco-rope_mixed-odd; None if it names no encoding."""
    name = path.stem.partition("-")[2].replace("-", "_")
    return max((e for e in ENCODINGS if f"{name}_".startswith(f"{e}_")), key=len, default=None)


def keys(path: Path) -> list[str]:
    with np.load(path) as data:
        return list(data.files)


def recorded(kind: str, *needed: str) -> pytest.MarkDecorator:
    """All files of a kind that have these entries, whatever the rest of their names is."""
    paths = [path for path in sorted(FOLDER.glob(f"{kind}*.npz")) if set(needed) <= set(keys(path))]
    return pytest.mark.parametrize("path", paths or [None], ids=lambda path: path.stem if path else "none")


def read(path: Path | None) -> dict[str, torch.Tensor]:
    """The arrays of a file, and those that files of its kind have in common."""
    if path is None:
        pytest.skip(f"no recorded outputs in {FOLDER}")
    kind = path.stem.partition("-")[0]
    arrays = {}
    for file in (*(path.with_name(f"{kind}-{name}.npz") for name in ("common", "input")), path):
        if file.exists():
            with np.load(file) as data:
                arrays |= {key: torch.from_numpy(data[key]) for key in data.files}
    return arrays


def load(path: Path, data: dict[str, torch.Tensor], task: str, **options):
    state = {key[2:]: x.float() for key, x in data.items() if key.startswith("w:")}
    name = encoding_of(path)
    return official.load(state, task=task, heads=HEADS, encoding=None if name in OWN else name, **options)


def compare(raw: RawDetections, data: dict[str, torch.Tensor]) -> None:
    for branch, maps in (("o2m", raw.o2m), ("o2o", raw.o2o)):
        for level, found in enumerate(maps):
            torch.testing.assert_close(found, data[f"{branch}_{level}"], rtol=0, atol=1e-4)
    boxes, scores = decode(raw.o2o, raw.strides, raw.bins)
    torch.testing.assert_close(boxes, data["boxes"], rtol=0, atol=2e-3)
    torch.testing.assert_close(scores, data["scores"], rtol=0, atol=1e-5)
    found, want = postprocess(raw, data["detections"].shape[1]), data["detections"]
    torch.testing.assert_close(found[..., 4:], want[..., 4:], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[..., :4], want[..., :4], rtol=0, atol=2e-3)


@recorded("coco", "o2o_0", "detections")
@pytest.mark.parametrize("kernel", ["reference", "fused"])
def test_golden_coco(path, kernel):
    data = read(path)
    net = load(path, data, "detection", kernel=kernel)
    with torch.no_grad():
        raw = net(data["image"].float() / 255)
        compare(raw, data)
        found = net.detect(data["image"].float() / 255, max_det=data["detections"].shape[1])
    torch.testing.assert_close(found, postprocess(raw, found.shape[1]))


@recorded("gen1", "o2o_0", "detections")
@pytest.mark.parametrize("kernel", ["reference", "fused"])
def test_golden_gen1(path, kernel):
    data = read(path)
    patch, (rows, cols) = data["patches"].shape[-1], data["grid"].shape[2:]
    net = load(path, data, "event_detection", kernel=kernel, sensor=(rows * patch, cols * patch))
    mask = torch.arange(data["x"].shape[1]) < data["lengths"][:, None]
    with torch.no_grad():
        tokens = net.encode_counts(data["patches"].flatten(2).float(), data["x"], data["y"], data["t"], mask)
        grid = newest_on_grid(tokens, data["x"], data["y"], mask, rows, cols)
        torch.testing.assert_close(tokens[mask], data["tokens"][mask], rtol=0, atol=1e-4)
        torch.testing.assert_close(grid, data["grid"], rtol=0, atol=1e-4)
        compare(net.from_map(grid), data)


@recorded("detloss", "total")
def test_golden_detloss(path):
    data = read(path)
    height, width = data["size"].tolist()
    maps = {b: tuple(data[f"{b}_{i}"].requires_grad_() for i in range(3)) for b in ("o2m", "o2o")}
    batch, bins = len(maps["o2m"][0]), (maps["o2m"][0].shape[1] - int(data["num_classes"])) // 4
    raw = RawDetections(maps["o2m"], maps["o2o"], STRIDES, torch.arange(float(bins)))
    assert torch.equal(raw.bins, BINS)
    targets = padded(data["batch_idx"], data["cls"].flatten(), to_pixels(data["boxes"], height, width), batch)
    sums = detection_loss(raw, *targets)
    scaled = torch.stack([part.sum(0) for part in sums.parts.values()]) / sums.weight.clamp(min=1)  # (3, 2)
    boxes, _ = decode(raw.o2m, STRIDES, raw.bins)
    torch.testing.assert_close(boxes, data["decoded_o2m"], rtol=0, atol=2e-3)
    for i, branch in enumerate(("o2m", "o2o")):
        torch.testing.assert_close(scaled[:, i], data[f"{branch}_loss"], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(sums.weight[i], data[f"{branch}_score_sum"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(batch * scaled.sum(1), data["total"], rtol=1e-4, atol=1e-7)
    (batch * scaled.sum()).backward()
    for branch, levels in maps.items():
        for i, level in enumerate(levels):
            torch.testing.assert_close(level.grad, data[f"{branch}_grad_{i}"], rtol=0, atol=1e-5)
    for branch, assigner in (("o2m", ONE_TO_MANY), ("o2o", ONE_TO_ONE)):
        _, logits = flatten(maps[branch], bins)
        predicted, _ = decode(maps[branch], STRIDES, raw.bins)
        anchors = make_anchors(maps[branch], STRIDES)
        found = assigner(logits.detach(), predicted.detach(), anchors, *targets)
        score, box = torch.zeros(batch, len(anchors.points)), torch.full((batch, len(anchors.points)), -1)
        score[found.image, found.anchor], box[found.image, found.anchor] = found.score, found.box
        want = data[f"{branch}_target_score"]
        torch.testing.assert_close(score, want, rtol=0, atol=1e-5)
        assert torch.equal(box[want > 0], data[f"{branch}_gt"].long()[want > 0])
