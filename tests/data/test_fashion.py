"""Fashion-MNIST: idx files give what they hold or a FormatError, a sample is a function of its key."""

import gzip
import hashlib
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from parapos.data import FormatError, create_dataset, fashion
from parapos.data.batch import collate
from parapos.data.fashion import Augment, read_idx
from parapos.data.sampling import Key

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
REAL = SHARED / "samples" / "fashion_mnist"


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.numpy().tobytes()


@pytest.fixture
def files(tmp_path):
    """40 training images, 20 test images; some files packed, some not."""
    g = torch.Generator().manual_seed(0)
    for kind, count, pack in (("train", 40, True), ("t10k", 20, False)):
        images = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=g)
        labels = (torch.arange(count) % 10).to(torch.uint8)
        for name, array in ((f"{kind}-images-idx3-ubyte", images), (f"{kind}-labels-idx1-ubyte", labels)):
            data = idx(array)
            path = tmp_path / (f"{name}.gz" if pack else name)
            path.write_bytes(gzip.compress(data, 1) if pack else data)
    return tmp_path


def make(root, split="train", **options):
    return create_dataset("fashion_mnist", split, root=root, complete=False, **options)


def test_read_idx(tmp_path):
    array = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    path = tmp_path / "a"
    path.write_bytes(idx(array))
    assert torch.equal(read_idx(path, 3, hashlib.sha256(idx(array)).hexdigest()), array)
    path.with_suffix(".gz").write_bytes(gzip.compress(idx(array)))
    assert torch.equal(read_idx(path.with_suffix(".gz"), 3, hashlib.sha256(idx(array)).hexdigest()), array)
    with pytest.raises(FormatError, match=r"a: sha256 of its content is .*, expected 00"):
        read_idx(path, 3, "00")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "at byte 0: magic number missing, expected 00000803"),
        (lambda data: data[:3], "at byte 0: magic number 000008, expected"),
        (lambda data: b"\x00\x00\x0d\x03" + data[4:], "at byte 0: magic number 00000d03"),
        (lambda data: data[:9], "at byte 9: the file ends in its header, expected 16 bytes"),
        (lambda data: data[:-1], "at byte 16: 23 bytes of content, expected 2 x 3 x 4 = 24"),
        (lambda data: data + b"x", "at byte 16: 25 bytes of content"),
        (lambda data: data[:4] + b"\xff" * 12 + data[16:], "at byte 16: 24 bytes of content, expected 4294967295 x"),
        (lambda data: data[:4] + b"\x00" * 12, r"at byte 4: sizes \(0, 0, 0\)"),
    ],
)
def test_bad_files_are_told(tmp_path, change, message):
    path = tmp_path / "a"
    path.write_bytes(change(idx(torch.zeros(2, 3, 4, dtype=torch.uint8))))
    with pytest.raises(FormatError, match=message):
        read_idx(path, 3)


def test_any_bytes_are_an_array_or_a_format_error(tmp_path):
    good = idx(torch.arange(24, dtype=torch.uint8).view(2, 3, 4))
    packed, rng, read, told = gzip.compress(good), random.Random(0), 0, []
    for round in range(600):
        zipped = round % 2 == 1
        data = bytearray(packed if zipped else good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.randrange(len(data) + 1)] if round % 3 == 0 else data
        path = tmp_path / f"a{'.gz' if zipped else ''}"
        path.write_bytes(data)
        try:
            found = read_idx(path, 3)
        except FormatError as error:
            told.append(str(error))
        else:
            assert found.numel() == 24
            read += 1
    assert all(message.startswith(str(tmp_path)) for message in told)
    assert 50 < read < 550


def test_a_packed_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fashion, "LARGEST", 10**5)
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(10**6)))
    with pytest.raises(FormatError, match="more than 100000 bytes"):
        read_idx(path, 3)


