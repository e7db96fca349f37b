"""The generated ImageNet: true formats, the same for a seed, and learnable."""

import hashlib
import json

import pytest
import torch
from PIL import Image

from parapos.data import FormatError, create_dataset
from parapos.data.images import read_image
from parapos.data.synthetic import LAYOUTS, pattern, write_imagenet


def digest(root):
    files = sorted(path for path in root.rglob("*") if path.is_file())
    text = b"".join(str(path.relative_to(root)).encode() + path.read_bytes() for path in files)
    return hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, tmp_path):
    wnids = write_imagenet(tmp_path, classes=11, train=9, test=2, layout=layout)
    assert wnids == sorted(wnids)
    base = tmp_path if layout == "folders" else tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    assert sorted(path.name for path in (base / "train").iterdir()) == wnids
    assert len(list((base / "train").rglob("*.JPEG"))) == 99
    assert len(list((base / "val").glob("*/*.JPEG" if layout == "folders" else "*.JPEG"))) == 22
    folders = [path.name for path in (tmp_path / "imagenetv2-matched-frequency-format-val").iterdir()]
    assert sorted(folders) == sorted(map(str, range(11)))
    assert sorted(path.name for path in (tmp_path / "imagenet-r").iterdir()) == wnids[::3]
    if layout == "json":
        assert json.loads((tmp_path / "imagenet_class_index.json").read_text())["3"][0] == wnids[3]
        assert len(json.loads((tmp_path / "ILSVRC2012_val_labels.json").read_text())) == 22
    if layout == "csv":
        head, first = (tmp_path / "LOC_val_solution.csv").read_text().splitlines()[:2]
        assert head == "ImageId,PredictionString"
        assert first.startswith("ILSVRC2012_val_00000001,n1")


def test_it_has_the_kinds_of_file_that_imagenet_has(tmp_path):
    wnids = write_imagenet(tmp_path, classes=1, train=8, test=1)
    kinds = set()
    for path in (tmp_path / "ILSVRC/Data/CLS-LOC/train" / wnids[0]).iterdir():
        with Image.open(path) as image:
            kinds.add((image.format, image.mode, image.getexif().get(0x0112)))
        assert read_image(path).shape == (3, 48, 64)
    modes = {("JPEG", mode, None) for mode in ("RGB", "L", "CMYK")}
    assert kinds == modes | {("PNG", "RGB", None), ("JPEG", "RGB", 6)}


def test_it_is_a_function_of_its_arguments(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_imagenet(tmp_path / name, classes=2, train=2, test=1, seed=seed)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_classes_can_be_told_apart(tmp_path):
    """The nearest class mean in colour is right far more often than by chance."""
    write_imagenet(tmp_path, classes=6, train=10, test=5)
    options = dict(root=tmp_path, size=32, complete=False)
    val, test = create_dataset("imagenet", "val", **options), create_dataset("imagenet", "test", **options)
    means = torch.stack([val[i]["image"].mean((1, 2)) for i in range(6)])
    hits = [
        int((means - s["image"].mean((1, 2))).norm(dim=1).argmin()) == s["label"]
        for s in map(test.__getitem__, range(30))
    ]
    assert sum(hits) > 15


def test_patterns_vary_within_a_class():
    g = torch.Generator().manual_seed(0)
    one, two = (pattern(3, 12, (20, 10), g) for _ in range(2))
    assert one.shape == (3, 10, 20)
    assert one.dtype == torch.uint8
    assert not torch.equal(one, two)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"layout": "tar"}, "layout must be one of json, csv, folders, got 'tar'"),
        ({"classes": 1001}, "1 to 1000 classes"),
        ({"train": 0}, "train=0"),
    ],
)
def test_bad_options(options, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        write_imagenet(tmp_path, **options)


def test_it_overwrites_nothing(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(FormatError, match="not empty"):
        write_imagenet(tmp_path)
