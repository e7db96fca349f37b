"""The demo: it runs, says what the numbers say, keeps to its time, and reads folders of images."""

import inspect
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchvision.transforms import v2

from parapos import cli
from parapos.data import FormatError, layout
from parapos.data.digits import Augment, Digits, _affine
from parapos.data.sampling import Key
from parapos.data.synthetic import pattern
from parapos.encodings.looks import label as shown_name
from parapos.experiments import demo, demo_report, render, schedule, tables
from parapos.experiments.grid import Grid, Job, Repeat, Results, Run
from parapos.experiments.store import COLUMNS, Cells, Evaluation
from parapos.experiments.tables_spec import Column, Row, Table
from parapos.training import fit, recipe


def write_images(folder, classes=2, each=20, size=(48, 40)):
    g = torch.Generator().manual_seed(0)
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for i in range(each):
            image = v2.functional.to_pil_image(pattern(label, classes, size, g))
            image.save(folder / f"class{label}" / f"{i}.png")
    return folder


def made(sizes=(24, 48, 96), **figures):
    wanted = recipe.load("demo")
    places, scores = {}, {}
    for name, values in figures.items():
        run = Run("demo", {}, Path(name), wanted)
        for size, value in zip(sizes, values, strict=True):
            places["digits", name, f"{size} px"] = (Repeat(run, Evaluation(size), run.metric()),)
            scores[name, str(Evaluation(size)), ""] = {"top1": value / 100, "samples": 353}
    columns = {f"{size} px": Column(size=size) for size in sizes}
    table = Table(name="made", title="made", rows={name: Row() for name in figures}, columns=columns, seeds=(0,))
    return Grid(table, places, {name: name for name in figures}), Results(scores)


def test_the_reading_follows_the_numbers():
    ahead = demo_report.reading(*made(pape=(99, 90, 40), rope=(98, 50, 20), alibi=(97, 60, 10)))
    assert ahead.startswith(
        "Trained at 24 px: at 48 px (2x) PaPE gets 90.0% top-1, 30.0 points ahead of the next best, ALiBi with 60.0%; "
        "at 96 px (4x) PaPE gets 40.0% top-1, 20.0 points ahead of the next best, RoPE with 20.0%. One seed;"
    )
    behind = demo_report.reading(*made(rope=(98, 95, 20), pape=(99, 90, 20)))
    assert "PaPE gets 90.0% top-1, 5.0 points behind RoPE with 95.0%" in behind
    assert "PaPE gets 20.0% top-1, level with RoPE with 20.0%" in behind
    alone = demo_report.reading(*made(sincos=(99, 50, 10)))
    assert alone.startswith("Trained at 24 px: at 48 px (2x) sin-cos gets 50.0% top-1;")


@pytest.fixture(scope="module")
def seeds():
    return demo.committed()


def shifted(seeds, shift):
    """A demo whose every number is that of seed 0 and something."""
    grid = demo._grid(Path("none"), "demo", {}, demo.ENCODINGS, "digits")
    scores = {}
    for (_, row, column), (repeat,) in grid.places.items():
        value = seeds.values(row, column)[0] + shift(row, column)
        scores[repeat.run.name, str(repeat.evaluation), ""] = {"top1": value / 100, "samples": 353}
    return grid, Results(scores)


def test_what_is_committed_is_whole(seeds):
    """Every cell of the table has all seeds, the shipped weights are those of the first, and docs have the same."""
    assert seeds.seeds == 8
    for name in demo.ENCODINGS:
        for column in seeds.grid.table.columns:
            assert len(seeds.values(name, column)) == 8, (name, column)
        cells = Cells(demo.shipped_folder() / name)
        assert (f"demo-{name}-0", str(Evaluation(24)), cells.weights) in seeds.results.scores
        assert fit.load_run(demo.shipped_folder() / name).run.seed == 0
        assert (
            recipe.difference(fit.load_run(demo.shipped_folder() / name), recipe.load("demo", {"model.encoding": name}))
            is None
        )
    raw = Path(__file__).parents[2] / "docs" / "results" / "demo" / "cells.csv"
    assert raw.read_bytes() == (demo.shipped_folder() / "cells.csv").read_bytes()


