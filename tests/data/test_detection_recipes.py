"""The recipes of COCO and GEN1 are the paper's: values, sizes, stated scores."""

import math
import re
from pathlib import Path

import pytest
import torch

from parapos.data.augment.events import GEN1
from parapos.data.coco import Augment
from parapos.recipes import paper
from parapos.training import recipe
from parapos.training.optim import learning_rate


@pytest.mark.parametrize(("name", "lr", "final", "warmup"), [("coco", 6e-4, 0.0, 0.1), ("gen1", 1e-4, 1e-6, 0.05)])
def test_settings(name, lr, final, warmup):
    optim = recipe.load(name).optim
    assert (optim.epochs, optim.batch, optim.lr, optim.final_lr, optim.warmup) == (150, 64, lr, final, warmup)
    assert (optim.weight_decay, optim.decay, optim.betas, optim.eps) == (0.05, "all", (0.9, 0.999), 1e-8)
    assert (optim.clip, optim.ema, recipe.load(name).model.options["drop_path"]) == (0, 0, 0.1)


def test_augmentations_and_precision():
    coco, gen1 = recipe.load("coco"), recipe.load("gen1")
    sample = {key: tuple(value) if isinstance(value, list) else value for key, value in coco.augment.sample.items()}
    assert Augment(**sample) == Augment() == Augment(mode="randaug_like", flip=0.5, slots=2, scale=(0.1, 2.0))
    assert (coco.data.size, coco.data.options["fit"], coco.run.precision) == (640, "stretch", "16-mixed")
    assert tuple(gen1.augment.sample["operations"]) == GEN1.operations
    assert (gen1.augment.sample["rotation"], gen1.run.precision) == (20.0, "bf16-mixed")
    assert (gen1.data.options["threshold"], gen1.data.options["refractory_us"]) == (256, 100_000)
    assert gen1.model.options["time_scale"] == 100_000


def test_schedule():
    optim = recipe.load("coco", {"optim.lr": "1.0", "optim.warmup": "0.4"}).optim
    found = [round(learning_rate(optim, step, 10), 3) for step in range(1, 11)]
    assert found == [0.25, 0.5, 0.75, 1, 0.933, 0.75, 0.5, 0.25, 0.067, 0]


@pytest.mark.parametrize("name", ["coco", "gen1"])
def test_scores_are_the_papers(name):
    table = paper()["generality"]
    header, place = Path(recipe.find(name)).read_text(), table["columns"].index(name)
    for encoding, values in table["rows"].items():
        found = re.findall(rf"^# +{encoding} +([\d.]+)$", header, re.MULTILINE)
        assert found == ([] if math.isnan(values[place]) else [f"{values[place]:.1f}"]), encoding


def test_sizes():
    with torch.device("meta"):
        for name, classes, total in (("coco", 80, 99_985_840), ("gen1", 2, 103_215_100)):
            model = recipe.load(name).model.build({"num_classes": classes})
            count = sum(p.numel() for p in model.parameters())
            assert total - 16 <= count <= total  # the sixteen fixed numbers need not be parameters


def test_what_cannot_be_is_told():
    with pytest.raises(recipe.RecipeError, match="multiple of the model's patch size"):
        recipe.load("coco_desk", {"data.size": "100"})
    with pytest.raises(recipe.RecipeError, match="has no mixup"):
        recipe.load("coco_desk", {"augment.mixup": "0.5"})
    with pytest.raises(recipe.RecipeError, match="mode must be one of"):
        recipe.load("coco_desk", {"augment.sample.mode": "mosaic"})
    with pytest.raises(recipe.RecipeError, match="takes image"):
        recipe.load("gen1_smoke", {"model.name": "vit_det_nano"})
    with pytest.raises(recipe.RecipeError, match=r"model.options.sensor"):
        recipe.load("gen1_smoke", {"model.options.sensor": "[128, 128]"})


def test_images_of_several_sizes_need_the_patch_of_their_mask():
    eights = {"model.options.patch": "8"}
    with pytest.raises(recipe.RecipeError, match=r"model.options.patch: .*expected 16.*, got 8"):
        recipe.load("coco_desk", {**eights, "data.options.fit": "inside"})
    recipe.load("coco_desk", {"data.options.fit": "inside"})
    recipe.load("coco_desk", {**eights, "data.options.fit": "stretch"})
