"""CIFAR-10: its files give what they hold or a FormatError, and a tiny training on generated ones learns."""

import hashlib
import pickle

import numpy as np
import pytest
import torch

from parapos.data import FormatError, cifar10, create_dataset
from parapos.data.cifar10 import Augment, read_batch
from parapos.data.readers import pickled
from parapos.data.sampling import Key
from parapos.data.synthetic import write_cifar10

from .readers.fuzz import mutations, survive


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("cifar10") / "tree"
    write_cifar10(root)
    return root


def make(root, split="train", **options):
    return create_dataset("cifar10", split, root=root, complete=False, **options)


def batch(data=None, labels=None, **more):
    return pickled.dumps(
        {"data": np.zeros((2, 3072), np.uint8) if data is None else data, "labels": labels or [0, 9], **more}
    )


def test_files_are_what_an_unpickler_reads(made):
    """The generated files are ours, so that unpickling them is safe."""
    for name in (*cifar10.TRAIN, *cifar10.TEST):
        path = made / cifar10.FOLDER / name
        images, labels = read_batch(path)
        expected = pickle.loads(path.read_bytes(), encoding="bytes")
        assert labels == expected[b"labels"]
        assert np.array_equal(images.numpy().reshape(40, 3072), expected[b"data"])
        assert read_batch(path, hashlib.md5(path.read_bytes()).hexdigest())[1] == labels


def test_a_row_is_three_planes(tmp_path):
    row = np.concatenate([np.full(1024, 7), np.arange(1024) % 32, np.arange(1024) // 32]).astype(np.uint8)
    (tmp_path / "x").write_bytes(batch(np.stack([row, row])))
    images, _ = read_batch(tmp_path / "x")
    assert (images.shape, images.dtype) == ((2, 3, 32, 32), torch.uint8)
    assert (images[0, 0] == 7).all()
    assert images[0, 1, 5].tolist() == images[0, 2, :, 5].tolist() == list(range(32))


def test_splits(made):
    parts = {split: make(made, split) for split in ("train", "val", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 180, "val": 20, "test": 40}
    last, labels = read_batch(made / cifar10.FOLDER / "data_batch_5")
    assert torch.equal(parts["val"].images, last[-20:])
    assert parts["val"].labels == labels[-20:]
    assert torch.equal(parts["train"].images[:40], read_batch(made / cifar10.FOLDER / "data_batch_1")[0])
    assert (parts["test"].classes, len(parts["test"].class_names)) == (10, 10)
    assert torch.equal(make(made / cifar10.FOLDER, "test").images, parts["test"].images)
    assert len(make(made, "val", val_images=3)) == 3
    sample = parts["test"][-1]
    torch.testing.assert_close(sample["image"], parts["test"].images[-1] / 255, rtol=0, atol=1e-5)
    assert (sample["id"], sample["label"]) == (39, parts["test"].labels[-1])
    assert cifar10.VALIDATION == 5000


def test_samples_depend_on_seed_epoch_and_index_alone(made):
    found = make(made, seed=3, augment=Augment(area=(0.3, 1.0)), size=(16, 48))
    keys = [Key(5, 0), Key(5, 1), Key(9, 0), 7]
    together = found.__getitems__(keys)
    for key, sample in zip(keys, together, strict=True):
        assert sample["image"].shape == (3, 16, 48)
        assert torch.equal(found[key]["image"], sample["image"])
    assert not torch.equal(together[0]["image"], together[1]["image"])
    assert found.__getitems__([]) == []
    assert make(made, "val").augment is None


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (pickled.dumps([1]), "at byte 0: data is NoneType"),
        (pickled.dumps({"labels": [1]}), "at byte 0: data is NoneType"),
        (batch(np.zeros((2, 3071), np.uint8)), r"data is \(2, 3071\), expected bytes \(N, 3072\)"),
        (batch(labels=[1]), "1 labels, expected one for each of 2"),
        (batch(labels=[1, 10]), "label '10', expected 0 to 9"),
        (batch(labels=[1, -1]), "label '-1'"),
        (batch(labels=[1, "a"]), "label 'a'"),
        (pickled.dumps({"data": np.zeros((2, 3072), np.uint8)}), "no list of labels"),
        (pickle.dumps({"data": 1.5}, 2), "operation BINFLOAT"),
        (b"", "at byte 0: not a whole pickle"),
    ],
)
def test_bad_files_are_told(data, told, tmp_path):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FormatError, match=rf"x: at byte \d+: .*{told.removeprefix('at byte 0: ')}"):
        read_batch(tmp_path / "x")


def test_mutated_files_are_pictures_or_a_format_error(tmp_path, tenths):
    files = mutations([batch(batch_label="x", filenames=["a", "b"])], 300 * tenths)
    good, bad = survive(read_batch, files, tmp_path / "x", per_byte=40, least=10**5)
    assert good + bad == 300 * tenths
    assert min(good, bad) > 5 * tenths


def test_errors(made, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="split must be one of train, val, test, got 'dev'"):
        make(made, "dev")
    with pytest.raises(FileNotFoundError, match=r"data_batch_1: no such file, expected data_batch_1, .* of CIFAR-10"):
        make(tmp_path)
    with pytest.raises(FormatError, match=r"test_batch: md5 is .*, expected 40351d587109b.*; complete=False"):
        create_dataset("cifar10", "test", root=made)
    with pytest.raises(ValueError, match="size must be at least 1"):
        make(made, size=0)
    with pytest.raises(FormatError, match="not empty, expected a new folder"):
        write_cifar10(made)
    monkeypatch.setattr(cifar10, "LARGEST", 1000)
    with pytest.raises(FormatError, match=r"data_batch_1: \d+ bytes, expected at most 1000"):
        make(made)


@pytest.mark.full
def test_a_tiny_training_learns(made, tmp_path):
    """By the recipe's command, from files to accuracy: ten classes of stripes, far above a tenth after some seconds."""
    from parapos import cli
    from parapos.training.checkpoint import load_weights

    tiny = {
        "data.root": made,
        "data.options.complete": "false",
        "data.workers": 0,
        "model.name": "vit_nano_patch4",
        "model.options": "{depth = 2, drop_path = 0.0}",
        "model.encodings.pape.parabolas": 4,
        "augment.mixup": 0.0,
        "augment.cutmix": 0.0,
        "optim.epochs": 12,
        "optim.batch": 30,
        "optim.lr": 4e-3,
        "run.accelerator": "cpu",
        "run.precision": "32-true",
        "run.compile": "false",
        "run.threads": 1,
        "run.tensorboard": "false",
    }
    changes = [str(word) for key, value in tiny.items() for word in (f"--{key}", value)]
    assert cli.main(["train", "cifar10", "--out", str(tmp_path / "run"), *changes]) == 0
    model, _ = load_weights(tmp_path / "run" / "weights.safetensors")
    test = make(made, "test")
    samples = test.__getitems__(range(len(test)))
    with torch.no_grad():
        answers = model.eval()(torch.stack([sample["image"] for sample in samples])).argmax(-1)
    assert (answers == torch.tensor(test.labels)).float().mean() > 0.5
