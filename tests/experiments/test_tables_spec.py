"""Tables as files: the types of all keys are checked, and the state of a run is told as it is."""

import re
import shlex
import shutil

import pytest
import torch
from torchvision.transforms import v2

from parapos import cli
from parapos.data.synthetic import pattern
from parapos.experiments import schedule, store, tables
from parapos.experiments.grid import Job, collect
from parapos.training import fit
from parapos.training.checkpoint import CheckpointError

from .test_tables import TINY
from .test_tables_seeds import TINY as SEEDS


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "Two tiny runs"', "title = 3", "title: expected a text, got 3"),
        ('recipe = "digits_smoke"', "recipe = []", "recipe: expected a text, got []"),
        ('paper = "extrapolation"', 'paper = "nature"', "paper: expected one of extrapolation, "),
        ("title", "minutes = -1\ntitle", "minutes: expected a number of 0 or more, got -1"),
        ("title", 'seeds = "a"\ntitle', "seeds: expected a list of different whole numbers, got 'a'"),
        ("title", "seeds = [1, 1]\ntitle", "seeds: expected a list of different whole numbers"),
        ("title", "seeds = [true]\ntitle", "seeds: expected a whole number, got True"),
        ("title", "bench = 1\ntitle", "bench: expected a table, got 1"),
        ("[columns]", "[bench]\nseconds = 'a'\n[columns]", "bench.seconds: expected a number, got 'a'"),
        ("[columns]", "[bench]\nspeed = 1\n[columns]", "bench.speed: "),
        ("[columns]", "[bench]\nbatch = 1\n[columns]", "bench.model: missing"),
        ("title", 'blocks = "a"\ntitle', "blocks: expected a table, got 'a'"),
        ("title", "[compare]\nrows = 1\n[x]\ntitle", "x: unknown key, expected one of title"),
        ("[columns]", "[compare]\nrows = 1\n[columns]", "compare.rows: expected a list of different texts, got 1"),
        ('pape = { "model.encoding" = "pape" }', "pape = 3", "rows.pape: expected a table, got 3"),
        ('"model.encoding" = "pape"', "recipe = 3", "rows.pape.recipe: expected a text, got 3"),
        ('"model.encoding" = "pape"', "instead = 3", "rows.pape.instead: expected a table, got 3"),
        ('"model.encoding" = "pape"', '"model.options" = {}', "rows.pape.model.options: expected a value of the rec"),
        ("16 = { size = 16 }", "16 = 16", "columns.16: expected a table, got 16"),
        ("size = 16 ", 'size = "16" ', "columns.16.size: expected a whole number, got '16'"),
        ("size = 16 ", "size = -16 ", "columns.16.size: expected a whole number of 0 or more, got -16"),
        ("size = 16 ", 'data = "digit" ', "columns.16.data: expected one of imagenet, "),
        ("size = 16 ", 'split = "tset" ', "columns.16.split: expected one of train, val, test; did you"),
        ("size = 16 ", "metric = 3 ", "columns.16.metric: expected a text, got 3"),
        ("size = 16 ", 'folds = "1" ', "columns.16.folds: expected a list of different whole numbers"),
        ("size = 16 ", "count = 1 ", "columns.16.count: expected true or false, got 1"),
        ("size = 16 ", 'without = "pape" ', "columns.16.without: expected a list of different texts, got 'pape'"),
        ('["rope"]', '"rope"', "columns.24.interpolate: expected true or false or a list of different texts, got"),
        ('["rope"]', '["rope", "rope"]', "columns.24.interpolate: expected a list of different texts, got "),
    ],
)
def test_types_are_checked(old, new, message, tmp_path):
    path = tmp_path / "tiny.toml"
    assert old in TINY
    path.write_text(TINY.replace(old, new, 1))
    with pytest.raises(tables.ReportError, match=re.escape(f"tiny.toml: {message}")):
        tables.load(path)


def test_a_table_with_seeds_takes_no_keys_that_it_would_ignore(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(SEEDS.replace("1x = { size = 16 }", "1x = { size = 16, recipe = 'digits' }"))
    with pytest.raises(tables.ReportError, match=r"columns.1x.recipe: expected in a table without seeds only"):
        tables.load(path)


@pytest.mark.parametrize("text", [TINY, SEEDS])
def test_sizes_are_checked_before_anything_is_done(text, tmp_path, capsys):
    path = tmp_path / "tiny.toml"
    path.write_text(text.replace("size = 16", "size = 17", 1))
    assert cli.main(["table", str(path), "--root", str(tmp_path / "runs")]) == 2
    assert "size: expected a multiple of the model's patch size 4, got 17" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def run_of(tmp_path, changes=None):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return tables.resolve(tables.load(path), tmp_path / "my runs", changes or {}, ["pape"]).runs[0]


def test_the_state_is_that_of_the_last_epoch(tmp_path):
    """Without checkpoints, the metrics tell whether a run was finished."""
    run = run_of(tmp_path)
    assert run.state() == "not begun"
    fit.train(run.wanted, run.folder)
    assert run.state() == "finished"
    kept = shutil.copytree(run.folder / "checkpoints", tmp_path / "kept")
    (run.folder / "checkpoints" / "step-000000010.ckpt").unlink()
    assert re.fullmatch(r"step \d of 10", run.state())
    shutil.rmtree(run.folder / "checkpoints")
    assert run.state() == "finished"

    metrics = run.folder / "metrics.csv"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-1]))  # the last one is the last validation
    assert run.state() == "unfinished, no checkpoints"
    store.Cells(run.folder).measure(store.Evaluation(16))
    job = Job(run, {store.Evaluation(16): {"top1"}})
    assert collect([job]).scores == {}, "weights of a run on its way are no result"
    assert job.missing() == [store.Evaluation(16)]
    metrics.unlink()
    assert run.state() == "not begun"
    shutil.copytree(kept, run.folder / "checkpoints")
    assert run.state() == "finished"