@pytest.mark.parametrize("name", demo.ENCODINGS)
def test_shipped_weights_give_the_committed_figures(name, seeds):
    """To one test image, here at the trained size and at twice that with interpolated positions."""
    check_shipped(name, seeds, ["1x", "2x interpolated"])


@pytest.mark.full
@pytest.mark.parametrize("name", demo.ENCODINGS)
def test_all_shipped_weights_give_the_committed_figures(name, seeds):
    check_shipped(name, seeds, list(seeds.grid.table.columns))


def check_shipped(name, seeds, columns):
    for column in columns:
        evaluation = seeds.grid.table.columns[column].evaluation(name, 24)
        folder = demo.shipped_folder() / name
        found = fit.evaluate(folder, split="test", size=evaluation.size, position_scale=evaluation.position_scale)
        assert abs(found["top1"] * 100 - seeds.values(name, column)[0]) <= 100 / 353 + 1e-6, column


def test_a_training_that_fails_is_no_reason_to_celebrate(seeds):
    text, is_reached = demo_report.side_by_side(seeds, *shifted(seeds, lambda row, column: 0), Results())
    assert is_reached
    assert "Trained here: all 36 results lie in the interval of 8 seeds, widened by 2 points." in text
    assert text.endswith(demo_report.story(seeds))
    low = seeds.interval("rope", "2x")[0] - seeds.values("rope", "2x")[0]
    for beyond, good in ((-1.9, True), (-2.1, False)):
        move = lambda row, column, b=beyond: low + b if (row, column) == ("rope", "2x") else 0  # noqa: E731
        text, is_reached = demo_report.side_by_side(seeds, *shifted(seeds, move), Results())
        assert is_reached == good
    assert "1 of 36 results lie outside the interval" in text
    assert "- RoPE, 2x: " in text
    assert "did not reach what the shipped models have" in text
    assert "Mean accuracy beyond" not in text
    high = seeds.interval("rope", "2x")[1] - seeds.values("rope", "2x")[0]
    move = lambda row, column: high + 2.1 if (row, column) == ("rope", "2x") else 0  # noqa: E731
    text, is_reached = demo_report.side_by_side(seeds, *shifted(seeds, move), Results())
    assert is_reached, "better than expected is told, but no failure"
    assert "1 of 36 results lie outside" in text


@pytest.mark.parametrize("is_reached", [True, False])
def test_the_command_shows_before_it_trains(is_reached, tmp_path, monkeypatch, capsys, seeds):
    """Pictures of the shipped models come first; a training that falls short ends with exit code 1."""
    order = []
    part = demo.introduce(tmp_path / "other", ["pape"])

    def note(name, reached):
        order.append((name, (tmp_path / "out/shipped/maps.png").exists()))
        return replace(part, is_reached=reached)

    monkeypatch.setattr(demo, "show_shipped", lambda *given: note("shipped", True))
    monkeypatch.setattr(demo, "train", lambda *given, **options: note("train", is_reached))
    words = ["demo", "--out", str(tmp_path / "out"), "--encodings", "pape"]
    if is_reached:
        assert cli.main(words) == 0
    else:
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 1
    assert order == [("shipped", True), ("train", True)]
    assert demo_report.bars(seeds, 2) in capsys.readouterr().out


def test_the_better_setting_is_chosen_by_the_seeds(seeds):
    for name in demo.ENCODINGS:
        means = {group.caption: sum(seeds.beyond(name, group)) for group in render.groups(seeds.grid)}
        assert seeds.better(name).caption == max(means, key=lambda caption: means[caption])
    table = demo_report.better_table(seeds)
    first = table.splitlines()[2]
    assert shown_name(seeds.encodings[0]) in first


def test_bars_are_as_long_as_the_means(seeds):
    lines = demo_report.bars(seeds, 4, width=50).splitlines()
    assert lines[0].startswith("Tested at 96 px, 4 times the trained size")
    assert lines[2].endswith("  Positions interpolated")
    for name, line in zip(seeds.grid.rows, lines[3:], strict=True):
        assert line.startswith(shown_name(name))
        means = [sum(seeds.values(name, column)) / seeds.seeds for column in ("4x", "4x interpolated")]
        assert [float(value) for value in re.findall(r"\d+\.\d", line)] == [round(mean, 1) for mean in means]
        assert [len(bar) for bar in re.findall("█+", line)] == [round(mean / 2) for mean in means]
    text = demo_report.introduction(seeds, "title")
    assert demo_report.bars(seeds, 2) in text
    assert demo_report.story(seeds) in text


