"""Tables over seeds: what they resolve to, how runs become raw numbers, and raw numbers tables, sentences and plots."""

import math
import re
import shutil
import statistics
from pathlib import Path
from statistics import fmean, stdev, variance

import pytest

from parapos import cli, recipes
from parapos.encodings import ENCODINGS
from parapos.experiments import render, tables
from parapos.experiments.grid import Results
from parapos.experiments.store import at_step
from parapos.training.checkpoint import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
STUDIES = [name for name in recipes.shelf("tables") if tables.load(name).seeds]
TINY = """
title = "Two tiny encodings"
seeds = [3, 4]
minutes = 2.5

[blocks]
digits = "digits_smoke"

[rows]
pape = { "model.encoding" = "pape" }
none = { "model.encoding" = "none" }

[columns]
loss = { loss_at = 3 }
1x = { size = 16 }
2x = { size = 32 }
3x = { size = 48 }
"2x interpolated" = { size = 32, interpolate = ["pape"] }
"3x interpolated" = { size = 48, interpolate = ["pape"] }
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def made_up(grid, number=lambda row, seed, column: 0.5, without=()):
    """Results with a number for every place and seed but those without."""
    scores = {}
    for (_, row, column), repeats in grid.places.items():
        for seed, repeat in zip(grid.table.seeds, repeats, strict=True):
            scores[repeat.run.name, at_step(3), ""] = {"train_loss": 2.0 + seed}
            scores[repeat.run.name, at_step(5), ""] = {"val_top1": 0.25}
            if not isinstance(repeat.evaluation, str) and (row, seed, column) not in without:
                metrics = {"samples": 50.0, "loss": 1.0, "top1": number(row, seed, column)}
                scores[repeat.run.name, str(repeat.evaluation), "w"] = metrics
    return Results(scores)


def resolved(source, only=()):
    return tables.resolve(tables.load(source), Path("runs"), {}, only)


def test_desk_has_all_encodings_on_both_data_sets(tmp_path):
    table = tables.load("desk")
    assert set(ENCODINGS) - {"polynomial"} <= set(table.rows)
    assert len(table.seeds) >= 3
    grid = tables.resolve(table, tmp_path, {"data.root": "somewhere"})
    assert len(grid.runs) == len(table.rows) * len(table.seeds) * 2
    assert len({run.folder for run in grid.runs}) == len(grid.runs)
    for (block, row, column), repeats in grid.places.items():
        assert [repeat.run.wanted.run.seed for repeat in repeats] == list(table.seeds)
        for repeat in repeats:
            wanted = repeat.run.wanted
            assert (wanted.data.size // 4) ** 2 == 64
            assert wanted.data.root == ("somewhere" if block == "fashion_mnist" else "")
            assert wanted.model.encoding == (row if row in ENCODINGS else "pape")
            factor = float(column.split("x")[0])
            moved = 1 / factor if column.endswith("interpolated") and row != "none" else 1.0
            assert (repeat.evaluation.size, repeat.evaluation.position_scale) == (32 * factor, moved)
    columns = {f"{factor:g}x{end}" for factor in (1, 1.5, 2, 3, 4) for end in ("", " interpolated")}
    assert {column for _, _, column in grid.places} == columns - {"1x interpolated"}
    seeds = [run.wanted.run.seed for run in grid.runs]
    assert seeds == sorted(seeds)  # a table for one seed is whole before the next begins


def test_only_what_differs_between_rows_is_what_is_compared(tmp_path):
    """Same data, augmentation, optimiser and model size for every encoding."""
    grid = resolved("desk")
    for block in grid.table.blocks:
        runs = [repeat.run for place, repeats in grid.places.items() if place[0] == block for repeat in repeats]
        first = runs[0].wanted
        for wanted in (run.wanted for run in runs):
            assert (wanted.data, wanted.augment, wanted.optim) == (first.data, first.augment, first.optim)
            assert wanted.model.options == first.model.options


@pytest.mark.parametrize("name", STUDIES)
def test_studies_resolve(name, tmp_path):
    table = tables.load(name)
    for run in tables.resolve(table, tmp_path, {}).runs:
        for column in table.columns.values():
            assert column.loss_at % run.wanted.run.log_every == 0


def test_numbers_of_a_table(tiny):
    grid = resolved(tiny)
    shares = {"1x": 0.9, "2x": 0.8, "3x": 0.5, "2x interpolated": 0.7, "3x interpolated": 0.6}
    found = made_up(grid, lambda row, seed, column: shares[column] - 0.1 * (seed == 4) - 0.2 * (row == "none"))
    told = render.markdown(grid, found)
    plain, other = (part for part in told.split("\n\n") if part.startswith("|"))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in plain.splitlines()]
    assert lines[0] == ["", "loss", "1x", "2x", "3x", "beyond"]
    assert lines[2] == ["pape", "5.50 ± 0.71", "85.0 ± 7.1", "75.0 ± 7.1", "45.0 ± 7.1", "60.0 ± 7.1"]
    assert lines[3][-1] == "40.0 ± 7.1"
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in other.splitlines()]
    assert lines[0] == ["", "1x", "2x", "3x", "beyond"]
    assert lines[2] == ["pape", "85.0 ± 7.1", "65.0 ± 7.1", "55.0 ± 7.1", "60.0 ± 7.1"]
    error = (2 * statistics.variance([0.0, 10.0]) / 2) ** 0.5
    want = "- digits, positions as they are: best beyond the trained size is PaPE 60.0 ± 7.1, next none 40.0 ± 7.1; "
    assert "among the" not in told
    assert f"{want}the gap is 20.0 points, with a standard error of {error:.1f}." in told
    assert "2 runs with seeds 3 and 4; 50 samples of digits" in told


def test_what_is_missing_is_told(tiny):
    grid = resolved(tiny)
    gone = [("none", seed, column) for seed in (3, 4) for column in grid.table.columns]
    found = made_up(grid, without=[("pape", 4, "2x"), *gone])
    told = render.markdown(grid, found)
    assert "| 50.0 (1 of 2) |" in told
    assert re.search(r"\| none +\| 5.50 ± 0.71 \| +- \|", told)
    assert "best beyond" not in told  # nothing to compare with
    assert "| none " not in render.markdown(resolved(tiny, ["pape"]), found)


@pytest.mark.parametrize(
    ("counts", "told"), [({2}, "2 seeds"), ({0, 1}, "1 of 2 seeds"), ({1, 2}, "1 to 2 of 2 seeds")]
)
def test_plots_tell_how_many_seeds_there_are(tiny, counts, told):
    assert render._seeds(resolved(tiny), counts) == told


def test_raw_numbers_read_back(tiny, tmp_path):
    found = made_up(resolved(tiny), lambda row, seed, column: 1 / 3)
    tables.write_raw(found, tmp_path / "out")
    assert tables.read_raw(tmp_path / "out") == found


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("cells.csv", "run,eval", "run,evil", r"cells.csv: expected the columns run,evaluation"),
        ("cells.csv", "samples,50.0", "samples,x", r"cells.csv: line 2: could not convert"),
        ("curves.csv", "train_loss,5.0,", "train_loss", r"curves.csv: line 2: 3 entries, expected 5"),
        ("cells.csv", "samples,50.0", "samples,", r"cells.csv: line 2: expected a number as value"),
        ("cells.csv", "samples,50.0", "\udcff,50.0", r"cells.csv: line 2: not UTF-8"),
        ("curves.csv", None, None, r"curves.csv: no such file; give --results DIR"),
    ],
)
def test_bad_raw_numbers_are_told(tiny, tmp_path, file, old, new, message):
    tables.write_raw(made_up(resolved(tiny)), tmp_path)
    path = tmp_path / file
    if old is None:
        path.unlink()
    else:
        assert old in path.read_text()
        path.write_bytes(path.read_text().replace(old, new, 1).encode(errors="surrogateescape"))
    with pytest.raises((tables.ReportError, CheckpointError), match=message):
        tables.read_raw(tmp_path)


def test_a_band_is_the_spread_of_the_repeats(tiny):
    line = render._line(resolved(tiny), "pape", [[1.0, 3.0], [2.0], []])
    assert line.values == [2.0, 2.0, None]
    assert (line.low, line.high) == ([2 - 2**0.5, None, None], [2 + 2**0.5, None, None])
    assert not render._line(resolved(tiny), "pape", [[1.0, 3.0]], has_band=False).low


def test_plots_mark_the_size_that_was_trained_at(tiny, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(render.plots, "curves", lambda *args, trained, **rest: seen.append(trained))
    for changes in ({}, {"data.size": "32", "optim.epochs": "1"}):
        grid = tables.resolve(tables.load(tiny), tmp_path, changes)
        tables.write(grid, made_up(grid), tmp_path)
    assert set(seen[: len(seen) // 2]) == {16}
    assert set(seen[len(seen) // 2 :]) == {32}


@pytest.mark.full
def test_a_study_for_real(tiny, tmp_path, monkeypatch, capsys):
    """Trains in two processes, goes on after a stop, and is rebuilt where no run is."""
    monkeypatch.chdir(tmp_path)
    words = ["table", str(tiny), "--jobs", "2"]
    assert cli.main([*words, "--only", "none"]) == 0
    out, err = capsys.readouterr()
    assert "0 of 2 runs are there, 2 to do with 2 processes" in err
    assert re.search(r"\d of 2 runs done, \d+%, left ", err)
    before = {path: path.read_bytes() for path in Path("runs").glob("digits_smoke-none-*/cells.csv")}
    assert len(before) == 2
    assert cli.main([*words, "--dry-run"]) == 0
    assert "Left: 2 runs, about 0.1 hours" in capsys.readouterr().out
    words[-1] = "1"
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert "2 of 4 runs are there, 2 to do" in err
    assert {path: path.read_bytes() for path in before} == before
    base = Path("runs/tables/tiny")
    assert (base / "table.md").read_text() == out
    for name in ("digits.png", "digits-interpolated.png", "digits-loss.png"):
        assert (base / name).stat().st_size > 5000
    assert (base / "cells.csv").read_text().count("\n") == 1 + 2 * (5 + 3) * 6  # none has nothing to interpolate
    assert cli.main(words) == 0
    assert "4 of 4 runs are there, 0 to do" in capsys.readouterr().err

    base.rename(tmp_path / "kept")
    (tmp_path / "runs").rename(tmp_path / "gone")
    assert cli.main(["table", str(tiny), "--from-cache", "--results", "kept"]) == 0
    assert capsys.readouterr().out == out
    assert cli.main(["table", str(tiny), "--from-cache"]) == 2
    assert "docs/results/tiny/cells.csv: no such file" in capsys.readouterr().err


def test_a_run_that_fails_is_told(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "runs/digits_smoke-none-3"
    bad.mkdir(parents=True)
    (bad / "foreign").write_text("")
    assert cli.main(["table", str(tiny), "--only", "none", "--jobs", "1"]) == 2
    err = capsys.readouterr().err
    assert "digits_smoke-none-3: RecipeError" in err
    assert "log.txt" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("desk --only rpoe", "unknown row 'rpoe'"),
        ("desk --from-cache --optim.lr 1", "--section.key is for runs"),
        ("desk-defaults --data.root x --dry-run", "no data set of the table desk-defaults has a root"),
        ("ood --jobs 2", "--jobs is for tables with seeds"),
        ("ood --from-cache --results x", "--results is for tables with seeds"),
    ],
)
def test_errors_are_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["table", *words.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_loss_at_needs_seeds(tiny):
    text = TINY.replace("seeds = [3, 4]", 'recipe = "digits_smoke"')
    tiny.write_text(text.replace('[blocks]\ndigits = "digits_smoke"', "").replace("minutes = 2.5", ""))
    with pytest.raises(tables.ReportError, match=r"columns.loss.loss_at: expected in a table with seeds only"):
        tables.load(tiny)


@pytest.mark.parametrize("name", STUDIES)
def test_the_document_has_the_numbers_of_the_raw_files(name):
    pages = [*sorted(RESULTS.glob("*.md")), RESULTS.parent / "points.md", RESULTS.parent / "detection.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    block = "made: seeds" if name == "demo" else name  # tools.blocks writes the demo's page
    found = re.search(rf"<!-- {block} -->\n(.*?)\n<!-- /{block} -->", text, re.S)
    assert found
    grid, raw = resolved(name), tables.read_raw(RESULTS / name)
    assert found[1] == render.markdown(grid, raw)
    assert (RESULTS / name / "table.md").read_text(encoding="utf-8") == f"{found[1]}\n"
    assert all(grid.is_whole(raw, place) for place in grid.places)
    evaluations = {(job.run.name, str(evaluation)) for job in grid.jobs for evaluation in job.evaluations}
    assert {key for key in raw.by_evaluation if not key[1].startswith("step=")} == evaluations


def test_the_desk_study_rebuilds_from_its_cells(tmp_path, monkeypatch, capsys):
    """The command writes the committed files again, byte by byte, where no run is."""
    for name in ("cells.csv", "curves.csv"):
        shutil.copyfile(RESULTS / "desk" / name, tmp_path / name)
    monkeypatch.setattr(render.plots, "save", lambda figure, path: None)
    words = ["--from-cache", "--root", str(tmp_path / "none"), "--results", str(tmp_path)]
    assert cli.main(["table", "desk", *words]) == 0
    for name in ("table.md", "table.csv", "cells.csv", "curves.csv"):
        assert (tmp_path / name).read_bytes() == (RESULTS / "desk" / name).read_bytes(), name


def test_what_the_document_says_in_one_minute():
    """Its short table, gaps and standard errors are those of the raw files."""
    text = (RESULTS / "desk.md").read_text(encoding="utf-8")
    grid, raw = resolved("desk"), tables.read_raw(RESULTS / "desk")
    table = grid.table
    larger = [name for name, column in table.columns.items() if column.size > 32]

    def beyond(block, row, interpolated=False):
        names = [name for name in larger if name.endswith(" interpolated") == interpolated]
        columns = [grid.values(raw, (block, row, name)) for name in names]
        return [fmean(values) for values in zip(*columns, strict=True)]

    def gap(block, one, other, **options):
        a, b = (beyond(block, row, **options) for row in (one, other))
        return f"{fmean(a) - fmean(b):.1f}", f"{math.sqrt(variance(a) / 3 + variance(b) / 3):.1f}"

    names = {
        "LookHere": "lookhere",
        "PaPE": "pape",
        "PaPE, W_p twice as large": "pape-local",
        "PaPE, `wide`": "pape-wide",
    }
    names |= {"PaPE-RI": "pape_ri", "RoPE-Mixed": "rope_mixed", "no encoding": "none", "ALiBi": "alibi"}
    names |= {"RoPE": "rope", "sin-cos": "sincos"}
    assert set(names.values()) == set(table.rows)
    for told, row in names.items():
        figures = [f"{fmean(x):.1f} ± {stdev(x):.1f}" for x in (beyond(block, row) for block in table.blocks)]
        assert f"| {told} | {figures[0]} | {figures[1]} |" in text
    minute = " ".join(text[text.index("## In one minute") : text.index("<!-- desk -->")].split())
    (digits, error), (fashion, error2) = (gap(block, "lookhere", "pape") for block in table.blocks)
    assert f"{digits} points on digits, with a standard error of {error}," in minute
    assert f"{fashion} on Fashion-MNIST, with one of {error2}." in minute
    (digits, error), (fashion, error2) = (gap(block, "pape", "rope") for block in table.blocks)
    assert f"{digits} points on digits (standard error {error}) and {fashion} on Fashion-MNIST ({error2})" in minute
    (digits, error), (fashion, error2) = (gap(block, "pape", "rope", interpolated=True) for block in table.blocks)
    assert f"{digits} points on digits (standard error {error}) and {fashion} on Fashion-MNIST ({error2})" in minute
