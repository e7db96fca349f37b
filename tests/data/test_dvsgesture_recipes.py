"""Recipes of DvsGesture: the paper's values, sizes and scores."""

import os
import re
import tomllib
from pathlib import Path

import pytest
import torch

from parapos.data.augment.events import EventAugment

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
TABLES = SHARED / "paper" / "tables.toml"


def test_recipes_are_the_papers():
    recipe = pytest.importorskip("parapos.training.recipe")
    full = recipe.load("dvsgesture")
    sample = {key: tuple(value) if isinstance(value, list) else value for key, value in full.augment.sample.items()}
    assert EventAugment(**sample) == EventAugment()
    assert full.data.options == {"patch": 16, "threshold": 256, "refractory_us": 100_000}
    assert (full.optim.epochs, full.optim.batch, full.optim.lr, full.optim.final_lr) == (300, 32, 5e-5, 5e-7)
    assert (full.optim.warmup, full.optim.weight_decay, full.optim.decay) == (0.05, 0.05, "all")
    assert (full.optim.betas, full.optim.eps, full.optim.clip, full.optim.ema) == ((0.9, 0.999), 1e-8, 0.0, 0.0)
    assert (full.augment.smoothing, full.augment.mixup, full.augment.cutmix) == (0.1, 0.0, 0.0)
    assert (full.run.precision, full.run.compile) == ("16-mixed", False)
    assert (full.model.options["drop_path"], full.model.options["time_scale"]) == (0.1, 50_000)
    matched = recipe.load("dvsgesture_matched")
    assert (matched.data, matched.augment, matched.optim, matched.run) == (
        full.data,
        full.augment,
        full.optim,
        full.run,
    )


def test_recipes_have_the_papers_sizes():
    recipe = pytest.importorskip("parapos.training.recipe")

    def size(name, encoding):
        with torch.device("meta"):
            return sum(
                p.numel()
                for p in recipe.load(name, {"model.encoding": encoding}).model.build({"num_classes": 11}).parameters()
            )

    assert (size("dvsgesture", "rope"), size("dvsgesture", "pape")) == (88_999_691, 100_080_491)
    assert size("dvsgesture_matched", "rope") == 88_999_691 + 11_073_600


@pytest.mark.skipif(not TABLES.is_file(), reason="no tables of the paper here")
def test_recipes_state_the_papers_scores():
    recipe = pytest.importorskip("parapos.training.recipe")
    tables = tomllib.loads(TABLES.read_text())
    header = Path(recipe.find("dvsgesture")).read_text()
    place = tables["generality"]["columns"].index("dvsgesture")
    for encoding in ("sincos", "rope", "rope_mixed", "alibi", "pape", "pape_ri"):
        (score,) = re.findall(rf"^# +{encoding} +([\d.]+)$", header, re.MULTILINE)
        assert float(score) == tables["generality"][encoding][place]
    header = Path(recipe.find("dvsgesture_matched")).read_text().replace("\n#           ", " ")
    told = re.search(r"in %: (.*); PaPE with its own parameters has ([\d.]+\d)", header)
    scores = dict(part.split(" ") for part in told[1].split(", ")) | {"pape": told[2]}
    columns = tables["parameter_matched"]["columns"]
    assert [float(scores[name]) for name in columns] == tables["parameter_matched"]["dvsgesture"]
