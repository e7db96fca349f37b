"""Recipes of ScanNet and ModelNet40: the paper's values, sizes and scores; tables; cells that belong together."""

import os
import re
import tomllib
from pathlib import Path

import pytest
import torch

from parapos.data.augment.points import PointAugment
from parapos.experiments import cost, tables
from parapos.experiments.hyperparameters import compare

recipe = pytest.importorskip("parapos.training.recipe")
SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
TABLES = SHARED / "paper" / "tables.toml"
NAMES = ("scannet", "modelnet40")
ENCODINGS = ("none", "sincos", "rope", "rope_mixed", "alibi", "pape", "pape_ri")


@pytest.mark.parametrize("name", NAMES)
def test_recipes_are_the_papers(name):
    for (row, column), (theirs, ours) in compare().items():
        if column == name and row not in ("width", "height"):
            assert ours == (pytest.approx(theirs) if theirs != "-" else "-"), row
    wanted = recipe.load(name)
    assert (wanted.optim.decay, wanted.optim.clip, wanted.optim.ema) == ("all", 0.0, 0.0)
    assert wanted.task.options["lovasz"] == 1.0
    assert wanted.optim.rates == {"block": 0.1}
    assert wanted.augment.sample == {}
    if name == "scannet":
        assert wanted.task.options["mix"] == 0.8
        assert (wanted.task_name, wanted.task_class.headline) == ("segmentation", "miou")
        assert PointAugment().scale == (0.9, 1.1)


@pytest.mark.parametrize(
    ("name", "classes", "xcpe", "plain"),
    [("scannet", 20, 46_167_572, 14_210_836), ("modelnet40", 40, 38_842_792, 11_936_424)],
)
def test_recipes_have_the_papers_sizes(name, classes, xcpe, plain):
    def size(**changes):
        wanted = recipe.load(name, {"model.encoding": "none", **changes})
        with torch.device("meta"):
            return sum(p.numel() for p in wanted.model.build({"num_classes": classes}).parameters())

    assert (size(**{"model.options.cpe": "xcpe"}), size()) == (xcpe, plain)


@pytest.mark.skipif(not TABLES.is_file(), reason="no tables of the paper here")
@pytest.mark.parametrize("name", NAMES)
def test_recipes_state_the_papers_scores(name):
    known = tomllib.loads(TABLES.read_text())["generality"]
    header = Path(recipe.find(name)).read_text()
    for encoding in ENCODINGS[1:]:
        (score,) = re.findall(rf"^# +{encoding} +([\d.]+)$", header, re.MULTILINE)
        assert float(score) == known[encoding][known["columns"].index(name)]


@pytest.mark.parametrize("name", [*(f"{name}_smoke" for name in NAMES), "rooms_desk", "shapes_desk"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_fits(name, encoding):
    assert recipe.load(name, {"model.encoding": encoding}).model.name == "ptv3_nano"


def test_what_does_not_belong_together_is_refused():
    with pytest.raises(recipe.RecipeError, match=r"data\.options\.grid_size: expected the model's grid_size 0\.02"):
        recipe.load("scannet", {"data.options.grid_size": "0.04"})
    with pytest.raises(recipe.RecipeError, match="takes feat, coord, grid_coord, offset, dataset digits gives image"):
        recipe.load("digits", {"model.name": "ptv3_nano"})
    with pytest.raises(recipe.RecipeError, match="made for grids of images"):
        recipe.load("scannet", {"model.encoding": "lookhere"})
    with pytest.raises(recipe.RecipeError, match="scale must be two positive numbers"):
        recipe.load("scannet", {"augment.sample.scale": "[2.0, 1.0]"})


@pytest.mark.parametrize("name", ["generality", "points"])
def test_tables_have_cells_of_points(name, tmp_path):
    table = tables.load(name)
    grid = tables.resolve(table, tmp_path, {"data.root": "data"}, ["rope", "pape"])
    cells = {(row, column): repeats for (_, row, column), repeats in grid.places.items() if "net" in column}
    assert {run.wanted.data.root for repeats in cells.values() for run in [repeats[0].run]} >= {
        "data/scannet",
        "data/modelnet40",
    }
    scenes = [r[0] for (_, column), r in cells.items() if column.startswith("scannet")]
    assert {repeat.metric.name for repeat in scenes} == {"miou"}
    assert {repeat.evaluation.split for repeat in scenes} == {"val"}
    told = cost.estimate(grid)
    assert "scannet-pape" in told
    assert "GPU hours" in told


def test_the_table_of_points_asks_what_the_paper_leaves_open():
    table = tables.load("points")
    assert {*ENCODINGS, *(f"{name}+xcpe" for name in ENCODINGS)} <= set(table.rows)
    units = {row.changes.get("model.options.pos_unit") for row in table.rows.values()}
    assert units == {None, "metre", "base_cell"}
    assert [column.data for column in table.columns.values()] == [
        "",
        "scannet_precise",
        "scannet_tta",
        "",
        "modelnet40_voting",
    ]


def test_the_estimate_grows_with_points_and_with_xcpe():
    wanted = {cpe: recipe.load("scannet", {"model.options.cpe": cpe}) for cpe in ("none", "xcpe")}
    found = {}
    for cpe, one in wanted.items():
        with torch.device("meta"):
            model = one.model.build({"num_classes": 20})
        assert cost.tokens(model, one) == 102_400
        found[cpe] = cost.gflop(model, 102_400)
        assert cost.gflop(model, 204_800) == pytest.approx(2 * found[cpe], rel=0.1)
    assert found["xcpe"] > 1.2 * found["none"] > 10
