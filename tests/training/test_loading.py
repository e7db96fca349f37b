"""Files that cannot be read: the same line with and without workers, and the number of those that were skipped."""

import pytest
import torch
from torchvision.transforms import v2

from parapos import cli
from parapos.data.sampling import Key
from parapos.data.synthetic import pattern
from parapos.training import fit, recipe

SMALL = (
    *("--model.options.dim", "16", "--model.options.depth", "1", "--model.options.mlp_dim", "16"),
    *("--optim.epochs", "1", "--optim.batch", "8", "--optim.part", "8"),
)


@pytest.fixture
def root(tmp_path):
    """Two classes of 12, 2 and 2 images."""
    draw = torch.Generator().manual_seed(0)
    for split, each in (("train", 12), ("val", 2), ("test", 2)):
        for label in range(2):
            folder = tmp_path / "data" / split / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(each):
                v2.functional.to_pil_image(pattern(label, 2, (36, 40), draw)).save(folder / f"{i}.png")
    return tmp_path / "data"


def train(root, out, *more):
    return cli.main(["train", "demo_images", "--out", str(out), "--data.root", str(root), *SMALL, *more])


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("kind", ["corrupt", "missing"])
def test_a_file_that_cannot_be_read_is_one_line(workers, kind, root, tmp_path, capfd, monkeypatch):
    bad = root / "train" / "class1" / "7.png"
    if kind == "corrupt":
        bad.write_bytes(b"no image")
    else:
        from parapos.data import images

        real = images.open_images

        def gone(*args, **options):
            found = real(*args, **options)
            bad.unlink(missing_ok=True)
            return found

        monkeypatch.setattr(images, "open_images", gone)
    assert train(root, tmp_path / "run", "--data.workers", workers) == 2
    told = {
        "corrupt": "not an image, expected one of JPEG, PNG, WEBP, BMP, GIF",
        "missing": "No such file or directory",
    }
    assert capfd.readouterr().err == f"parapos train: {bad}: {told[kind]}\n"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_is_skipped_is_told(workers, root, tmp_path, capsys):
    for name in ("3", "7"):
        (root / "train" / "class1" / f"{name}.png").write_bytes(b"no image")
    more = ("--data.options.corrupt", "skip", "--data.workers", workers)
    assert train(root, tmp_path / "run", *more) == 0
    told = f"2 of 24 samples could not be read, the first is {root}/train/class1/3.png"
    assert capsys.readouterr().err.count(told) == 1
    assert cli.main(["eval", str(tmp_path / "run"), "--split", "train"]) == 2, "an evaluation counts every image"
    assert "train/class1/3.png: not an image" in capsys.readouterr().err


def test_the_training_split_is_judged_as_it_is(root, tmp_path, capsys):
    wanted = recipe.load("demo_images", {"data.root": str(root)})
    varied, judged = wanted.dataset("train"), wanted.judged("train")
    assert not torch.equal(varied[Key(0, 1)]["image"], varied[Key(0, 2)]["image"])
    assert torch.equal(judged[Key(0, 1)]["image"], judged[Key(0, 2)]["image"])
    (root / "test").rename(root / "kept")
    (root / "test").symlink_to(root / "train")
    assert torch.equal(judged[0]["image"], wanted.dataset("test")[0]["image"])
    assert varied.random, "the other is left alone"

    assert train(root, tmp_path / "run") == 0
    found = [fit.evaluate(tmp_path / "run", split=split) for split in ("train", "test")]
    assert found[0] == found[1]


def test_training_digits_are_judged_as_they_are():
    judged = recipe.load("digits").judged("train")
    assert torch.equal(judged[Key(3, 1)]["image"], judged[Key(3, 2)]["image"])


def test_other_numbers_of_classes_and_missing_roots_are_told(root, tmp_path, capsys):
    assert train(root, tmp_path / "run") == 0
    capsys.readouterr()
    (root / "train" / "class2").mkdir()
    assert cli.main(["eval", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == (
        "parapos eval: dataset images: has 3 classes, expected the model's 2; "
        "parapos eval --relabel names, or a TOML file of pairs, says which are the same\n"
    )
    assert cli.main(["train", "digits_smoke", "--out", str(tmp_path / "digits"), "--optim.epochs", "1"]) == 0
    capsys.readouterr()
    assert cli.main(["eval", str(tmp_path / "digits"), "--data", "imagenet"]) == 2
    assert capsys.readouterr().err == "parapos eval: data.root: missing, dataset imagenet needs it; give --root\n"
