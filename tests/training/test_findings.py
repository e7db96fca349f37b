"""What reviews found: each of these once went wrong."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from parapos import cli
from parapos.data import DATASETS, FormatError, Source
from parapos.data.digits import Digits
from parapos.data.images import image_folder
from parapos.data.sampling import EvalBatches
from parapos.models import create_model
from parapos.tasks.classification import ClassificationEvaluator
from parapos.training import checkpoint, fit, recipe
from parapos.training.loading import Loader
from parapos.training.lock import FolderLock
from parapos.training.recipe import RecipeError

OLD = Path(__file__).with_name("old_run")  # made by the code before tasks were apart from the engine
SMOKE = ("train", "digits_smoke", "--out")
SMALL = (
    *("--model.options.dim", "16", "--model.options.depth", "1", "--model.options.mlp_dim", "16"),
    *("--optim.ema", "0", "--run.tensorboard", "false"),
)


def test_a_run_of_older_code_evaluates_to_its_numbers():
    rows = list(csv.DictReader((OLD / "evaluations.csv").open()))
    assert len(rows) == 2
    for row in rows:
        found = fit.evaluate(OLD, size=int(row["size"]), position_scale=float(row["position_scale"]))
        assert found == pytest.approx({name: float(row[name]) for name in found}, rel=1e-5)
    assert [metric.name for metric in fit.metrics_of(OLD)] == ["loss", "top1", "precision", "recall", "f1"]
    assert fit.headline_of(OLD).name == "top1"


def test_a_run_of_older_code_goes_on(tmp_path, capsys):
    run = shutil.copytree(OLD, tmp_path / "run")
    rows = list(csv.DictReader((OLD / "metrics.csv").open()))
    assert cli.main(["train", str(run)]) == 0
    assert "at step 8 of 10" in capsys.readouterr().err
    again = list(csv.DictReader((run / "metrics.csv").open()))
    assert [row["step"] for row in again] == ["3", "5", "6", "9", "10"]
    for want, found in zip(rows, again, strict=True):
        assert {k: float(v or 0) for k, v in found.items()} == pytest.approx(
            {k: float(v or 0) for k, v in want.items()}, rel=1e-4
        )


def test_truncated_metrics_never_have_a_row_twice(parapos, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    assert parapos(*SMOKE, folder, log=log, kill_in="step", nth=7)[0] == -signal.SIGKILL
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(lines[:2]))
    code, told = parapos(*SMOKE, folder, log=log, kill_in="step", nth=4)
    assert code == -signal.SIGKILL
    assert "rows; the others are lost" in told
    assert parapos(*SMOKE, folder, log=log)[0] == 0
    steps = [(row["step"], bool(row["lr"])) for row in csv.DictReader((folder / "metrics.csv").open())]
    assert len(steps) == len(set(steps))
    assert steps == sorted(steps, key=lambda row: int(row[0]))
    assert steps[-2:] == [("9", True), ("10", False)]


def test_one_process_at_a_time_trains_in_a_folder(environment, tmp_path, capsys):
    folder = tmp_path / "run"
    long = ("--optim.epochs", "4000", "--run.tensorboard", "false", "--data.workers", "1")
    command = [sys.executable, "-m", "parapos.cli", *SMOKE, str(folder), *long]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 600
            while not checkpoint.steps(folder / "checkpoints") and time.monotonic() < until:
                time.sleep(0.02)
            assert cli.main([*SMOKE, str(folder), *long]) == 2
            told = capsys.readouterr().err
            assert told == f"parapos train: {folder}: another process trains there; wait for it or take another --out\n"
        finally:
            process.kill()
    lock = FolderLock(folder)  # of a process that was killed, the workers of which may still live
    assert lock.acquire()
    assert lock.path.exists()
    lock.release()
    assert not lock.path.exists()


def test_a_lock_is_that_of_the_file_at_its_path(tmp_path):
    """A process that opened the file just before its owner removed it does not take that one for the lock."""
    lock, other = FolderLock(tmp_path), FolderLock(tmp_path)
    assert lock.acquire()
    held = os.open(lock.path, os.O_RDWR)
    lock.release()
    assert not other._is_at_its_path(held)
    os.close(held)


def test_a_killed_worker_is_told_in_one_line(environment, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "parapos.cli", *SMOKE, str(folder), "--data.workers", "1", *SMALL]
    command += ["--optim.epochs", "4000"]
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=environment, **pipes) as process:
        until = time.monotonic() + 600
        while not checkpoint.steps(folder / "checkpoints") and time.monotonic() < until:
            time.sleep(0.02)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [pid for pid in children if b"parapos" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(workers[0]), signal.SIGKILL)
        told = process.communicate(timeout=600)[1]
    assert process.returncode == 2, told
    assert "Traceback" not in told
    last = told.splitlines()[-1]
    message = "a data worker was killed, perhaps for want of memory; run the same command again to resume"
    assert last == f"parapos train: {message}; a smaller data.workers in the recipe takes less"


def test_samples_are_asked_for_together():
    asked = []

    class Many:
        def __len__(self):
            return 5

        def __getitem__(self, key):
            raise AssertionError("one by one")

        def __getitems__(self, keys):
            asked.append(len(keys))
            if len(asked) == 3:
                raise FormatError("x.png: damaged")
            return [{"id": key.index} for key in keys]

    batches = EvalBatches(samples=5, batch=2)
    loader = iter(Loader(Many(), batches, 0, lambda samples: [sample["id"] for sample in samples]))
    assert [next(loader), next(loader)] == [[0, 1], [2, 3]]
    with pytest.raises(FormatError, match=r"x\.png: damaged"):
        next(loader)
    assert asked == [2, 2, 1]


def test_the_best_weights_are_exported_not_the_last(tmp_path, monkeypatch):
    scores = iter([0.3, 0.5, 0.4])
    real = ClassificationEvaluator.compute
    monkeypatch.setattr(ClassificationEvaluator, "compute", lambda self: {**real(self), "top1": next(scores)})
    folder = tmp_path / "run"
    assert cli.main([*SMOKE, str(folder), *SMALL, "--optim.epochs", "3", "--run.keep", "20"]) == 0
    model, about = checkpoint.load_weights(folder / "weights.safetensors")
    assert (about["step"], about["val_top1"]) == (10, 0.5)
    states = {step: checkpoint.load(checkpoint.step_path(folder / "checkpoints", step)) for step in (10, 15)}
    best, last = ({k.removeprefix("model."): v for k, v in s["state_dict"].items()} for s in states.values())
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())
    assert not all(torch.equal(value, last[name]) for name, value in model.state_dict().items())
    assert states[15]["parapos"]["progress"]["best_step"] == 10


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.size", "1000000", r"data.size: expected up to 65536 pixels, got 1000000"),
        ("data.eval_batch", "1000000000", r"data.eval_batch: expected from 1 to 1048576"),
        ("optim.epochs", "100000000000000", r"optim.epochs: expected from 1 to 1000000, got 100000000000000"),
        ("optim.batch", "1000000000000", r"optim.batch: expected from 1 to 1048576"),
        ("model.options.depth", "100000000", r"model.options.depth: expected at most 1024, got 100000000"),
        ("model.options.dim", "100000000", r"model.options.dim: expected at most 65536, got 100000000"),
        ("model.encodings.pape.parabolas", "1000000000", r"model.encodings.pape.parabolas: expected at most 65536"),
        ("run.devices", "100000", r"run.devices: expected from 0 to 1024"),
        ("run.nodes", "100000", r"run.nodes: expected from 1 to 65536"),
    ],
)
def test_sizes_that_cannot_be(key, value, message):
    with pytest.raises(RecipeError, match=message):
        recipe.load("digits", {key: value})


def test_weights_larger_than_the_memory_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "sysconf", lambda name: 100 if name == "SC_PHYS_PAGES" else 4096)
    wide = ("--model.options.dim", "256", "--model.options.mlp_dim", "1024")
    assert cli.main([*SMOKE, str(tmp_path / "run"), *wide]) == 2
    told = capsys.readouterr().err
    assert "parapos train: model: its weights take 0.0 GB, this machine has 0.0 GB\n" in told


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory; a smaller optim.part, data.eval_batch"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:121]\n. DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 40000000000 bytes. Error code 12"
            ),
            "could not allocate 40000000000 bytes; a smaller optim.part",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
            "could not allocate 2.00 GiB",
        ),
    ],
)
def test_an_allocation_that_fails_is_one_line(error, message, tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(Digits, "__getitem__", fail)
    assert cli.main([*SMOKE, str(tmp_path / "run"), *SMALL]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"parapos train: {message}")
    assert told.count("\n") == 1


def test_an_error_names_the_recipe_that_set_the_key(tmp_path):
    (tmp_path / "base.toml").write_text('extends = "digits"\n[optim]\nlr = -1\n')
    (tmp_path / "child.toml").write_text('extends = "base.toml"\n[optim]\nepochs = 2\n')
    with pytest.raises(RecipeError) as told:
        recipe.load(tmp_path / "child.toml")
    assert str(told.value) == "base.toml: optim.lr: expected a positive number, got -1.0 (child.toml extends it)"
    (tmp_path / "child.toml").write_text('extends = "base.toml"\n[optim]\nlr = -2\n')
    with pytest.raises(RecipeError, match=r"^child.toml: optim.lr: expected a positive number, got -2.0$"):
        recipe.load(tmp_path / "child.toml")
    with pytest.raises(RecipeError, match=r"^child.toml: optim.lr: expected a positive number, got -3.0$"):
        recipe.load(tmp_path / "child.toml", {"optim.lr": "-3"})


def test_a_flat_folder_of_classes_is_told_who_splits_it(tmp_path):
    with pytest.raises(FormatError) as told:
        image_folder("train", root=tmp_path, size=16)
    assert "demo" not in str(told.value)
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.png").touch()
    with pytest.raises(FormatError, match=f"flat folder of classes, which `parapos demo --data {tmp_path}` splits"):
        image_folder("train", root=tmp_path, size=16)


def test_a_dataset_of_squares_takes_one_number(monkeypatch):
    def square(split: str, *, size: int = 16, seed: int = 0):
        raise AssertionError("data was read")

    monkeypatch.setitem(DATASETS, "square", Source(factory=square))
    with pytest.raises(RecipeError, match=r"data.size: samples of dataset square are square, expected one number"):
        recipe.load("digits", {"data.name": "square", "data.size": "[16, 24]"})


def test_a_run_says_what_it_learned(straight):
    learned = recipe.load(straight / "recipe.toml").learned
    assert learned == {
        "data": "digits",
        "task": "classification",
        "preprocessing": {"size": 16, "mean": 0.0, "scale": 1.0},
        "targets": {"num_classes": 10, "class_names": list("0123456789")},
    }
    assert checkpoint.load_weights(straight / "weights.safetensors")[1]["learned"] == learned


def test_other_classes_are_refused_unless_relabelled(straight, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("recipe.toml", "weights.safetensors"):
        shutil.copy(straight / name, run)
    want = fit.evaluate(run)["top1"]
    monkeypatch.setattr(Digits, "class_names", tuple("9876543210"))
    assert cli.main(["eval", str(run)]) == 2
    assert "dataset digits: class 0 is '9', the model learned '0'" in capsys.readouterr().err
    assert cli.main(["eval", str(run), "--relabel", "order"]) == 0
    assert cli.main(["eval", str(run), "--relabel", "names"]) == 0
    rows = list(csv.DictReader((run / "evaluations.csv").open()))
    assert float(rows[0]["top1"]) == want
    assert float(rows[1]["top1"]) != want
    shutil.copytree(straight, tmp_path / "whole")
    (tmp_path / "whole" / "checkpoints" / "step-000000010.ckpt").unlink()
    assert cli.main(["train", str(tmp_path / "whole")]) == 2
    assert "data: expected the same num_classes, class_names as when the run began" in capsys.readouterr().err


def test_weights_with_nan_are_refused(straight, tmp_path, capsys):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = tmp_path / "weights.safetensors"
    with safe_open(straight / "weights.safetensors", framework="pt") as file:
        header = file.metadata()
    weights = load_file(straight / "weights.safetensors")
    weights["classifier.bias"][3] = torch.nan
    save_file(weights, path, metadata=header)
    shutil.copy(straight / "recipe.toml", tmp_path)
    assert json.loads(header["parapos"])["outputs"] == {"num_classes": 10}
    assert cli.main(["eval", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told == f"parapos eval: {path}: classifier.bias holds NaN or infinity; these weights cannot be used\n"


@pytest.mark.full
def test_one_cycle_resumes_to_the_bit(parapos, tmp_path):
    straight, killed, log = tmp_path / "straight", tmp_path / "killed", tmp_path / "log"
    command = ("train", "digits_smoke", "--optim.schedule", "onecycle", *SMALL, "--out")
    assert parapos(*command, killed, log=log, kill_in="step", nth=7)[0] == -signal.SIGKILL
    for folder in (straight, killed):
        code, told = parapos(*command, folder, log=log)
        assert code == 0, told
    for name in ("metrics.csv", "weights.safetensors", "checkpoints/step-000000010.ckpt"):
        assert (killed / name).read_bytes() == (straight / name).read_bytes(), name
    groups = checkpoint.load(straight / "checkpoints/step-000000010.ckpt")["optimizer_states"][0]["param_groups"]
    assert groups[0]["betas"][0] == pytest.approx(0.95)


def test_weights_with_nan_in_a_buffer_are_refused(tmp_path):
    """The w_p of PaPE-RI is drawn once and not learned."""
    model = create_model("vit_nano_patch4", encoding="pape_ri", num_classes=3, depth=1)
    weights = model.state_dict()
    (name,) = (name for name, _ in model.named_buffers() if name.endswith("w_p"))
    weights[name] = torch.full_like(weights[name], torch.inf)
    about = {"model": "vit_nano_patch4", "encoding": "pape_ri", "options": {"depth": 1}, "classes": 3}
    checkpoint.export(tmp_path / "weights.safetensors", weights, **about)
    with pytest.raises(checkpoint.CheckpointError, match=f"{name} holds NaN or infinity"):
        checkpoint.load_weights(tmp_path / "weights.safetensors")


def test_validation_is_judged_by_the_task_of_its_own_data(tmp_path, monkeypatch):
    """A task may look up the truth in its data set, where the same id is another sample in another split."""
    judged, make_task = [], recipe.Recipe.make_task

    def remembering(self, dataset):
        task = make_task(self, dataset)
        make_evaluator = task.evaluator
        task.evaluator = lambda **options: judged.append(len(dataset)) or make_evaluator(**options)
        return task

    monkeypatch.setattr(recipe.Recipe, "make_task", remembering)
    assert cli.main([*SMOKE, str(tmp_path / "run"), *SMALL, "--optim.epochs", "1"]) == 0
    wanted = fit.load_run(tmp_path / "run")
    assert len(wanted.dataset("val")) != len(wanted.dataset("train"))
    assert set(judged) == {len(wanted.dataset("val"))}


def test_a_validation_split_of_other_classes_is_refused(tmp_path, monkeypatch, capsys):
    made, make_task = [], recipe.Recipe.make_task

    def other(self, dataset):
        made.append(make_task(self, dataset))
        made[-1].classes -= len(made) - 1  # the second is the validation split's
        return made[-1]

    monkeypatch.setattr(recipe.Recipe, "make_task", other)
    assert cli.main([*SMOKE, str(tmp_path / "run"), *SMALL]) == 2
    assert "data: the validation split has 9 classes" in capsys.readouterr().err
