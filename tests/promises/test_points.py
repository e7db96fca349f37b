"""ScanNet and ModelNet40 as a user meets them, on generated copies with a small network: prepare, train, kill, resume,
two processes, judge, export. Every step is a command; only what is killed needs a process of its own."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from parapos import cli, create_model
from parapos.data import create_dataset, modelnet40, scannet
from parapos.data.preparations import Job, prepare
from parapos.data.prepared import Item
from parapos.data.sampling import Key
from parapos.tasks import answer, create_task
from parapos.training import checkpoint, fit

from ..marks import full
from .commands import parapos, rows

NAMES = ("scannet", "modelnet40")
TINY = ["--model.options.enc_dims", "[16, 32]", "--model.options.enc_depths", "[1, 1]", "--run.tensorboard", "false"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with both data sets, prepared."""
    root = tmp_path_factory.mktemp("data")
    for name in NAMES:
        options = ["--points", "64", "--sampling", "random"] if name == "modelnet40" else []
        parapos("prepare", name, "--synthetic", "--root", root / name, *options)
    return root


def train_words(name, data):
    own = ["--data.options.points", "64", "--data.options.sampling", "random"] if name == "modelnet40" else []
    return ["train", f"{name}_smoke", "--data.root", str(data / name), *TINY, *own]


@pytest.fixture(scope="module", params=["scannet", full("modelnet40")])
def subject(request, data, tmp_path_factory):
    """A data set, the command that trains on it, and a run that nothing disturbed."""
    name = request.param
    train = train_words(name, data)
    folder = tmp_path_factory.mktemp("runs") / name
    parapos(*train, "--out", folder)
    return name, train, folder


def test_prepared_once(data, capsys):
    for name in NAMES:
        own = ["--points", "64", "--sampling", "random"] if name == "modelnet40" else []
        parapos("prepare", name, "--partial", "--root", data / name, *own)
        assert re.search(r"prepared 0 \w+, [1-9]\d* were prepared before", capsys.readouterr().out)
        parapos("prepare", name, "--check", "--partial", "--root", data / name, *own)
        with pytest.raises(SystemExit):
            cli.main(["prepare", name, "--check", "--root", str(data / name), *own])


def test_killed_and_resumed_to_the_bit(subject, forked, tmp_path, capsys):
    _, train, trained = subject
    folder = tmp_path / "killed"
    death = dict(kill_in="step", nth=3, log=tmp_path / "log")  # in the third step; saved after the second
    assert forked(*train, "--out", folder, **death)[0] == -signal.SIGKILL
    parapos(*train, "--out", folder, "--resume")
    assert f"resuming {folder} at step" in capsys.readouterr().err
    for name in ("metrics.csv", "weights.safetensors"):
        assert (folder / name).read_bytes() == (trained / name).read_bytes(), name


def test_two_processes_equal_one(data, forked, tmp_path):
    """Parts of one scene each, so that two processes see what one sees, batch norms included."""
    words = [*train_words("scannet", data), "--optim.part", "1", "--optim.epochs", "1", "--run.precision", "64-true"]
    parapos(*words, "--out", tmp_path / "one")
    codes, told = forked(*words, "--out", tmp_path / "two", log=tmp_path / "log", processes=2)
    assert codes == [0, 0], told
    one, two = (checkpoint.load(checkpoint.step_path(tmp_path / name / "checkpoints", 3)) for name in ("one", "two"))
    norms = 0
    for name, want in one["state_dict"].items():
        found = two["state_dict"][name]
        assert (found.double() - want.double()).norm() <= 1e-8 * max(1e-6, want.double().norm()), name
        norms += "running_mean" in name
    assert norms >= 3
    a, b = (rows(tmp_path / name / "metrics.csv") for name in ("one", "two"))
    assert [row["val_miou"] for row in a] == [row["val_miou"] for row in b]


def test_judged_in_every_way(subject, data, tmp_path, capsys):
    name, _, folder = subject
    ways = ("", "scannet_precise") if name == "scannet" else ("", "modelnet40_voting")
    split = "val" if name == "scannet" else "test"
    for way in ways:
        parapos(
            "eval",
            folder,
            "--split",
            split,
            *(["--data", way] if way else []),
            "--predictions",
            tmp_path / (way or "q"),
        )
    found = rows(folder / "evaluations.csv")
    assert [row["data"] for row in found] == [way or name for way in ways]
    told = capsys.readouterr().out
    if name == "modelnet40":
        assert "right: " in told
        assert all(0 <= float(row["top1"]) <= 1 and 0 <= float(row["recall"]) <= 1 for row in found)
        return
    assert "mIoU: " in told
    assert all(
        float(row["miou"]) == pytest.approx(np.mean([float(row[f"iou_{c}"]) for c in classes(folder)])) for row in found
    )
    parapos("eval", folder, "--split", "test", "--data", "scannet_precise", "--predictions", tmp_path / "hidden")
    scenes = sorted((tmp_path / "hidden").glob("scene*.txt"))
    assert len(scenes) == 2
    for path in scenes:
        lines = [int(line) for line in path.read_text().splitlines()]
        assert len(lines) == len(np.load(data / "scannet/prepared/test" / path.stem / "coord.npy"))
        assert set(lines) <= {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 24, 28, 33, 34, 36, 39}
    assert rows(folder / "evaluations.csv")[-1]["miou"] == "nan"


