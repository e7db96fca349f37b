"""Benchmarks of detectors: they run, measure what they say, and refuse what cannot be measured."""

import json
from pathlib import Path

import pytest
import torch

from parapos import cli
from parapos.bench import detection as bench
from parapos.bench import measure, steps
from parapos.bench import model as bench_model
from parapos.models import create_model


@pytest.fixture(scope="module")
def results():
    pytest.importorskip("faster_coco_eval")
    pytest.importorskip("pycocotools")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "ROUNDS", (2, 2))
        return bench.run(quick=True, images=5, seconds=0.1)


def test_quick_run(results):
    assert results["quick"] == measure.SMOKE
    assert results["setting"]["boxes"] == 64
    for name in ("assignment", "evaluation"):
        entry = results[name]
        assert entry["rounds"] == 2
        assert entry["quartiles"][0] <= entry["ratio"] <= entry["quartiles"][1]
    assert 0 < results["assignment"]["ratio"] < 1
    assert results["evaluation"]["largest_difference"] < 1e-9
    told = bench.markdown(results)
    assert told.startswith("A SMOKE TEST, NOT A RESULT")
    assert "64 boxes an image" in told
    assert "5 images with 100 detections" in told


def test_committed_results():
    """benchmarks/detection.* are of the sizes that are promised, and within the limits; docs/detection.md has them."""
    path = Path(__file__).parents[2] / "benchmarks" / "detection.json"
    results = json.loads(path.read_text())
    assert "quick" not in results
    assert results["setting"] == dict(model="vit_det_base", size=640, batch=1, boxes=64, images=5000, found=100)
    for name, limit in (("assignment", 0.05), ("evaluation", 0.5)):
        assert results[name]["ratio"] <= limit
    assert results["evaluation"]["largest_difference"] < 1e-6
    told = path.with_suffix(".md").read_text()
    assert told == bench.markdown(results) + "\n"
    assert told in (path.parents[1] / "docs" / "detection.md").read_text()


def test_command(results, monkeypatch, tmp_path, capsys):
    asked = {}
    monkeypatch.setattr(bench, "run", lambda **options: asked.update(options) or results)
    words = "--model vit_det_nano --size 64 --batch 2 --boxes 3 --images 4 --seconds 5 --quick --threads 1"
    assert cli.main(["bench", "detection", *words.split(), "--out", f"{tmp_path}/x"]) == 0
    assert asked == dict(model="vit_det_nano", size=64, batch=2, boxes=3, images=4, seconds=5.0, quick=True)
    assert json.loads((tmp_path / "x.json").read_text())["assignment"]["rounds"] == 2
    assert "evaluation over pycocotools" in (tmp_path / "x.md").read_text()


def test_the_measured_step_is_the_tasks():
    """Sums and weights of both branches, divided as a step on one device divides them."""
    torch.manual_seed(0)
    size = dict(dim=32, heads=2, depth=1, mlp_dim=32, neck_dim=16, drop_path=0.0, parabolas=4)
    net = create_model("vit_det_nano", encoding="pape", num_classes=80, **size).eval()
    images, targets = torch.rand(2, 3, 64, 64), steps.make_boxes(2, 5, 64, "cpu", 80)
    boxes = targets[0]
    assert ((boxes >= 0) & (boxes <= 64)).all()
    assert (boxes[..., 2:] > boxes[..., :2]).all()

    from parapos.models.detector import detection_loss

    sums = detection_loss(net(images), *targets)
    expected = sum(part.sum(0) / sums.weight.clamp(min=1) for part in sums.parts.values()).sum() * 2
    torch.testing.assert_close(steps.detector_loss(net, images, targets), expected)


def test_detectors_in_the_model_benchmark():
    assert {"vit_det_base", "vit_det_nano", "vit_base_patch16"} <= set(bench_model.MODELS)
    assert "event_det_nano" not in bench_model.MODELS
    none, pape = bench_model.Row("none"), bench_model.Row("pape", 50)
    assert bench_model.parameters(none, "vit_det_base")["parameters"] == 88_912_240
    assert bench_model.parameters(pape, "vit_det_base")["positional"] == 11_073_600
    counts = [bench_model.count(row, "vit_det_nano", 64, "cpu") for row in (none, pape)]
    assert 0 < counts[0]["inference"] < counts[1]["inference"] < counts[1]["training"]
    setting = bench_model.Setting("vit_det_nano", 64, 1, "fp32", "cpu")
    net = bench_model.build(none, "vit_det_nano")
    assert bench_model.step(net, "inference", setting)().shape == (1, 84, 6)
    bench_model.step(net, "training", setting)()
