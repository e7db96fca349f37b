"""Tables: they resolve to the paper's cells, mark what was not measured, and go on where they were killed."""

import json

import pytest
import torch

from parapos import cli, recipes
from parapos.bench import flops
from parapos.experiments import cost, tables
from parapos.training import fit, recipe

from ..marks import full

SIZES = (224, 320, 384, 448, 512, 640, 768, 896, 1024)
SEVEN = ("sincos", "rope", "rope_mixed", "alibi", "lookhere", "pape", "pape_ri")
INTERPOLATED = {
    "extrapolation": (),
    "extrapolation-interpolated": SEVEN,
    "extrapolation-best": ("sincos", "rope", "rope_mixed"),
}
TINY = """
title = "Two tiny runs"
recipe = "digits_smoke"
paper = "extrapolation"

[rows]
pape = { "model.encoding" = "pape" }
rope = { "model.encoding" = "rope", "model.options.dim" = 32 }

[columns]
16 = { size = 16 }
24 = { size = 24, interpolate = ["rope"] }
"""


@pytest.fixture
def tiny(tmp_path):
    """A table of two runs of seconds."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize("name", INTERPOLATED)
def test_extrapolation_is_seven_by_nine(name, tmp_path):
    table = tables.load(name)
    grid = tables.resolve(table, tmp_path, {})
    assert [run.name for run in grid.runs] == [f"imagenet-{row}" for row in SEVEN]
    cells = {(row, column): repeat.evaluation for (_, row, column), (repeat,) in grid.places.items()}
    assert set(cells) == {(row, str(size)) for row in SEVEN for size in SIZES}
    for run, row in zip(grid.runs, SEVEN, strict=True):
        assert run.wanted.model.encoding == row
        for size in SIZES:
            cell = cells[row, str(size)]
            assert (cell.size, cell.data, cell.split) == (size, "", "test")
            assert cell.position_scale == (224 / size if row in INTERPOLATED[name] else 1.0)
            assert table.published(row, str(size)) > 0


@pytest.mark.parametrize(
    ("name", "row", "figures"),
    [
        ("extrapolation", "sincos", {"224": 79.9, "512": 57.5, "1024": 9.3}),
        ("extrapolation", "pape", {"224": 80.6, "512": 81.3, "1024": 74.9}),
        ("extrapolation-interpolated", "rope_mixed", {"512": 67.8, "1024": 42.9}),
        ("extrapolation-best", "rope", {"512": 77.6, "1024": 59.8}),
        ("extrapolation-best", "lookhere", {"512": 79.7, "1024": 64.4}),
        ("ood", "pape", {"imagenet_v2": 69.2, "imagenet_r": 29.4}),
        ("ablations", "no_direction", {"imagenet": 77.0}),
        ("parameter-matched", "rope", {"imagenet": None, "imagenet_unmatched": 80.3, "ucf101": 45.2}),
    ],
)
def test_the_papers_figures(name, row, figures):
    table = tables.load(name)
    assert {column: table.published(row, column) for column in figures} == figures


def test_the_other_grids(tmp_path):
    ood = tables.resolve(tables.load("ood"), tmp_path, {})
    shared = tables.resolve(tables.load("extrapolation"), tmp_path, {})
    assert [run.folder for run in ood.runs] == [run.folder for run in shared.runs]
    assert {evaluation.data for job in ood.jobs for evaluation in job.evaluations} == {"imagenet_v2", "imagenet_r"}

    counts = {}
    for run in tables.resolve(tables.load("ablations"), tmp_path, {}).runs:
        with torch.device("meta"):
            model = run.wanted.model.build({"num_classes": 1000})
        parts = [m for name, m in model.named_modules() if name.endswith(".attention.encoding")]
        counts[run.folder.name] = sum(p.numel() for part in parts for p in part.parameters())
    assert counts == {
        "imagenet_ablation-full": 2_772_000,
        "imagenet_ablation-no_distance": 1_389_600,
        "imagenet_ablation-no_direction": 1_389_600,
        "imagenet_ablation-no_context": 14_400,
        "imagenet_ablation-no_activation": 2_772_000,
        "imagenet_ablation-no_projection": 110_592,
    }

    matched = {}
    for run in tables.resolve(tables.load("parameter-matched"), tmp_path, {}).runs:
        with torch.device("meta"):
            model = run.wanted.model.build({"num_classes": 1000})
        matched[run.folder.name] = sum(p.numel() for p in model.parameters())
    assert "imagenet_matched-pape" not in matched
    for name in ("sincos", "rope", "alibi"):
        assert matched[f"imagenet_matched-{name}"] == matched["imagenet-pape"]


SLOW = ("generality", "parameter-matched")  # many models are built; tests/test_paper_page.py runs them too


def test_every_repeat_is_a_job_and_one_of_all_comes_before_the_next(tmp_path):
    grid = tables.resolve(tables.load("generality"), tmp_path, {})
    counts = {len(repeats) for repeats in grid.places.values()}
    assert counts == {1, 3}  # folds of one data set
    firsts = {repeats[0].run.folder for repeats in grid.places.values()}
    every = {repeat.run.folder for repeats in grid.places.values() for repeat in repeats}
    folders = [job.run.folder for job in grid.jobs]
    assert set(folders[: len(firsts)]) == firsts
    assert len(folders) == len(every)
    assert set(folders) == every


@pytest.mark.parametrize("name", [full(name) if name in SLOW else name for name in recipes.shelf("tables")])
def test_dry_run_needs_nothing_and_writes_nothing(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["table", name, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "hours" in out
    table = tables.load(name)
    for row in table.rows:
        assert f"| {row}" in out
    assert list(tmp_path.iterdir()) == []


def test_estimate(tmp_path):
    grid = tables.resolve(tables.load("extrapolation"), tmp_path, {}, ["pape"])
    (run,) = grid.runs
    with torch.device("meta"):
        model = run.wanted.model.build({"num_classes": 1000})
    for encoding, size in (("sincos", 224), ("pape", 224)):
        with torch.device("meta"):
            model = recipe.load("imagenet", {"model.encoding": encoding}).model.build({"num_classes": 1000})
        count = cost.tokens(model, run.wanted, size)
        assert count == 197
        assert cost.gflop(model, count) == pytest.approx(flops.gflops(encoding), rel=0.06)
    each = 3 * cost.gflop(model, 197)
    hours = each * 1_268_356 * 300 / 150e3 / 3600
    assert f" {hours:.1f} |" in cost.estimate(grid, 150)
    assert f" {hours / 2:.1f} |" in cost.estimate(grid, 300)
    assert "--model.encoding pape" in cost.estimate(grid)


def test_two_runs_killed_and_gone_on_with(tiny, tmp_path, monkeypatch, capsys):
    """The whole life of a table, for real: train, die, go on, reuse."""
    words = ["table", str(tiny), "--root", str(tmp_path / "runs")]
    trained, evaluated, train, evaluate = [], [], fit.train, fit.evaluate

    def count_train(wanted, folder, **options):
        trained.append(folder.name)
        return train(wanted, folder, **options)

    def count(folder, **options):
        if len(evaluated) == 1 and not evaluated[0][2]:
            evaluated[0] = (*evaluated[0][:2], True)
            raise KeyboardInterrupt
        evaluated.append((folder.name, options["size"], False))
        return evaluate(folder, **options)

    monkeypatch.setattr(fit, "train", count_train)
    monkeypatch.setattr(fit, "evaluate", count)
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 130
    assert trained == ["digits_smoke-pape"]

    assert cli.main([*words, "--from-cache"]) == 0
    out = capsys.readouterr().out
    assert "Measured: 1 of 4" in out
    (line,) = (line for line in out.splitlines() if line.startswith("| rope"))
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["- (-)", "- (-)"]
    assert cli.main([*words, "--dry-run"]) == 0
    states = {line.split()[1].rpartition("/")[2]: line for line in capsys.readouterr().out.splitlines() if "/" in line}
    assert "| finished " in states["digits_smoke-pape"]
    assert "| 1 of 2 " in states["digits_smoke-pape"]
    assert "| not begun " in states["digits_smoke-rope"]

    assert cli.main(words) == 0
    assert trained == ["digits_smoke-pape", "digits_smoke-rope"]
    assert [x[:2] for x in evaluated] == [
        ("digits_smoke-pape", 16), ("digits_smoke-pape", 24), ("digits_smoke-rope", 16), ("digits_smoke-rope", 24)
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "Measured: 4 of 4" in out
    assert (tmp_path / "runs/tables/tiny.md").read_text() == out
    assert (tmp_path / "runs/tables/tiny.csv").read_text().count("\n") == 5
    assert (tmp_path / "runs/tables/tiny.png").is_file()

    assert cli.main(words) == 0
    assert len(trained) == 2
    assert len(evaluated) == 4
    assert capsys.readouterr().out == out

    assert cli.main([*words, "--only", "pape", "--from-cache"]) == 0
    assert "Measured: 2 of 2" in capsys.readouterr().out
    assert (tmp_path / "runs/tables/tiny.md").read_text() == out, "the file keeps all rows"

    assert cli.main([*words, "--optim.lr", "1"]) == 2
    assert "holds a run of another recipe (optim.lr" in capsys.readouterr().err


def test_efficiency_is_the_bench_of_models(tmp_path, monkeypatch, capsys):
    from parapos.bench import model as bench_model
    from parapos.bench import model_view as bench_model_view

    asked = {}
    monkeypatch.setattr(bench_model, "run", lambda **options: asked.update(options) or {"a": 1})
    monkeypatch.setattr(bench_model_view, "markdown", lambda results: f"table of {results}")
    monkeypatch.setattr(bench_model_view, "plot", lambda results, path: None)
    words = ["table", "efficiency", "--root", str(tmp_path)]
    assert cli.main([*words, "--from-cache"]) == 2
    assert "no such file" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert asked["encodings"] == bench_model.ENCODINGS
    assert asked["parabolas"] == bench_model.PARABOLAS
    assert asked["sizes"] == (224,)
    assert json.loads((tmp_path / "tables/efficiency.json").read_text()) == {"a": 1}
    capsys.readouterr()
    assert cli.main([*words, "--from-cache"]) == 0
    assert capsys.readouterr().out == "table of {'a': 1}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("extrapolatio", "did you mean 'extrapolation'"),
        ("none.toml", "none.toml: No such file"),
        ("ood --only rpoe", "unknown row 'rpoe', expected some of sincos, rope"),
        ("ood --dry-run --from-cache", "exclude each other"),
        ("ood --optim.rl 1", "optim.rl: unknown key"),
        ("ood --tflops 0", "positive number, got '0'"),
        ("efficiency --only fourier", "unknown row 'fourier'"),
        ("efficiency --optim.lr 1", "trains nothing"),
    ],
)
def test_errors_are_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["table", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "size = 16 ",
            "sise = 16 ",
            r"tiny.toml: columns.16.sise: unknown key, expected one of size, .*did you mean 'size'",
        ),
        ('["rope"]', '["rpoe"]', r"columns.24.interpolate: expected one of pape, rope"),
        ("title", "titel", r"titel: unknown key, expected one of title"),
        ("[columns]", "[columns", r"not TOML"),
        ('recipe = "digits_smoke"', "", r"expected \[bench\], or \[rows\], \[columns\] and recipe"),
    ],
)
def test_a_bad_table_is_told(tiny, old, new, message):
    tiny.write_text(TINY.replace(old, new, 1))
    with pytest.raises(tables.ReportError, match=message):
        tables.load(tiny)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("extrapolation", "model.encoding"),
        ("ucf101-folds", "data.options.fold"),
        ("ablations", "model.options.context"),
    ],
)
def test_a_change_may_not_undo_a_row_or_a_column(name, key, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["table", name, "--dry-run", f"--{key}", "rope"]) == 2
    assert f"--{key}: expected nothing, the table {name} sets it run by run" in capsys.readouterr().err


def test_only_may_be_given_twice(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["table", "extrapolation", "--dry-run", "--only", "pape", "--only", "rope,alibi"]) == 0
    told = capsys.readouterr().out
    assert all(f"imagenet-{row}" in told for row in ("pape", "rope", "alibi"))
    assert "imagenet-sincos" not in told
