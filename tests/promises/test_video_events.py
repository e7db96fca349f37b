"""UCF101 and DvsGesture as a user meets them, on generated copies with nano models: prepare, train, kill, go on, test,
tables, analysis. Every step is a command; only what is killed needs a process of its own."""

import re
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from parapos import cli
from parapos.data.batch import collate
from parapos.data.sampling import Key
from parapos.experiments import tables
from parapos.experiments.grid import collect
from parapos.training import checkpoint, fit

from .commands import parapos, rows, words

SHORT = {"optim.epochs": "2", "run.save_every": "2", "run.log_every": "2"}
TINY = {
    "ucf101": {
        "model.name": "vivit_nano_patch16",
        "data.options.height": "48",
        "data.options.width": "64",
        "data.options.complete": "false",
    },
    "dvsgesture": {
        "model.name": "event_vit_nano_patch16",
        "data.options.threshold": "32",
        "data.options.refractory_us": "20000",
        "data.options.complete": "false",
    },
}
COMMON = {
    "model.encodings.pape.parabolas": "4",
    "data.workers": "0",
    "optim.batch": "16",
    "run.precision": "32-true",
    "run.compile": "false",
    "run.threads": "1",  # bits depend on their number
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with both data sets, prepared."""
    root = tmp_path_factory.mktemp("data")
    for name in TINY:
        parapos("prepare", name, "--synthetic", "--root", root / name)
    return root


@pytest.fixture(scope="module", params=TINY)
def subject(request, data, tmp_path_factory):
    """A data set, the command that trains on it, and a run that nothing disturbed."""
    name = request.param
    train = ["train", f"{name}_smoke", "--data.root", str(data / name), *words(SHORT), "--run.threads", "1"]
    folder = tmp_path_factory.mktemp("runs") / name
    parapos(*train, "--out", folder)
    return name, train, folder


def test_prepared_once(data, capsys):
    for name in TINY:
        parapos("prepare", name, "--partial", "--root", data / name)
        assert re.search(r"prepared 0 \w+, [1-9]\d* were prepared before", capsys.readouterr().out)
        parapos("prepare", name, "--check", "--partial", "--root", data / name)
        with pytest.raises(SystemExit):
            cli.main(["prepare", name, "--check", "--root", str(data / name)])


@pytest.mark.full
def test_killed_and_gone_on_with(subject, forked, tmp_path, capsys):
    _, train, trained = subject
    folder = tmp_path / "killed"
    death = dict(kill_in="step", nth=3, log=tmp_path / "log")  # in the third step; saved after the second
    assert forked(*train, "--out", folder, **death)[0] == -signal.SIGKILL
    parapos(*train, "--out", folder, "--resume")
    assert f"resuming {folder} at step" in capsys.readouterr().err
    for name in ("metrics.csv", "weights.safetensors"):
        assert (folder / name).read_bytes() == (trained / name).read_bytes(), name


def test_eval_is_what_the_model_says(subject, capsys):
    """Samples one by one, without padding, give what `eval` says of padded batches."""
    _, _, folder = subject
    parapos("eval", folder)
    dataset = fit.load_run(folder).dataset("test")
    model, _ = checkpoint.load_weights(folder / "weights.safetensors")
    model.eval()
    right = 0
    for index in range(len(dataset)):
        batch = collate([dataset[index]], ragged=getattr(dataset, "ragged", ()))
        with torch.no_grad():
            logits = model(*(batch[name] for name in model.inputs))
        right += int(logits.argmax(-1) == batch["label"])
    (found,) = rows(folder / "evaluations.csv")
    assert float(found["top1"]) == pytest.approx(right / len(dataset))
    assert int(found["samples"]) == len(dataset)
    assert f"{right}/{len(dataset)}" in capsys.readouterr().out
    assert cli.main(["eval", str(folder), "--position-scale", "interpolate"]) == 2
    assert "has no size to interpolate from" in capsys.readouterr().err
    assert cli.main(["sweep", str(folder), "--sizes", "32,64"]) == 2
    assert "has no size to sweep" in capsys.readouterr().err


def test_analyze(subject, tmp_path):
    _, _, folder = subject
    parapos("analyze", folder, "--samples", "4", "--out", tmp_path)
    pictures = sorted(tmp_path.glob("*.png"))
    assert len(pictures) >= 2
    for path in pictures:
        with Image.open(path) as image:
            assert image.format == "PNG"
    (arrays,) = tmp_path.glob("*.npz")
    with np.load(arrays) as found:
        maps = {key: found[key] for key in ("distance", "direction", "semantics", "attention")}
    assert len({x.shape for x in maps.values()}) == 1
    assert maps["attention"].shape[0] > 1, "a strip through time"
    seen = maps["attention"][np.isfinite(maps["attention"])]
    assert seen.min() >= 0
    assert 0 < seen.sum() <= 1 + 1e-5


@pytest.mark.full
def test_folds_for_real(data, tmp_path, capsys):
    """Two encodings on three folds: six runs; each fold tested on its own list, and a mean with its spread."""
    argv = [
        "table",
        "ucf101-folds",
        "--only",
        "pape,rope",
        "--root",
        str(tmp_path),
        "--data.root",
        str(data / "ucf101"),
    ]
    argv += words(COMMON | TINY["ucf101"] | {"optim.epochs": "1"})
    parapos(*argv)
    told = capsys.readouterr().out
    assert "Paper, over fold 1, fold 2, fold 3:" in told
    assert re.search(r"\| Welch unpaired, two-sided \| 4\.674 \| 3\.7\d* \| 0\.0112 \|", told)
    grid = tables.resolve(tables.load("ucf101-folds"), tmp_path, _changes(argv), ["pape", "rope"])
    runs = grid.runs
    assert [run.folder.name for run in runs] == [f"ucf101-{row}-fold{n}" for row in ("rope", "pape") for n in (1, 2, 3)]
    assert [run.wanted.data.options["fold"] for run in runs] == [1, 2, 3] * 2
    tested = [set(run.wanted.dataset("test").files) for run in runs[:3]]
    assert not tested[0] & tested[1]
    found = collect(grid.jobs)
    for row in ("pape", "rope"):
        folds = [value for n in (1, 2, 3) for value in grid.values(found, ("", row, f"fold {n}"))]
        assert grid.values(found, ("", row, "mean")) == folds
        (line,) = (line for line in told.splitlines() if line.startswith(f"| {row} "))
        assert f"| {np.mean(folds):.1f} ± {np.std(folds, ddof=1):.1f} (" in line
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("weights.safetensors")}
    assert len(stamps) == 6
    parapos(*argv)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("weights.safetensors")} == stamps


def _changes(argv):
    given = argv[argv.index("--data.root") :]
    return {key.removeprefix("--"): value for key, value in zip(given[::2], given[1::2], strict=True)}


@pytest.mark.full
@pytest.mark.parametrize("name", ["generality", "parameter-matched", "ucf101-folds"])
def test_dry_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parapos("table", name, "--dry-run", "--data.root", "data")
    told = capsys.readouterr().out
    assert "GPU hours" in told
    assert list(tmp_path.iterdir()) == []
    if name != "generality":
        p = {"parameter-matched": ("0.0259", "0.0691"), "ucf101-folds": ("0.0112", "0.0114")}[name]
        assert re.search(rf"Welch unpaired, two-sided \|.*\| {p[0]} \|", told)
        assert re.search(rf"paired, two-sided \|.*\| {p[1]} \|", told)
    if name != "ucf101-folds":
        assert "--data.root data/dvsgesture" in told
        assert "--data.root data/ucf101" in told
    assert "ucf101-lookhere" not in told


def test_gestures_are_counted(data, tmp_path, capsys):
    """A cell of a table that says how many are right."""
    table = tmp_path / "gestures.toml"
    table.write_text(
        'title = "Gestures"\nrecipe = "dvsgesture"\n[rows]\npape = { "model.encoding" = "pape" }\n'
        '[columns]\ndvsgesture = { count = true, root = "dvsgesture" }\n'
    )
    argv = ["table", table, "--root", tmp_path / "runs", "--data.root", data]
    parapos(*argv, *words(COMMON | TINY["dvsgesture"] | {"optim.epochs": "1"}))
    assert re.search(r"\| \d+\.\d = \d+/24 \|", capsys.readouterr().out)


def test_the_training_split_is_judged_as_it_is(subject):
    name, _, folder = subject
    wanted = fit.load_run(folder)
    wanted = replace(wanted, augment=replace(wanted.augment, sample={}))  # varied as the paper does
    for dataset, same in ((wanted.dataset("train"), False), (wanted.judged("train"), True)):
        first, second = (dataset[Key(0, epoch)] for epoch in (1, 2))
        assert all(torch.equal(torch.as_tensor(first[x]), torch.as_tensor(second[x])) for x in first) == same, name
