"""Odd files in the folder of a run: every one of them is told, in one line, and nothing is begun anew in silence."""

import json
import random
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from parapos import cli
from parapos.training import checkpoint, state
from parapos.training.checkpoint import CheckpointError

from .test_checkpoint import STATE

LAST = "checkpoints/step-000000010.ckpt"


@pytest.fixture
def run(straight, tmp_path):
    """A finished run to be damaged."""
    return shutil.copytree(straight, tmp_path / "run")


def refused(capsys, *words):
    """The one line that a command ends with."""
    assert cli.main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def rewrite(path, change):
    held = checkpoint.load(path)
    change(held)
    torch.save(held, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(parapos=1), "not a checkpoint of a run, it has only epoch, "),
        (lambda s: s["parapos"].pop("progress"), "progress: expected step (int), "),
        (lambda s: s["parapos"]["progress"].update(step="9"), "progress: expected step (int), "),
        (lambda s: s["parapos"]["progress"].update(more=1), "progress: expected step (int), "),
        (lambda s: s["parapos"]["progress"].update(step=-1), "expected counts of steps"),
        (lambda s: s["parapos"].update(samples="many"), "expected counts of steps"),
    ],
)
def test_a_checkpoint_of_something_else(change, message, run, capsys):
    rewrite(run / LAST, change)
    assert f"{run / LAST}: {message}" in refused(capsys, "train", run)


def first(s):
    return s["optimizer_states"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("state_dict"), "state_dict: expected a dictionary, got NoneType"),
        (lambda s: s["state_dict"].pop("model.classifier.bias"), "model.classifier.bias: expected (10,), got NoneType"),
        (lambda s: s["state_dict"].update(x=1), "x: expected NoneType, got int"),
        (lambda s: s["parapos"].update(average=None), "average: expected a dictionary, got NoneType"),
        (lambda s: s["parapos"]["average"].update({"classifier.bias": torch.ones(3)}), "expected (10,), got (3,)"),
        (lambda s: s.update(optimizer_states=[]), "optimizer_states: expected a list of one dictionary"),
        (lambda s: first(s).update(param_groups=1), "param_groups: expected 1, got 1"),
        (lambda s: first(s)["param_groups"][0].pop("lr"), "param_groups: expected params, "),
        (lambda s: first(s)["state"].pop(3), "3: expected a dictionary, got NoneType"),
        (lambda s: first(s)["state"][0].update(exp_avg=torch.ones(2)), "optimizer's exp_avg of tensor 0: expected (32"),
    ],
)
def test_wrong_types_inside(change, message, run, capsys):
    def unfinished(s):
        s["parapos"]["progress"]["validated"] = 1
        change(s)

    rewrite(run / LAST, unfinished)
    told = refused(capsys, "train", run)
    assert f"{run / LAST}: not of this run: " in told
    assert message in told


def test_keys_of_another_torch_are_no_damage(run, capsys):
    """Releases of torch add keys to the groups of an optimizer; those that say what it does must be there."""

    def newer(s):
        group = first(s)["param_groups"][0]
        group["of_a_newer_torch"] = None
        group.pop("maximize")

    weights = (run / "weights.safetensors").read_bytes()
    (run / LAST).unlink()
    rewrite(run / "checkpoints/step-000000008.ckpt", newer)
    assert cli.main(["train", str(run)]) == 0, capsys.readouterr().err
    assert "at step 8 of 10" in capsys.readouterr().err
    assert (run / "weights.safetensors").read_bytes() == weights


@pytest.mark.parametrize("key", ["params", "lr", "betas", "eps", "weight_decay"])
def test_keys_that_an_optimizer_needs(key, run, capsys):
    def without(s):
        s["parapos"]["progress"]["validated"] = 1
        first(s)["param_groups"][0].pop(key)

    rewrite(run / LAST, without)
    assert "param_groups: expected params, lr, betas, eps, weight_decay of " in refused(capsys, "train", run)


def test_resume_never_begins_anew(run, capsys):
    shutil.rmtree(run / "checkpoints")
    weights = (run / "weights.safetensors").read_bytes()
    assert f"{run}: nothing to resume, it has no checkpoints" in refused(capsys, "train", run, "--resume")
    assert (run / "weights.safetensors").read_bytes() == weights
    assert cli.main(["train", str(run)]) == 0
    assert f"{run}: has no checkpoints, starting over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "data", "words", "message"),
    [
        ("versions.json", b"{", ("train",), "not JSON"),
        ("versions.json", b"\xff", ("train",), "not JSON"),
        ("versions.json", b"{}", ("train",), "expected a list, got dict"),
        ("metrics.csv", b"\xff\n", ("train",), "expected the columns step,epoch"),
        ("evaluations.csv", b"a,b\n1,\xff\n", ("eval",), "line 2: not UTF-8"),
        ("cells.csv", None, ("sweep", "--sizes", "16"), "line 2: could not convert string to float: 'x'"),
    ],
)
def test_damaged_files_beside_are_named(name, data, words, message, run, capsys):
    if data is None:
        from parapos.experiments.store import COLUMNS

        data = f"{','.join(COLUMNS)}\na,size=16,top1,x,w\n".encode()
    (run / name).write_bytes(data)
    (run / LAST).unlink()
    told = refused(capsys, words[0], run, *words[1:])
    assert f"parapos {words[0]}: {run / name}: {message}" in told