def test_a_command_can_be_typed_in(tmp_path):
    told = run_of(tmp_path, {"optim.lr": "1e-3", "run.wandb": "it's; a $project"}).command
    assert shlex.split(told) == [
        *("parapos", "train", "digits_smoke", "--out", f"{tmp_path}/my runs/digits_smoke-pape"),
        *("--model.encoding", "pape", "--optim.lr", "1e-3", "--run.wandb", "it's; a $project"),
    ]


def test_a_column_may_show_another_metric(tmp_path, capsys):
    path, words = tmp_path / "tiny.toml", ["--only", "pape", "--root", str(tmp_path / "runs"), "--optim.epochs", "1"]
    path.write_text(f'{TINY}recall = {{ metric = "recall" }}\n')
    assert cli.main(["table", str(path), *words]) == 0
    cells = store.Cells(tmp_path / "runs" / "digits_smoke-pape")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| pape"))
    found = cells.get(store.Evaluation(16))
    shown = [cell.split()[0] for cell in line.split("|")[2:-1]]
    assert (shown[0], shown[2]) == (f"{100 * found['top1']:.1f}", f"{100 * found['recall']:.1f}")
    for metric, message in (
        ("top1_*", "digits_smoke-pape: val, 16 px: expected the metric top1_*, digits does not report it"),
        ("mean_iou", "tiny: columns.few.metric: Classification has no metric 'mean_iou', expected one of loss, top1"),
    ):
        path.write_text(f'{TINY}few = {{ metric = "{metric}", split = "val" }}\n')
        assert cli.main(["table", str(path), *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", "", "a\\b"])
def test_a_row_stays_in_its_folder(name, tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace("pape = {", f"'{name}' = {{"))
    with pytest.raises(
        tables.ReportError, match=re.escape(f"tiny.toml: rows.{name!r}: expected a name without slashes")
    ):
        tables.load(path)


ROOTED = """
title = "Images of a folder"
recipe = "RECIPE"

[rows]
first = { "model.encoding" = "pape" }
second = { "model.encoding" = "rope" }

[columns]
16 = { size = 16 }
24 = { size = 24 }

[compare]
rows = ["first", "second"]
columns = ["16", "24"]
"""


def test_data_may_be_given_on_the_command_line_and_moved(tmp_path, capsys, monkeypatch):
    """The recipe has no root and another size; the rows are no encodings."""
    draw = torch.Generator().manual_seed(0)
    for split in ("train", "val", "test"):
        for label in range(2):
            folder = tmp_path / "data" / split / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(4):
                v2.functional.to_pil_image(pattern(label, 2, (24, 24), draw)).save(folder / f"{i}.png")
    own = tmp_path / "own.toml"
    own.write_text(
        'extends = "digits_smoke"\n[data]\nname = "images"\nsize = 32\n[optim]\nepochs = 1\nbatch = 4\npart = 4\n'
    )
    path = tmp_path / "rooted.toml"
    path.write_text(ROOTED.replace("RECIPE", str(own)))
    marked = []
    monkeypatch.setattr("parapos.experiments.plots.curves", lambda *args, trained, **options: marked.append(trained))
    words = ["table", str(path), "--root", str(tmp_path / "runs"), "--data.size", "16", "--data.root"]
    assert cli.main([*words, str(tmp_path / "data")]) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    assert "| first against second |" in told.split("Ours, over 16, 24:")[1]
    assert set(marked) == {16}

    (tmp_path / "data").rename(tmp_path / "moved")
    kept = (tmp_path / "runs" / "own-second" / "cells.csv").read_text()
    (tmp_path / "runs" / "own-second" / "cells.csv").unlink()
    assert cli.main([*words, str(tmp_path / "moved")]) == 0, capsys.readouterr().err
    assert (tmp_path / "runs" / "own-second" / "cells.csv").read_text() == kept, "the root is no part of a cell"


def test_metrics_without_epochs_are_told(tmp_path):
    run = run_of(tmp_path)
    run.folder.mkdir(parents=True)
    (run.folder / "recipe.toml").write_text(run.wanted.dumps())
    (run.folder / "metrics.csv").write_text("a,b\n1,2\n")
    for read in (run.state, lambda: schedule.progress(Job(run))):
        with pytest.raises(CheckpointError, match=r"metrics.csv: expected a column epoch, got a,b"):
            read()


def test_only_once_each(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, twice in (("ood --only pape,pape", "pape"), ("efficiency --only rope --only rope", "rope")):
        assert cli.main(["table", *words.split(), "--dry-run"]) == 2
        assert f"--only: expected each row once, got {twice} twice" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["efficiency --dry-run --tflops 3", "ood --tflops 3", "desk --dry-run --tflops 3"])
def test_tflops_are_for_an_estimate(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["table", *words.split()]) == 2
    assert "--tflops is for" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[]", b"{}"])
def test_a_damaged_benchmark_is_named(data, tmp_path, capsys):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "efficiency.json").write_bytes(data)
    assert cli.main(["table", "efficiency", "--from-cache", "--root", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{tmp_path}/tables/efficiency.json: damaged, " in err
