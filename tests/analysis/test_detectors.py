"""`parapos analyze` on detectors: heads, maps of a place in an image, and GEN1 through time."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from parapos import analysis
from parapos.cli import main
from parapos.data.coco_tree import write_tiny

from ..data.event_trees import load_gen1, small_gen1
from ..predict.conftest import make_detector, make_event_detector


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("coco") / "data"
    write_tiny(root, train=6, val=6, test=6)
    return root


@pytest.mark.parametrize("fit", ["stretch", "inside"])
def test_heads_and_maps_of_a_detector(fit, tree, tmp_path, capsys):
    run = make_detector(tmp_path / "run", fit=fit, data__options__fit=fit)
    assert main(f"analyze {run} --root {tree} --samples 4 --index 2 --query 2,1 --layer 1 --head 2".split()) == 0
    told = json.loads((run / "analysis" / "heads.json").read_text())
    assert (told["samples"], np.array(told["z"]).shape) == (4, (1, 2))
    arrays = np.load(run / "analysis" / "maps.npz")
    rows, cols = arrays["distance"].shape
    assert (rows * 16, cols * 16) == arrays["image"].shape[1:]
    assert max(rows, cols) == 4
    assert arrays["query"].tolist() == [1, 0]
    assert arrays["attention"].sum() == pytest.approx(1)
    assert (run / "analysis" / "maps.png").read_bytes()[1:4] == b"PNG"


def test_a_place_in_a_file(tree, tmp_path, capsys):
    run = make_detector(tmp_path / "run")
    Image.new("RGB", (200, 100), (200, 30, 30)).save(tmp_path / "red.png")
    words = f"analyze {run} --root {tree} --samples 1 --image {tmp_path}/red.png"
    assert main(f"{words} --at 120,10".split()) == 0  # 64 x 64 for the model, so at 38.4 and 6.4 of 16-pixel patches
    assert np.load(run / "analysis" / "maps.npz")["query"].tolist() == [0, 2]
    capsys.readouterr()
    for more, message in (
        ("--at 200,10", "x and y from 0 to 200 and 0 to 100, got 200,10"),
        ("--at 3", "expected x,y in pixels"),
        ("--at 1,1 --query 1,1", "query and at exclude each other"),
    ):
        assert main([*words.split(), *more.split()]) == 2
        assert message in capsys.readouterr().err


def test_gen1_through_time(tmp_path, capsys):
    pytest.importorskip("numba")
    data = load_gen1("test", small_gen1(tmp_path / "gen1"))
    run = make_event_detector(tmp_path / "run", data.preprocessing)
    words = f"analyze {run} --root {tmp_path}/gen1 --samples 2 --index 3 --columns 4"
    assert main(words.split()) == 0
    arrays = np.load(run / "analysis" / "maps.npz")
    assert arrays["distance"].shape == (4, 15, 19)
    ages = [arrays["token_t"][cells[cells >= 0]] for cells in arrays["shown"]]
    assert all(before.min() >= after.max() for before, after in pairwise(ages))  # time to the right
    assert main([*words.split(), "--at", "1,1"]) == 2
    assert "at is for models of images" in capsys.readouterr().err


def test_the_newest_token_of_a_cell_is_shown_with_both_clocks():
    import parapos

    torch.manual_seed(0)
    size = dict(dim=32, heads=2, depth=1, mlp_dim=32, neck_dim=16)
    model = parapos.create_model("event_det_nano", encoding="pape", parabolas=4, num_classes=2, **size).eval()
    codes = torch.randint(0, 5120, (5, 8), dtype=torch.int16)
    sample = {"codes": codes, "x": torch.tensor([1, 1, 1, 2, 2]), "y": torch.zeros(5, dtype=torch.long)}
    for clock, t in (("time", [0, 10, 20, 30, 40]), ("age", [40, 30, 20, 10, 0])):
        strip = analysis.make_event_strip(
            model, {**sample, "t": torch.tensor(t)}, layer=1, head=1, columns=1, grid=(15, 19), clock=clock
        )
        assert strip.data["shown"][0, 0, 1:3].tolist() == [2, 4]
    assert strip.names == ("0 to 0 ms before",)