def test_layout_of_a_folder(tmp_path, capsys):
    source = write_images(tmp_path / "source", each=20)
    (source / "class0" / "broken.png").write_bytes(b"no image")
    root = layout.lay_out(source, tmp_path / "out", largest=28)
    for name in ("class0", "class1"):
        found = {split: len(list((root / split / name).iterdir())) for split in layout.SPLITS}
        assert found["train"] in (14, 15)
        assert sum(found.values()) == 20
        assert found["test"] >= 3
    assert "left out" in capsys.readouterr().err
    sample = recipe.load("demo_images", {"data.root": str(root)}).dataset("test", size=28)[0]
    assert sample["image"].shape == (3, 28, 28)
    assert layout.lay_out(source, tmp_path / "out", largest=28) == root
    assert layout.lay_out(root, tmp_path / "other", largest=28) == root  # it has train, val and test
    assert not (tmp_path / "other").exists()
    write_images(tmp_path / "few", each=3)
    with pytest.raises(FormatError, match=r"10 or more images, class0 has 3"):
        layout.lay_out(tmp_path / "few", tmp_path / "x", largest=28)
    with pytest.raises(FormatError, match=r"no such folder"):
        layout.lay_out(tmp_path / "none", tmp_path / "x", largest=28)
    with pytest.raises(FormatError, match=r"take another --out"):
        layout.lay_out(tmp_path / "few", tmp_path / "out", largest=28)


def test_the_clock_decides_nothing(tmp_path, monkeypatch):
    """Every run is what the recipe says, and no option or clock can shorten it."""
    monkeypatch.setattr("time.monotonic", lambda: 1e9)
    wanted = recipe.load("demo")
    for run in demo.resolve(tmp_path, None, demo.ENCODINGS, quick=False).runs:
        assert run.wanted.optim == wanted.optim
        assert run.wanted.run.threads == 1
    assert "seconds" not in inspect.signature(demo.train).parameters
    assert cli.main(["demo", "--seconds", "1", "--out", str(tmp_path)]) == 2


def test_there_are_no_more_processes_than_runs(tmp_path, monkeypatch):
    counts, lines = [], []
    monkeypatch.setattr(schedule, "run_all", lambda jobs, count, *more: counts.append(count))
    tables.make(demo.resolve(tmp_path, None, ["pape"], quick=True), 2, tmp_path / "log.txt", lines.append)
    assert counts == [1]
    assert lines == ["0 of 1 runs are there, 1 to do with 1 processes"]


def test_files_are_written_after_every_run_by_the_first_process(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "run_all", lambda jobs, count, log, tell, done: [done() for _ in jobs])
    grid, calls = demo.resolve(tmp_path, None, ["pape", "rope"], quick=True), []
    for is_first, expected in ((True, 2), (False, 2)):
        monkeypatch.setattr(fit, "is_first", lambda is_first=is_first: is_first)
        tables.make(grid, 0, tmp_path / "log.txt", lambda line: None, lambda: calls.append(1))
        assert len(calls) == expected


def test_progress_is_read_from_files_that_grow(tmp_path):
    run = Run("demo", {}, tmp_path, recipe.load("demo", {"optim.epochs": "4"}))
    job = Job(run, {Evaluation(32): {"top1"}, Evaluation(64): {"top1"}})
    assert schedule.progress(job) == (0.0, "")
    (tmp_path / "metrics.csv").write_text("step,epoch,lr,train_loss,val_top1\n10,1,0.1,2.0,\n20,2,,,0.5\n30,2,0.1,1.")
    assert schedule.progress(job) == (pytest.approx(0.4), "validation top-1 50")
    (tmp_path / "cells.csv").write_text(f"{','.join(COLUMNS)}\nrun,{Evaluation(32)},top1,0.75,abc\n")
    assert schedule.progress(job) == (pytest.approx(0.5), "1 of 2 evaluations")


def test_a_failure_is_told_in_words(tmp_path):
    (tmp_path / "file").touch()
    told = schedule.work(Job(Run("demo", {}, tmp_path / "file", recipe.load("demo", demo.QUICK))))
    assert "RecipeError" in told
    assert "got a file" in told


