"""What detection costs beside its network: assigning boxes to anchors, and judging detections.

Assignment: its share of a whole training step, both branches, with the decoding of boxes that it needs, for many boxes
per image. Evaluation: seconds from a list of detections to COCO's figures, beside pycocotools on the same list.
"""

from __future__ import annotations

import contextlib
import io
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..models import create_model
from ..models.detector import Detector
from ..models.detector.boxes import decode_boxes, flatten, make_anchors
from ..models.detector.loss import ONE_TO_MANY, ONE_TO_ONE
from ..tasks.coco_scores import coco_scores
from ..text import table
from . import measure
from .steps import detector_loss, make_boxes

MODEL, SIZE, BATCH, BOXES = "vit_det_base", 640, 1, 64
IMAGES, FOUND, TRUE, CLASSES = 5_000, 100, 8, 80  # images, detections and boxes of each, classes
SECONDS, ROUNDS = 120.0, (2, 30)  # pycocotools takes a minute or more for a round
OURS, THEIRS = "parapos", "pycocotools"
LIMITS = {"assignment": 0.05, "evaluation": 0.5}  # the ratios that are promised
PROTOCOL = {
    "assignment": "both branches and the decoding of their boxes, over a step of forward, loss, backward and AdamW",
    "evaluation": "from a list of detections, as the server takes it, to the twelve figures, indexing included",
    "time": "of the processor, cases in turn; median and quartiles of the per-round ratios",
}


def run(
    *,
    model: str = MODEL,
    size: int = SIZE,
    batch: int = BATCH,
    boxes: int = BOXES,
    images: int = IMAGES,
    seconds: float = SECONDS,
    quick: bool = False,
) -> dict[str, Any]:
    """Measures both, each for half of `seconds` and two rounds at least, which take some minutes with the sizes given
    here. quick: a small model, a few images, and the least rounds."""
    if quick:
        model, size, images = "vit_det_nano", 128, min(images, 40)
    bounds = (ROUNDS[0], ROUNDS[0]) if quick else ROUNDS
    results: dict[str, Any] = {
        **measure.machine("cpu", quick=quick),
        "commit": measure.commit(),
        "protocol": PROTOCOL,
        "setting": {"model": model, "size": size, "batch": batch, "boxes": boxes, "images": images, "found": FOUND},
    }
    steps = training_calls(model, size, batch, boxes)
    for call in steps.values():
        call()
    times = measure.in_turn(steps, _clock("assignment"), seconds / 2, bounds)
    results["assignment"] = _entry(times["assignment"], times["step"])
    judges, figures = evaluation_calls(images)
    times = measure.in_turn(judges, _clock("evaluation"), seconds / 2, bounds)
    apart = max(abs(a - b) for a, b in zip(figures[OURS], figures[THEIRS], strict=True))
    results["evaluation"] = {**_entry(times[OURS], times[THEIRS]), "largest_difference": apart}
    return results


def _clock(what: str) -> Callable[[Callable[[], object]], float]:
    """Seconds of the processor for a call, which are also told: a round may take a minute."""

    def clock(call: Callable[[], object]) -> float:
        seconds = measure.processor_time(call)
        measure.progress(f"{what}: {call.__name__} took {seconds:.3g} s")
        return seconds

    return clock


def _entry(values: list[float], base: list[float]) -> dict[str, Any]:
    seconds = {"seconds": statistics.median(values), "base_seconds": statistics.median(base)}
    return {**seconds, **measure.spread(values, base)}