def test_splits(files):
    parts = {split: make(files, split) for split in ("train", "val", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 36, "val": 4, "test": 20}
    whole = read_idx(files / "train-images-idx3-ubyte.gz", 3)
    assert torch.equal(torch.cat([parts["train"].images, parts["val"].images])[:, 0], whole)
    assert parts["val"].labels == [6, 7, 8, 9]
    assert parts["test"].classes == 10
    few = make(files, "test", test_images=3, train_images=5)
    assert len(few) == 3
    assert torch.equal(few.images, parts["test"].images[:3])


def test_an_image_at_its_own_size_is_itself(files):
    found = make(files, "test", size=28)
    for i in (0, 7, -1):
        sample = found[i]
        assert sample["image"].shape == (3, 28, 28)
        assert sample["image"].dtype == torch.float32
        assert sample["id"] == range(20)[i]
        assert sample["label"] == range(20)[i] % 10
        for channel in sample["image"]:
            torch.testing.assert_close(channel, found.images[i, 0] / 255, rtol=0, atol=1e-5)
    with pytest.raises(IndexError):
        found[20]


def test_twice_the_size_keeps_the_means_of_pixels(files):
    """Bilinear: away from the border, a smooth picture is the same function of place at every size."""
    found = make(files, "test", size=56)
    ramp = torch.arange(28.0)[None] + 2 * torch.arange(28.0)[:, None]
    found.images[0] = ramp.to(torch.uint8)
    got = found[0]["image"][0] * 255
    place = (torch.arange(56) + 0.5) / 2 - 0.5
    want = place[None] + 2 * place[:, None]
    torch.testing.assert_close(got[2:-2, 2:-2], want[2:-2, 2:-2], rtol=0, atol=1e-3)


def test_training_samples_depend_on_seed_epoch_and_index_alone(files):
    augment = Augment(area=(0.15, 1.0))
    found = make(files, seed=3, augment=augment)
    keys = [Key(5, 0), Key(5, 1), Key(9, 0)]
    images = [found[key]["image"] for key in keys]
    assert torch.equal(images[0], make(files, seed=3, augment=augment)[keys[0]]["image"])
    other = make(files, seed=4, augment=augment)[keys[0]]["image"]
    for one, two in ((images[0], images[1]), (images[0], other)):
        assert not torch.equal(one, two)
    together = found.__getitems__(keys)
    for sample, image, key in zip(together, images, keys, strict=True):
        assert torch.equal(sample["image"], image)
        assert sample["id"] == key.index
    assert found.__getitems__([]) == []
    assert [sample["id"] for sample in found.__getitems__([-1, 0, Key(3, 7), 0])] == [35, 0, 3, 0]
    with pytest.raises(IndexError):
        found.__getitems__([0, 36])
    (batch,) = DataLoader(found, batch_sampler=[keys], collate_fn=collate)
    assert batch["image"].shape == (3, 3, 32, 32)
    assert batch["label"].tolist() == [5, 5, 9]


def test_crops(files):
    """Of a ramp, a crop is a ramp that is flatter by the side of the crop, inside the picture, and mirrored or not."""
    found = make(files, size=28, augment=Augment(area=(0.25, 0.64), flip=0.25))
    found.images[:] = (8 * torch.arange(28.0)).to(torch.uint8)
    slopes, starts = [], []
    for epoch in range(400):
        row = found[Key(0, epoch)]["image"][0, 14] * 255 / 8
        slopes.append(((row[20] - row[8]) / 12).item())
        starts += [row.min().item(), row.max().item()]
    sides = torch.tensor(slopes).abs()
    assert 0.499 < sides.min() < 0.53
    assert 0.77 < sides.max() < 0.801
    assert sides.square().mean().item() == pytest.approx((0.25 + 0.64) / 2, abs=0.02)  # areas are drawn evenly
    assert min(starts) >= 0
    assert max(starts) <= 27
    assert sum(slope < 0 for slope in slopes) / 400 == pytest.approx(0.25, abs=0.07)
    plain = make(files, size=28, augment=Augment(flip=0.0))
    torch.testing.assert_close(plain[Key(1, 1)]["image"][0], plain.images[1, 0] / 255, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"area": (0.0, 1.0)}, "area must be two numbers"),
        ({"area": (0.5, 0.2)}, "area must be two numbers"),
        ({"flip": 1.5}, "flip must be from 0 to 1, got 1.5"),
    ],
)
def test_bad_augment(options, message):
    with pytest.raises(ValueError, match=message):
        Augment(**options)


def test_errors(files):
    with pytest.raises(ValueError, match="split must be one of train, val, test, got 'dev'"):
        make(files, "dev")
    with pytest.raises(ValueError, match="size must be at least 1"):
        make(files, size=0)
    with pytest.raises(ValueError, match="test_images must be from 0 to 20, got 21"):
        make(files, "test", test_images=21)
    with pytest.raises(FormatError, match=r"train-images-idx3-ubyte.gz: sha256 .*, expected c59f468a"):
        create_dataset("fashion_mnist", "train", root=files)
    labels = files / "t10k-labels-idx1-ubyte"
    labels.write_bytes(idx(torch.tensor([3] * 19 + [10], dtype=torch.uint8)))
    with pytest.raises(FormatError, match="at byte 27: label 10, expected 0 to 9"):
        make(files, "test")
    labels.write_bytes(idx(torch.zeros(19, dtype=torch.uint8)))
    with pytest.raises(FormatError, match="19 labels, expected one for each of 20"):
        make(files, "test")
    (files / "t10k-images-idx3-ubyte").write_bytes(idx(torch.zeros(19, 27, 28, dtype=torch.uint8)))
    with pytest.raises(FormatError, match=r"images of \(27, 28\), expected 28 x 28"):
        make(files, "test")
    labels.unlink()
    with pytest.raises(FileNotFoundError, match=r"t10k-labels-idx1-ubyte.gz: no such file"):
        make(files, "test")


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the published files")
def test_the_published_files():
    found = create_dataset("fashion_mnist", "val", root=REAL, val_images=2000)
    assert len(found) == 2000
    assert min(found.labels.count(label) for label in range(10)) > 150
    assert len(create_dataset("fashion_mnist", "test", root=REAL)) == 10_000


def test_a_root_that_links_to_itself_is_one_line(tmp_path, capsys):
    """For every data set: the root is looked at before the data."""
    from parapos import cli

    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for recipe in ("desk_fashion", "cifar10", "ucf101_smoke"):
        words = ["train", recipe, "--out", str(tmp_path / "run"), "--data.root", str(tmp_path / "loop")]
        assert cli.main([*words, "--run.precision", "32-true"]) == 2
        err = capsys.readouterr().err
        assert (
            err == f"parapos train: {tmp_path / 'loop'}: a symbolic link that leads back to itself, expected a folder\n"
        )
        assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_pictures_need_not_be_square(files):
    found = make(files, "test", size=(14, 56))
    assert found[0]["image"].shape == (3, 14, 56)
    square = make(files, "test", size=56)
    ramp = 4 * torch.arange(28.0)[:, None].expand(28, 28)
    for data in (found, square):
        data.images[0, 0] = ramp.to(torch.uint8)
    torch.testing.assert_close(found[0]["image"][:, 1:-1], square[0]["image"].view(3, 14, 4, 56).mean(2)[:, 1:-1])
    with pytest.raises(ValueError, match="size must be a height and a width of at least 1"):
        make(files, size=(3, 0))
