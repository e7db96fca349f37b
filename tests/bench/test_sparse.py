"""The study of sparse attention: what is measured, that it is kept, and what is shown of it."""

import shutil

import pytest
import torch

from parapos.analysis.tiles import inputs
from parapos.attention import native, tiles
from parapos.bench import sparse, sparse_view
from parapos.blocks import Attention
from parapos.experiments.demo import shipped_folder

KEY = ("digits", "pape", 8)


@pytest.fixture
def subject(tmp_path):
    return sparse.Subject("digits", "pape", shutil.copytree(shipped_folder() / "pape", tmp_path / "run"))


def test_all_parts_are_measured_once_and_kept(subject, tmp_path, monkeypatch):
    monkeypatch.setattr(sparse, "TIMED", (2,))
    monkeypatch.setattr(sparse, "ROUNDS", (2, 2))
    numbers = sparse.Numbers.read(tmp_path / "numbers.csv")
    parts = [part for part in sparse.PARTS if part != "memory"]  # needs a process of its own
    sparse.run([subject], numbers, parts=parts, factors=[1, 2], samples=3)
    values = numbers.values["digits", "pape", 2]
    assert values["tokens"] == 4 * numbers.values["digits", "pape", 1]["tokens"]
    assert values["samples"] == 3
    assert values["changed"] == 0
    assert values["logits apart"] < 1e-3
    assert 0 < values["share 1 at 1e-07"] <= 1
    assert min(values[name] for name in ("ratio", "dense ratio", "model ratio", "plain seconds")) > 0
    again = sparse.Numbers.read(numbers.path)
    assert again.values == {key: pytest.approx(found, rel=1e-5) for key, found in numbers.values.items()}
    monkeypatch.setattr(sparse, "calls", lambda *args: pytest.fail("measured twice"))
    sparse.run([subject], again, parts=parts, factors=[1, 2], samples=3)


def test_a_changed_prediction_counts_unless_it_was_close(subject, monkeypatch):
    given = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), True, 36]
    monkeypatch.setattr(sparse, "answers", lambda model, inputs: given)
    tokens, values = sparse.predictions(subject, 1, 5)
    assert (tokens, values["samples"], values["skipping"]) == (36, 5, 5)
    assert (values["changed"], values["close"], values["logits apart"]) == (5, 0, 1.0)
    given[0] = torch.tensor([1.0, 0.9995])
    _, values = sparse.predictions(subject, 1, 5)
    assert (values["changed"], values["close"]) == (0, 5)


def test_what_skips_is_run_twice(subject, monkeypatch):
    model = subject.model()
    runs = []
    model.register_forward_hook(lambda *args: runs.append([layer.tolerance for layer in layers]))
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    image = inputs(model, subject.dataset(4)[0])
    dense, skipping, skips, tokens = sparse.answers(model, image)
    assert dense is skipping
    assert (skips, tokens, runs) == (False, 576, [[None] * 3])
    monkeypatch.setattr(native, "LEAST", 100)
    monkeypatch.setattr(tiles.sparse, "LEAST", 100)
    monkeypatch.setattr(tiles.sparse, "cost", lambda call, share, costs=None: share)
    for _ in range(2):  # the second sample skips as the first did
        runs.clear()
        dense, skipping, skips, _ = sparse.answers(model, image)
        assert (skips, runs) == (True, [[None] * 3, [0.0] * 3])
        assert not torch.equal(dense, skipping)
        torch.testing.assert_close(dense, skipping, rtol=0, atol=1e-4)


def test_tables_tell_what_was_measured_and_what_was_not(tmp_path):
    numbers = sparse.Numbers(tmp_path / "numbers.csv")
    for factor, tokens, plain, ours in ((4, 1000, 1.0, 1.0), (8, 4000, 16.0, 4.0)):
        numbers.add(
            ("digits", "pape", factor), tokens, {"plain seconds": plain, "sparse seconds": ours, "ratio": ours / plain}
        )
    numbers.add(KEY, 4000, {"share 1 at 1e-07": 0.2, "share 2 at 1e-07": 0.4, "share 1 at 0.001": 0.1})
    assert sparse_view.exponent(numbers, "digits", "pape", "plain seconds") == pytest.approx(2.0)
    assert sparse_view.exponent(numbers, "digits", "pape", "sparse seconds") == pytest.approx(1.0)
    assert sparse_view.mean_share(numbers, KEY) == pytest.approx(0.3)
    assert sparse_view.mean_share(numbers, KEY, 1e-3) == pytest.approx(0.1)
    told = sparse_view.tables(numbers)
    assert told["Share of pairs of tiles that is needed, mean of the layers"].splitlines()[-1].split() == (
        ["|", "digits", "|", "PaPE", "|", "-", "|", "-", "|", "-", "|", "30%", "|", "-", "|"]
    )
    assert "0.25" in told["Time of all layers, as a ratio to plain attention"]
    assert "Predictions" not in told  # nothing was measured of it
    (path,) = sparse_view.plot(numbers, tmp_path)
    assert path.read_bytes()[1:4] == b"PNG"


def test_models_are_those_of_the_recipes_and_only_missing_ones_are_trained(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(sparse.tables, "make", lambda grid, *rest: asked.append(grid))
    found = sparse.subjects(tmp_path, "somewhere", 1, ["clips", "fashion_mnist"], print)
    assert [(s.data, s.encoding) for s in found[:3]] == [
        ("clips", "pape"),
        ("fashion_mnist", "pape"),
        ("clips", "pape_ri"),
    ]
    assert found[0].place == tmp_path / "desk_video-pape-0"
    roots = {run.wanted.data.name: run.wanted.data.root for run in asked[0].runs}
    assert roots == {"desk_clips": "", "fashion_mnist": "somewhere"}
    assert len(asked[0].jobs) == 6
