"""Checkpoints hold plain types, run nothing, and are whole or refused."""

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import parapos
from parapos.training import checkpoint
from parapos.training.checkpoint import CheckpointError

STATE = {"a": torch.arange(5.0), "b": [1, 2.5, "c", None, True], "c": {3: (1, 2)}}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "step-000000001.ckpt"
    checkpoint.save(STATE, path)
    return path


def test_it_reads_back_as_plain_types(saved):
    for state in (checkpoint.load(saved), torch.load(saved, weights_only=True)):
        assert torch.equal(state.pop("a"), STATE["a"])
        assert state == {"b": STATE["b"], "c": STATE["c"]}
    assert checkpoint.damage(saved) is None
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


@pytest.mark.parametrize("value", [Path("x"), {1, 2}, lambda: 0, torch.nn.Linear(1, 1)])
def test_other_types_are_refused_when_saving(value, tmp_path):
    with pytest.raises(CheckpointError, match=f"got {type(value).__name__} at .a.b"):
        checkpoint.save({"a": {"b": value}}, tmp_path / "x.ckpt")
    assert not list(tmp_path.iterdir())


def test_every_cut_and_every_flipped_tensor_byte_is_noticed(saved):
    data = saved.read_bytes()
    for length in range(0, len(data), 37):
        saved.write_bytes(data[:length])
        assert checkpoint.damage(saved), length
        with pytest.raises(CheckpointError, match=saved.name):
            checkpoint.load(saved)
    start = data.index(STATE["a"].numpy().tobytes())
    for place in range(start, start + 20):
        saved.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        assert "checksum" in checkpoint.damage(saved)


def test_the_one_before_is_found(tmp_path):
    for step in (2, 30, 4):
        checkpoint.save({"step": step}, checkpoint.step_path(tmp_path, step))
    (tmp_path / "other.ckpt").touch()
    assert list(checkpoint.steps(tmp_path)) == [30, 4, 2]
    assert checkpoint.latest(tmp_path) == (checkpoint.step_path(tmp_path, 30), [])
    os.truncate(checkpoint.step_path(tmp_path, 30), 100)
    found, messages = checkpoint.latest(tmp_path)
    assert found == checkpoint.step_path(tmp_path, 4)
    assert len(messages) == 1
    assert "step-000000030.ckpt: truncated" in messages[0]
    (tmp_path / ".step-000000031.ckpt.tmp").touch()
    checkpoint.prune(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"other.ckpt", "step-000000030.ckpt", "step-000000004.ckpt"}
    os.truncate(checkpoint.step_path(tmp_path, 4), 0)
    with pytest.raises(CheckpointError, match="but there is none"):
        checkpoint.latest(tmp_path)
    assert checkpoint.latest(tmp_path / "nothing") == (None, [])


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle", "zip of pickle"])
def test_a_malicious_pickle_runs_nothing(form, tmp_path):
    mark, path = tmp_path / "ran", tmp_path / "evil.ckpt"
    if form == "torch":
        torch.save({"x": Evil(mark)}, path)
    elif form == "old torch":
        torch.save({"x": Evil(mark)}, path, _use_new_zipfile_serialization=False)
    elif form == "pickle":
        path.write_bytes(pickle.dumps(Evil(mark)))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Evil(mark)))
            archive.writestr("archive/version", "3\n")
    with pytest.raises(CheckpointError, match=r"evil\.ckpt: "):
        checkpoint.load(path)
    with pytest.raises(CheckpointError, match=r"evil\.ckpt: "):
        checkpoint.SafeIO().load_checkpoint(path)
    assert not mark.exists()


def test_a_list_is_no_checkpoint(tmp_path):
    torch.save([1], tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="expected a dictionary, got list"):
        checkpoint.load(tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="no such file"):
        checkpoint.load(tmp_path / "y.ckpt")


def test_a_failed_write_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save({"new": 1}, saved)
    assert saved.read_bytes() == before


def test_weights_come_with_their_model(name, tmp_path):
    options = dict(dim=48, heads=12, depth=1, mlp_dim=16)
    torch.manual_seed(1)
    model = parapos.create_model("vit_nano_patch4", encoding=name, num_classes=3, **options).eval()
    torch.nn.init.normal_(model.classifier.weight)
    path = tmp_path / "weights.safetensors"
    about = dict(model="vit_nano_patch4", encoding=name, options=options, classes=3, val_top1=0.5)
    checkpoint.export(path, model.state_dict(), **about)
    again, told = checkpoint.load_weights(path)
    assert told == {"format": checkpoint.FORMAT, **about}
    assert not again.training
    images = torch.rand(2, 3, 12, 20)
    assert torch.equal(model(images), again(images))
    first = path.read_bytes()
    checkpoint.export(path, model.state_dict(), **about)
    assert path.read_bytes() == first


def test_foreign_weights_are_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"hello")
    with pytest.raises(CheckpointError, match="not safetensors"):
        checkpoint.load_weights(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="expected format 1, got none"):
        checkpoint.load_weights(path)
    about = {"format": 1, "model": "vit_nano_patch4", "encoding": "none", "options": {}, "classes": 3}
    save_file({"x": torch.zeros(1)}, path, metadata={"parapos": json.dumps(about)})
    with pytest.raises(CheckpointError, match="do not make a model"):
        checkpoint.load_weights(path)


@pytest.mark.parametrize("options", [{"depth": 10**9}, {"depths": [2, 10**9]}, {"dim": 10**12}])
def test_a_header_of_an_endless_model_is_refused_before_one_is_built(options, tmp_path, monkeypatch):
    def build(*args, **options):
        raise AssertionError("a model was built")

    monkeypatch.setattr(checkpoint, "create_model", build)
    about = {"format": 1, "model": "vit_nano_patch4", "encoding": "none", "options": options, "classes": 3}
    save_file({"x": torch.zeros(1)}, tmp_path / "x", metadata={"parapos": json.dumps(about)})
    with pytest.raises(CheckpointError, match=f"options.{next(iter(options))}.*at most"):
        checkpoint.load_weights(tmp_path / "x")