def test_digits_are_cut_out_within_the_picture():
    augment = Augment(turn=0, shift=0, zoom=0, area=(0.15, 0.5))
    for draws in ([0, 0, 0, 0, -1, -1, -1], [0, 0, 0, 0, -1, 1, 1], [0, 0, 0, 0, 1, 1, -1]):
        theta = _affine(augment, draws)
        corners = theta @ torch.tensor([[-1.0, 1.0, -1.0, 1.0], [-1.0, -1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
        assert corners.abs().max() == pytest.approx(1)
        side = (corners[0].max() - corners[0].min()) / 2
        assert float(side) ** 2 == pytest.approx(0.15 if draws[4] == -1 else 0.5)
    sample = Digits("train", augment=augment)[Key(0, 1)]["image"]
    assert not torch.equal(sample, Digits("train", augment=Augment(turn=0, shift=0, zoom=0))[Key(0, 1)]["image"])
    for bad in ((0, 1), (0.5, 0.2), (0.5, 1.5), (1,)):
        with pytest.raises(ValueError, match="area must be two numbers"):
            Augment(area=bad)


def test_demo_of_a_folder(tmp_path, capsys, monkeypatch):
    """The whole command with two processes; the second time there is nothing to do."""
    source = write_images(tmp_path / "source", classes=3, each=10)
    words = ["demo", "--data", str(source), "--quick", "--encodings", "pape,rope", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert [line.split()[1] for line in lines] == ["|", "----", "pape", "rope"] * 2
    assert "1x" in lines[0]
    assert "SMOKE TEST, NOT A RESULT (--quick). Trained at 32 px: at 64 px (2x) PaPE gets" in out
    assert out.startswith("\nSMOKE TEST, NOT A RESULT (--quick): Small ViTs")
    assert (tmp_path / "out/demo.md").read_text().startswith("SMOKE TEST, NOT A RESULT (--quick): ")
    for name in ("extrapolation.png", "maps.png", "heads.png"):
        assert (tmp_path / "out" / name).read_bytes()[1:4] == b"PNG"
        assert f"wrote {tmp_path}/out/{name}" in err
    assert "2 of 2 runs done, 100%" in err
    assert fit.load_run(tmp_path / "out/runs/rope").data.name == "images"
    assert "step 1/1" in (tmp_path / "out/log.txt").read_text()

    monkeypatch.setattr(schedule, "work", None)
    monkeypatch.setattr(fit, "train", None)
    assert cli.main(words) == 0
    assert capsys.readouterr().out == out

    digits = [word for word in words if word not in ("--data", str(source))]
    for other in (digits, [word for word in words if word != "--quick"]):
        assert cli.main(other) == 2, "another demo in the same folder"
        assert "holds a run of another recipe (" in capsys.readouterr().err


def test_a_folder_need_not_be_text(tmp_path, capsys, monkeypatch):
    """Of any bytes; a root that must be written into a recipe is refused."""

    real = schedule.run_all
    monkeypatch.setattr(schedule, "run_all", lambda jobs, processes, *more: real(jobs, 0, *more))
    source = write_images(tmp_path / os.fsdecode(b"bad\xff"), each=10)
    words = ["demo", "--quick", "--encodings", "none", "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--data", str(source)]) == 0
    assert "bad\ufffd" in (tmp_path / "out" / "demo.md").read_text()
    other = write_images(tmp_path / "other", each=10)
    assert cli.main([*words, "--data", str(other)]) == 2
    assert "made from " in capsys.readouterr().err
    root = layout.lay_out(other, tmp_path / os.fsdecode(b"root\xff"), largest=28)
    assert cli.main([*words[:-1], str(tmp_path / "new"), "--data", str(root)]) == 2
    err = capsys.readouterr().err
    assert "data.root: expected a path in UTF-8" in err
    assert err.count("\n") == 1


def test_errors_are_one_line(tmp_path, capsys):
    for words, message in (
        (f"--data {tmp_path}/none --out {tmp_path}/out", "no such folder"),
        ("--encodings pape,fourier", "unknown 'fourier'"),
        ("--encodings pape,rope,pape", "expected each once, got pape twice"),
        ("--seconds 5", "unrecognized arguments: --seconds 5"),
    ):
        assert cli.main(["demo", *words.split()]) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert err.count("\n") == 1
        assert out == ""
