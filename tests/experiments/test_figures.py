"""Figures and tables of the paper: what they say follows from the published numbers and from the encodings."""

import pytest

from parapos import cli
from parapos.experiments import figures, hyperparameters
from parapos.recipes import paper
from parapos.training import recipe


def test_the_verdict_follows_from_the_published_table():
    found = figures.verdicts()
    words = [word for word, _ in found.values()]
    assert (words.count("matches"), words.count("exceeds"), words.count("is below")) == (5, 2, 1)
    assert {name for name, (word, _) in found.items() if word == "exceeds"} == {"ucf101", "gen1"}
    assert found["scannet"] == ("is below", -1.6)
    assert found["ucf101"] == ("exceeds", 5.6)


def test_the_verdict_changes_with_the_numbers(monkeypatch):
    other = {"columns": ["a", "b", "average"], "rows": {"rope": [10.0, 5.0, 7.5], "pape": [9.5, 5.6, 7.5]}}
    monkeypatch.setattr(figures, "paper", lambda: {"generality": other})
    assert figures.verdicts() == {"a": ("matches", -0.5), "b": ("exceeds", 0.6)}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("1a", "their sum is the encoding's bias to within"),
        ("1b", "PaPE is 10.5 points above the next best, LookHere"),
        ("1c", "matches the best baseline on 5 data sets, exceeds it on 2 and is below it on 1"),
        ("alibi", "| PaPE-RI |                       4.00 |"),
    ],
)
def test_figures_are_drawn(name, told, tmp_path, capsys):
    assert cli.main(["figure", name, "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert told in out
    path = tmp_path / "out" / f"figure-{name}.png"
    assert path.read_bytes()[1:4] == b"PNG"
    assert f"wrote {path}" in err


def test_the_sum_of_parabolas_is_the_bias(tmp_path):
    gap = float(figures.parabolas(tmp_path / "a.png").rsplit(" ", 1)[1].rstrip("."))
    assert gap < 1e-5


@pytest.mark.parametrize("name", ["2", "heads"])
def test_figures_of_a_run(name, tmp_path, capsys):
    assert cli.main(["figure", name, "--out", str(tmp_path)]) == 2
    assert "expected --run RUN" in capsys.readouterr().err
    assert cli.main(["figure", name, "--run", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err


def test_options_that_would_be_ignored_are_refused(tmp_path, capsys):
    assert cli.main(["figure", "1a", "--run", str(tmp_path)]) == 2
    assert "--run is for figures of a trained model" in capsys.readouterr().err


def test_recipes_have_the_papers_hyperparameters():
    """Every setting of every recipe, but those that docs/paper.md lists as different."""
    values = hyperparameters.compare()
    compared = {place: pair for place, pair in values.items() if pair[1] is not None}
    assert {name for _, name in compared} == set(paper()["hyperparameters"]["columns"])
    unsaid = {(side, name) for side in ("width", "height") for name in ("dvsgesture", "gen1", "scannet", "modelnet40")}
    assert set(values) - set(compared) == unsaid  # the sensor has them, or clouds have no such thing
    different = {place for place, (theirs, ours) in compared.items() if "ours" in hyperparameters._cell(theirs, ours)}
    assert different == {("warm-up epochs", "nuscenes")}


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--only", "a"], "--only"),
        (["--from-cache"], "--from-cache"),
        (["--jobs", "2"], "--jobs"),
        (["--results", "x"], "--results"),
        (["--tflops", "3"], "--tflops"),
        (["--root", "x"], "--root"),
        (["--optim.lr", "1"], "--optim.lr"),
    ],
)
def test_hyperparameters_take_no_other_option(words, option, capsys):
    assert cli.main(["table", "hyperparameters", *words]) == 2
    assert f"table hyperparameters: {option} has no effect" in capsys.readouterr().err


def test_a_difference_in_hyperparameters_is_shown(monkeypatch, capsys):
    real = recipe.load
    monkeypatch.setattr(recipe, "load", lambda name: real(name, {"optim.lr": "0.5"}))
    assert cli.main(["table", "hyperparameters"]) == 0
    assert capsys.readouterr().out.count(", ours 0.5 ") == sum(name in recipe.shelf() for name in _names())


def _names():
    return paper()["hyperparameters"]["columns"]