def training_calls(model: str, size: int, batch: int, boxes: int) -> dict[str, Callable[[], object]]:
    """A training step, and the assignments of a step on the same outputs."""
    torch.manual_seed(0)
    net = create_model(model, encoding="pape", num_classes=CLASSES)
    assert isinstance(net, Detector)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, fused=True)
    images = torch.rand(batch, 3, size, size)
    targets = make_boxes(batch, boxes, size, "cpu", CLASSES)

    def step() -> None:
        detector_loss(net, images, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.no_grad():
        raw = net(images)
    anchors = make_anchors(raw.o2o, raw.strides)
    branches = [(flatten(maps, len(raw.bins)), way) for maps, way in ((raw.o2m, ONE_TO_MANY), (raw.o2o, ONE_TO_ONE))]

    def assign() -> None:
        for (distances, classes), assigner in branches:
            with torch.no_grad():
                predicted = decode_boxes(distances, raw.bins, anchors)
            assigner(classes, predicted, anchors, *targets, raw.mask)

    return {"step": step, "assignment": assign}


def make_results(images: int, seed: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Random boxes as COCO's file of instances, and detections as its server takes them: near some of the boxes, and
    anywhere."""
    rng = np.random.default_rng(seed)
    sides = np.exp(rng.uniform(np.log(8), np.log(300), (images, TRUE, 2)))
    boxes = np.concatenate([rng.uniform(0, 640 - sides), sides], axis=2)
    labels = rng.integers(1, CLASSES + 1, (images, TRUE))
    near = rng.integers(0, TRUE, (images, FOUND))
    found = np.take_along_axis(boxes, near[..., None], axis=1) * rng.normal(1, 0.1, (images, FOUND, 4))
    classes = np.where(rng.random((images, FOUND)) < 0.5, np.take_along_axis(labels, near, axis=1), 0)
    classes = np.where(classes == 0, rng.integers(1, CLASSES + 1, (images, FOUND)), classes)
    scores = rng.random((images, FOUND))
    notes = [
        {"id": 1 + i * TRUE + j, "image_id": i, "category_id": int(labels[i, j]), "bbox": boxes[i, j].tolist()}
        for i in range(images)
        for j in range(TRUE)
    ]
    truth = {
        "images": [{"id": i, "width": 640, "height": 640, "file_name": f"{i}.jpg"} for i in range(images)],
        "annotations": [{**note, "area": note["bbox"][2] * note["bbox"][3], "iscrowd": 0} for note in notes],
        "categories": [{"id": k, "name": str(k)} for k in range(1, CLASSES + 1)],
    }
    rows = zip(found.reshape(-1, 4).tolist(), classes.ravel().tolist(), scores.ravel().tolist(), strict=True)
    detections = [
        {"image_id": place // FOUND, "category_id": label, "bbox": box, "score": score}
        for place, (box, label, score) in enumerate(rows)
    ]
    return truth, detections


def evaluation_calls(images: int) -> tuple[dict[str, Callable[[], object]], dict[str, list[float]]]:
    """Both evaluations of the same detections, and a place for the figures that each call leaves."""
    truth, detections = make_results(images)
    figures: dict[str, list[float]] = {}

    def ours() -> None:
        figures[OURS] = list(map(float, coco_scores(truth, detections).stats.values()))

    def theirs() -> None:
        from pycocotools.coco import COCO  # type: ignore[import-untyped]
        from pycocotools.cocoeval import COCOeval  # type: ignore[import-untyped]

        with contextlib.redirect_stdout(io.StringIO()):
            gt = COCO()
            gt.dataset = {**truth, "info": {}}
            gt.createIndex()
            judge = COCOeval(gt, gt.loadRes([dict(entry) for entry in detections]), "bbox")
            judge.evaluate()
            judge.accumulate()
            judge.summarize()
        figures[THEIRS] = list(map(float, judge.stats))

    return {OURS: ours, THEIRS: theirs}, figures


def markdown(results: dict[str, Any]) -> str:
    """Both results as a table, with the limits that they are held to."""
    setting = results["setting"]
    what = {
        "assignment": f"assignment over a training step: {setting['model']} at {setting['size']} px, batch "
        f"{setting['batch']}, {setting['boxes']} boxes an image",
        "evaluation": f"evaluation over {THEIRS}: {setting['images']} images with {setting['found']} detections each",
    }
    rows = []
    for name, measured in what.items():
        entry = results[name]
        low, high = entry["quartiles"]
        ratio = f"{entry['ratio']:.2%} ({low:.2%} to {high:.2%}; {entry['rounds']})"
        times = [f"{entry[key]:.3g} s" for key in ("seconds", "base_seconds")]
        rows.append([measured, *times, ratio, f"{LIMITS[name]:.0%}"])
    lines = [*measure.warning(results), f"Detection on {measure.where(results)}, commit {results['commit']}."]
    lines.append(table(["", "time", "of", "ratio (quartiles; rounds)", "at most"], rows))
    difference = results["evaluation"]["largest_difference"]
    return "\n\n".join([*lines, f"The figures of both evaluations differ by at most {difference:.1e}."])
