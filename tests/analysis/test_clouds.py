"""`parapos analyze` on point clouds: heads of each block, and maps of a query on its cloud."""

import json

import numpy as np
import pytest
import torch

from parapos import analysis
from parapos.analysis import clouds
from parapos.cli import main
from parapos.data import create_dataset
from parapos.models.ptv3.look import strongest, watch_blocks
from parapos.training import checkpoint

from ..predict.points import make_object_run, make_scene_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_scene_run(tmp_path_factory.mktemp("runs") / "rooms")


def test_heads_and_maps(run, tmp_path, capsys):
    assert main(f"analyze {run} --samples 2 --index 1 --query=-0.5,0.2,1 --out {tmp_path}".split()) == 0
    told = json.loads((tmp_path / "heads.json").read_text())
    assert told["blocks"] == ["enc.enc0.block0", "enc.enc1.block0", "dec.dec0.block0"]
    assert [len(row) for row in told["z"]] == [len(row) for row in told["bounded"]] == [1, 2, 2]
    assert (told["samples"], told["split"]) == (2, "test")
    assert all(-1 <= score <= 1 for row in told["bounded"] for score in row)
    maps = np.load(tmp_path / "maps.npz")
    seen = ~np.isnan(maps["attention"])
    assert 1 < seen.sum() <= 64
    assert maps["attention"][seen].sum() == pytest.approx(1)
    assert seen[maps["query"]]
    assert maps["distance"][maps["query"]] == maps["direction"][maps["query"]] == 0
    total = maps["sum"][seen]
    assert np.allclose(np.exp(total - total.max()) / np.exp(total - total.max()).sum(), maps["attention"][seen])
    for name in ("heads.png", "maps.png"):
        assert (tmp_path / name).read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("layer", [1, 2, 3])
@torch.no_grad()
def test_maps_are_the_attention_of_the_network(run, layer):
    model, _ = checkpoint.load_weights(run / "weights.safetensors")
    model.eval()
    sample = create_dataset("rooms", "test", step=0.25, grid_size=0.25)[0]
    with watch_blocks(model) as blocks:
        model(sample["feat"], sample["coord"], sample["grid_coord"], torch.tensor([len(sample["coord"])]))
        seen = blocks[layer - 1]
        heads = seen.block.attn.heads
        found = strongest(seen, 10**6, 10)
    maps = [clouds.make_cloud_maps(model, sample, layer=layer, head=h + 1, query=(7,)) for h in range(heads)]
    row = (found.queries == maps[0].query).nonzero()[0, 0]
    mean = torch.stack([x.attention for x in maps]).mean(0)
    assert torch.allclose(mean[found.keys[row]], found.weights[row].double(), atol=1e-5)
    assert maps[0].point == 6
    cell = sample["grid_coord"][6] >> seen.stage.level
    assert torch.equal(seen.stage.cells[maps[0].query], cell)
    direction = maps[0].direction
    far = (seen.stage.coord - seen.stage.coord[maps[0].query]).norm(dim=1)
    assert (maps[0].distance[~direction.isnan()] <= 1e-9).all()  # parabolas open downwards
    assert far[maps[0].query] == 0


def test_copies_ask_nothing(run):
    """Each point of a stage is a query once, wherever its copies are."""
    model, _ = checkpoint.load_weights(run / "weights.safetensors")
    sample = create_dataset("rooms", "test", step=0.25, grid_size=0.25)[0]
    with watch_blocks(model.eval()) as blocks:
        model(sample["feat"], sample["coord"], sample["grid_coord"], torch.tensor([len(sample["coord"])]))
        for seen in blocks:
            layers = [clouds.layer_of(seen, patches) for patches in seen.patches()]
            asked = sum(int(parts.queries.sum()) for layer in layers for parts in layer.blocks())
            assert asked == len(seen.x)


def test_objects(tmp_path, capsys):
    run = make_object_run(tmp_path / "run")
    assert main(f"analyze {run} --samples 1 --layer 2 --head 2".split()) == 0
    assert np.load(run / "analysis" / "maps.npz")["coord"].shape[1] == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--layer 4", "layer must be from 1 to 3, got 4"),
        ("--head 2 --layer 1", "head of layer 1 must be from 1 to 1, got 2"),
        ("--query 100000", "query must be a point from 1 to"),
        ("--query 1,2", "query must be the number of a point or x,y,z"),
        ("--at 3,4", "at is for models of images"),
        ("--columns 3", "columns is for models of events"),
        ("--index 999", "index must be from 0 to"),
    ],
)
def test_refused(run, words, told, tmp_path, capsys):
    assert main(f"analyze {run} --samples 1 --out {tmp_path} {words}".split()) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_encodings_are_refused(tmp_path):
    with pytest.raises(analysis.ReportError, match="expected a model with pape"):
        analysis.run(make_scene_run(tmp_path / "run", "rope"), tmp_path / "out")