def test_a_damaged_row_of_metrics_is_told_by_line(run, capsys):
    lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join([lines[0], "x" + lines[1], *lines[2:]]))
    (run / LAST).unlink()
    assert f"{run}/metrics.csv: line 2: could not convert" in refused(capsys, "train", run)


def test_the_disk_is_full_or_no_folder(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    told = refused(capsys, "train", "digits_smoke", "--out", tmp_path / "file" / "run")
    assert f"parapos train: {tmp_path}/file/run: Not a directory" in told
    told = refused(capsys, "demo", "--quick", "--out", tmp_path / "file")
    assert f"parapos demo: {tmp_path}/file: File exists" in told

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    told = refused(capsys, "train", "digits_smoke", "--out", tmp_path / "run")
    assert told == f"parapos train: {tmp_path}/run/recipe.toml: No space left on device\n"
    assert list((tmp_path / "run").iterdir()) == []


def again(path, pickled):
    """The checkpoint with another pickle in it, and sums that match."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in files if name.endswith("data.pkl"))
    files[name] = pickled(bytearray(files[name]))
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def test_mutated_checkpoints_are_data_or_our_error(tmp_path):
    """Bytes of the file, which its sums betray, and bytes of the pickle with sums that match."""
    draw, path, refusals = random.Random(0), tmp_path / "step-000000001.ckpt", []
    checkpoint.save({**STATE, "parapos": {"progress": {"step": 1}, "samples": 3}}, path)
    good = path.read_bytes()

    def spoil(data):
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        return bytes(data)

    for turn in range(400):
        path.write_bytes(good if turn % 2 else spoil(bytearray(good)))
        if turn % 2:
            again(path, spoil)
        for read in (checkpoint.load, state.load):
            try:
                read(path)
            except CheckpointError as error:
                refusals.append(str(error))
    assert len(refusals) > 300
    assert all(told.startswith(str(path)) and "weights_only" not in told for told in refusals)


@pytest.mark.parametrize(
    "pickled", [b"", b"\x80\x02R.", b"\x80\x02a.", b"\x80\x02K\x01Q.", b"\x80\x02h\x05.", b"\x80\x02}K\x01b."]
)
def test_malformed_pickles(pickled, tmp_path):
    path = tmp_path / "x.ckpt"
    checkpoint.save(STATE, path)
    again(path, lambda data: pickled)
    with pytest.raises(CheckpointError, match=r"x\.ckpt: refused, expected plain types alone: \w+ while reading it$"):
        checkpoint.load(path)


ABOUT = {"format": 1, "model": "vit_nano_patch4", "encoding": "none", "options": {"dim": 32, "depth": 1}, "classes": 3}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("[]", "expected format 1, got list"),
        ("null", "expected format 1, got NoneType"),
        ("{", "Expecting property name"),
        ('{"format": 1}', "model: expected str, got 'none'"),
        (json.dumps({**ABOUT, "options": []}), "options: expected dict, got []"),
        (json.dumps({**ABOUT, "classes": "3"}), "classes: expected int, got '3'"),
        (json.dumps({**ABOUT, "size": "big"}), "size: expected int, got 'big'"),
        (json.dumps({**ABOUT, "encoding": "papa"}), "unknown encoding 'papa'"),
        (json.dumps({**ABOUT, "options": {"dim": 2**14}}), "expected ("),
        (json.dumps({**ABOUT, "options": {"dim": "x"}}), "do not make a model: "),
    ],
)
def test_odd_headers_of_weights(header, message, tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(to_bytes({"x": torch.zeros(1)}, metadata={"parapos": header}))
    with pytest.raises(CheckpointError) as told:
        checkpoint.load_weights(path)
    assert str(told.value).startswith(f"{path}: header and weights do not make a model: ")
    assert message in str(told.value)


def test_mutated_weights_are_a_model_or_our_error(tmp_path):
    import parapos

    draw, path, refusals = random.Random(1), tmp_path / "w.safetensors", []
    options = {**ABOUT["options"], "heads": 4, "mlp_dim": 8}
    model = parapos.create_model("vit_nano_patch4", encoding="none", num_classes=3, **options)
    checkpoint.export(path, model.state_dict(), **{**ABOUT, "options": options})
    good = path.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    assert from_bytes(good)
    for turn in range(200):
        data = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(end if turn % 4 else len(data))] = draw.choice(b'"0159[]{}:,az\xff\x00')
        path.write_bytes(data[: draw.choice((len(data), len(data), draw.randrange(len(data))))])
        try:
            checkpoint.load_weights(path)
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert all(told.startswith(str(path)) for told in refusals)
