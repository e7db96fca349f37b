"""`parapos analyze --tiles`: which tiles of keys the heads of a trained model need."""

import csv
import shutil

import pytest
import torch

from parapos.analysis import tiles
from parapos.attention.sparse import HeadTiles
from parapos.cli import main
from parapos.experiments.demo import shipped_folder
from parapos.experiments.store import ReportError
from parapos.models import create_model


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(shipped_folder() / "pape", tmp_path / "run")


def read(path):
    with path.open() as file:
        return [float(row["share"]) for row in csv.DictReader(file)]


def test_the_command_draws_a_picture_for_each_layer(run, capsys):
    words = f"analyze {run} --samples 2 --tiles 4 --out {run / 'out'}"
    assert main(words.split()) == 0
    shares = read(run / "out" / "tiles.csv")
    pictures = sorted(path.name for path in (run / "out").glob("tiles-*.png"))
    assert len(pictures) * 4 == len(shares)
    assert pictures[0] == "tiles-1.png"
    assert 0 < min(shares) < max(shares) <= 1


def test_shares_and_pictures_follow_the_numbers(run, monkeypatch, tmp_path):
    """Steeper forms need fewer tiles, and are drawn so."""
    load, steep = tiles.checkpoint.load_weights, 1.0

    def changed(path):
        model, about = load(path)
        for name, parameter in model.named_parameters():
            if name.endswith("w_p"):
                parameter.data.mul_(steep)
        return model, about

    monkeypatch.setattr(tiles.checkpoint, "load_weights", changed)
    means, pictures = [], []
    for steep in (0.3, 1.0, 3.0):
        tiles.run(run, tmp_path / str(steep), 4)
        shares = read(tmp_path / str(steep) / "tiles.csv")
        means.append(sum(shares) / len(shares))
        pictures.append((tmp_path / str(steep) / "tiles-1.png").read_bytes())
    assert means[0] > means[1] > means[2]
    assert len(set(pictures)) == 3


def test_what_a_tile_of_queries_sees():
    head = HeadTiles(
        torch.tensor([[0, 1], [2, -1]]), torch.tensor([[0, 1], [2, -1]]), torch.tensor([[1, 0], [1, 1]]).bool()
    )
    at = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]).numpy()  # the last token is where the first one is
    where, share, asks = tiles.seen(head, 0, at)
    assert where.tolist() == [[0, 0], [1, 0]]
    assert share.tolist() == [0.5, 1.0]
    assert asks.tolist() == [True, True]
    assert tiles.seen(head, 1, at)[1].tolist() == [1.0, 1.0]


def test_what_has_no_bound_or_no_size_is_told(run):
    model = create_model("vit_nano_patch4", encoding="rope", num_classes=10)
    (call,) = tiles.calls(model, [torch.zeros(1, 3, 16, 16)])[:1]
    with pytest.raises(ReportError, match="have no bound, expected pape, pape_ri or alibi"):
        tiles.needed(call)
    with pytest.raises(ReportError, match="index must be from 0"):
        tiles.run(run, run / "out", 2, index=10**6)