def classes(folder):
    return fit.load_run(folder).learned["targets"]["class_names"]


def test_a_samples_logits_do_not_depend_on_its_mates(subject):
    name, _, folder = subject
    wanted = fit.load_run(folder)
    dataset = wanted.judged("val")
    task = wanted.make_task(dataset)
    model, _ = checkpoint.load_weights(folder / "weights.safetensors")
    model.eval()
    with torch.no_grad():
        both = answer(model, task.collate([dataset[0], dataset[1]]))
        alone = torch.cat([answer(model, task.collate([dataset[i]])) for i in (0, 1)])
    assert torch.allclose(both, alone, atol=1e-5), name


def test_the_training_split_is_judged_as_it_is(subject):
    name, _, folder = subject
    wanted = fit.load_run(folder)
    for dataset, same in ((wanted.dataset("train"), False), (wanted.judged("train"), True)):
        first, second = (dataset[Key(0, epoch)] for epoch in (1, 2))
        equal = len(first["coord"]) == len(second["coord"]) and torch.equal(
            first["grid_coord"].sort(0).values, second["grid_coord"].sort(0).values
        )
        assert equal == same, name


SAMPLES = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "samples"


@pytest.mark.skipif(not list(SAMPLES.glob("scannet/scans/*/*.ply")), reason="no real scenes here")
@pytest.mark.parametrize(
    ("model", "size"), [("ptv3_nano", 0.1), full("ptv3_scannet", 0.02)], ids=lambda value: str(value)
)
def test_a_real_scene_passes_through_the_network(model, size, tmp_path):
    for mesh in sorted(SAMPLES.glob("scannet/scans/*/*.ply")):
        made = scannet.make(Item(f"test/{mesh.parent.name}", sized=(mesh,)), {})
        for name, array in made.files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            np.save(tmp_path / name, array)
    dataset = create_dataset("scannet", "test", root=tmp_path, complete=False, grid_size=size)
    net = create_model(model, encoding="pape", parabolas=4, num_classes=20, grid_size=size).eval()
    sample = dataset[0]
    stages = net.stages(sample["coord"], sample["grid_coord"], torch.tensor([len(sample["coord"])]))
    for stage in stages:
        assert all(sorted(stage.order(row).tolist()) == list(range(len(stage.cells))) for row in range(4))
    assert [len(stage.cells) for stage in stages] == sorted((len(stage.cells) for stage in stages), reverse=True)
    evaluator = create_task("segmentation", dataset).evaluator(keep_predictions=True)
    with torch.no_grad():
        evaluator.update(net, create_task("segmentation", dataset).collate([sample]))
    assert len(evaluator.predictions[0]) == len(dataset.cloud(0)) > 10_000


@pytest.mark.skipif(not list(SAMPLES.glob("modelnet40/ModelNet40_off/*/*/*.off")), reason="no real meshes here")
@pytest.mark.parametrize(
    ("model", "points", "size"),
    [("ptv3_nano", 2048, 0.05), full("ptv3_modelnet40", 8192, 0.01)],
    ids=lambda value: str(value),
)
def test_real_meshes_pass_through_the_network(model, points, size, tmp_path):
    options = {"sampling": "random", "points": points}
    root = SAMPLES / "modelnet40" / "ModelNet40_off"
    done = prepare(modelnet40, Job(root, tmp_path, complete=False, options=options))
    assert (done.now, done.failed) == (len(list(root.glob("*/*/*.off"))), [])
    dataset = create_dataset(
        "modelnet40", "train", root=root, cache=tmp_path, complete=False, val="test", grid_size=size, **options
    ).as_judged()
    task = create_task("classification", dataset)
    net = create_model(model, task="classification", encoding="pape", parabolas=4, num_classes=40, grid_size=size)
    with torch.no_grad():
        logits = answer(net.eval(), task.collate([dataset[i] for i in range(len(dataset))]))
    assert logits.shape == (len(dataset), 40)
    assert logits.isfinite().all()
