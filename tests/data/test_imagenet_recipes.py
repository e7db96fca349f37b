"""The ImageNet recipes are the paper's: values, sizes, stated scores."""

import os
import re
import tomllib
from pathlib import Path

import pytest
import torch

from parapos.data.transforms import Augment
from parapos.training import recipe

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
TABLES = SHARED / "paper" / "tables.toml"


def test_are_the_papers():
    full = recipe.load("imagenet")
    sample = {key: tuple(value) if isinstance(value, list) else value for key, value in full.augment.sample.items()}
    assert Augment(**sample) == Augment()
    assert (full.data.size, full.data.options["crop"], full.data.options["normalize"]) == (224, 0.875, False)
    assert (full.optim.epochs, full.optim.batch, full.optim.lr, full.optim.warmup) == (300, 1024, 6e-4, 0.05)
    assert (full.optim.weight_decay, full.optim.decay, full.optim.betas) == (0.05, "all", (0.9, 0.999))
    assert (full.augment.mixup, full.augment.cutmix, full.augment.smoothing) == (0.8, 1.0, 0.1)
    assert (full.run.precision, full.optim.clip, full.optim.ema) == ("16-mixed", 0.0, 0.0)
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in recipe.load(name).model.build({"num_classes": 1000}).parameters())
            for name in ("imagenet", "imagenet_ablation", "imagenet_matched")
        }
    assert sizes == {"imagenet": 97_491_496, "imagenet_ablation": 24_747_784, "imagenet_matched": 97_491_496}
    ablation = recipe.load("imagenet_ablation")
    assert (ablation.optim.epochs, ablation.optim.warmup) == (150, 0.05)
    assert (ablation.data, ablation.augment) == (full.data, full.augment)


def test_of_variants_have_the_papers_sizes():

    def added(name, base, **changes):
        model = recipe.load(name, {f"model.{key.replace('__', '.')}": value for key, value in changes.items()}).model
        with torch.device("meta"):
            return sum(p.numel() for p in model.build({"num_classes": 1000}).parameters()) - base

    text = Path(recipe.find("imagenet_ablation")).read_text()
    rows = re.findall(r"--model\.options\.(\w+) false +[\d.]+ +([\d,]+)", text)
    assert len(rows) == 5
    for option, count in rows:
        assert added("imagenet_ablation", 21_975_784, **{f"options__{option}": "false"}) == int(count.replace(",", ""))
    own = {"sincos": 0, "rope": 0, "rope_mixed": 16_416, "alibi": 0, "lookhere": 0, "pape_ri": 110_592}
    assert {e: added("imagenet_matched", 86_417_896, encoding=e) - 11_073_600 for e in own} == own


@pytest.mark.skipif(not TABLES.is_file(), reason="no tables of the paper here")
def test_state_the_papers_scores():
    tables = tomllib.loads(TABLES.read_text())
    header = Path(recipe.find("imagenet")).read_text()
    for i, encoding in enumerate(tables["ood"]["columns"]):
        plain, scaled = (tables[name][encoding] for name in ("extrapolation", "extrapolation_interpolated"))
        want = [plain[0], plain[4], plain[8], scaled[4], scaled[8]]
        want += [tables["ood"][name][i] for name in ("imagenet_v2", "imagenet_r")]
        (row,) = re.findall(rf"^# +{encoding} +([\d. ]+)$", header, re.MULTILINE)
        assert [float(value) for value in row.split()] == want
    header = Path(recipe.find("imagenet_ablation")).read_text()
    for option in ("distance", "direction", "context", "activation", "projection"):
        (score,) = re.findall(rf"options\.{option} false +([\d.]+)", header)
        assert float(score) == tables["ablations"][f"no_{option}"]


def test_reach_the_data(imagenets):
    changes = {"data.root": str(imagenets / "json"), "data.options.complete": "false", "data.size": "32"}
    loaded = recipe.load("imagenet", changes)
    for split, count in (("train", 228), ("val", 12), ("test", 24)):
        dataset = loaded.dataset(split)
        assert len(dataset) == count
        assert dataset[0]["image"].shape == (3, 32, 32)
