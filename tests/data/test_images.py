"""Every kind of image file gives RGB or a FormatError that names it; a dataset of files is a function of its keys."""

import io
import os
import pickle
import random
import struct
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from parapos.data import FormatError, create_dataset, images, list_datasets
from parapos.data.images import Images, Strings, decode_image, read_image
from parapos.data.sampling import Key
from parapos.data.transforms import eval_transform, train_transform

from .readers.fuzz import peak_below

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
PHOTOS = sorted((SHARED / "samples" / "imagenet_1k_photos").glob("*.JPEG"))


def encode(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.fixture
def picture():
    """RGB, wider than high, different in every corner."""
    tensor = torch.randint(0, 256, (3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    return tensor, v2.functional.to_pil_image(tensor)


def test_rgb_is_exact(picture):
    tensor, image = picture
    for kind, options in (("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})):
        got = decode_image(encode(image, kind, **options))
        assert got.dtype == torch.uint8
        assert torch.equal(got, tensor), kind


def test_grey_and_bilevel_become_rgb():
    grey = Image.frombytes("L", (4, 2), bytes(range(0, 240, 30)))
    got = decode_image(encode(grey))
    assert got.shape == (3, 2, 4)
    assert got[0].flatten().tolist() == list(range(0, 240, 30))
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])
    assert decode_image(encode(grey.convert("1"))).unique().tolist() == [0, 255]


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 128, 255), (20, 200, 90)])
def test_cmyk_becomes_rgb(colour):
    data = encode(Image.new("RGB", (16, 16), colour).convert("CMYK"), "JPEG", quality=100)
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    got = decode_image(data).to(torch.int)
    assert (got - torch.tensor(colour)[:, None, None]).abs().max() <= 3  # what JPEG itself loses


def test_palette(picture):
    _, image = picture
    data = encode(image.quantize(16))
    assert Image.open(io.BytesIO(data)).mode == "P"
    assert torch.equal(decode_image(data), v2.functional.pil_to_tensor(image.quantize(16).convert("RGB")))


def test_transparency_shows_white():
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 100, 200, 255))
    assert decode_image(encode(image))[:, 0].T.tolist() == [[255, 255, 255], [0, 100, 200]]
    assert decode_image(encode(image.convert("LA")))[:, 0, 0].tolist() == [255] * 3
    half = decode_image(encode(Image.new("RGBA", (1, 1), (200, 0, 0, 51))))  # a fifth
    assert half.flatten().tolist() == [244, 204, 204]
    flat = Image.new("P", (2, 1), 0)
    flat.putpalette([10, 20, 30, 40, 50, 60])
    flat.putpixel((1, 0), 1)
    assert decode_image(encode(flat, transparency=0))[:, 0].T.tolist() == [[255, 255, 255], [40, 50, 60]]


def test_sixteen_bits_keep_the_upper_eight():
    values = [0, 255, 256, 32768, 65279, 65535]
    image = Image.frombytes("I;16", (6, 1), struct.pack("<6H", *values))
    got = decode_image(encode(image))
    assert got.shape == (3, 1, 6)
    assert got[1, 0].tolist() == [v >> 8 for v in values]


def test_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (3, 2), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(data)[:, 0, 0].tolist() == [255, 0, 0]


TURNED = {  # how a camera that stores this orientation has turned the upright picture
    1: lambda t: t,
    2: lambda t: t.flip(2),
    3: lambda t: t.flip(1, 2),
    4: lambda t: t.flip(1),
    5: lambda t: t.transpose(1, 2),
    6: lambda t: t.rot90(1, (1, 2)),
    7: lambda t: t.rot90(2, (1, 2)).transpose(1, 2),
    8: lambda t: t.rot90(-1, (1, 2)),
}


@pytest.mark.parametrize("orientation", [*TURNED, 0, 9])
def test_exif_orientation(orientation, picture):
    tensor, _ = picture
    stored = TURNED.get(orientation, lambda t: t)(tensor).contiguous()
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(v2.functional.to_pil_image(stored), exif=exif)
    assert torch.equal(decode_image(data), tensor)
    assert torch.equal(decode_image(data, upright=False), stored)


def test_broken_metadata_is_no_reason_to_fail(picture):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = bytearray(encode(picture[1], "JPEG", exif=exif))
    start = data.index(b"Exif\0\0") + 6
    data[start : start + 8] = b"\xff" * 8
    assert decode_image(bytes(data)).shape == (3, 5, 7)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "not an image, expected one of JPEG, PNG"),
        (b"<html>404</html>", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (b"\xff\xd8\xff\xe0", "cannot be decoded|not an image"),
    ],
)
def test_what_is_no_image_is_named(data, told, tmp_path):
    (tmp_path / "bad.JPEG").write_bytes(data)
    with pytest.raises(FormatError, match=rf"bad\.JPEG: ({told})"):
        read_image(tmp_path / "bad.JPEG")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_truncated_files_are_named(kind, tmp_path):
    noise = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)
    data = encode(v2.functional.to_pil_image(noise), kind)
    (tmp_path / "cut.JPEG").write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError, match=r"cut\.JPEG: cannot be decoded"):
        read_image(tmp_path / "cut.JPEG")


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "none.JPEG")


def bomb(width, height):
    """A PNG of a few bytes that claims a size."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [9460, 12000, 60000])
def test_bombs_are_refused_before_they_are_decoded(side):
    assert side * side > images.MAX_PIXELS
    with peak_below(50_000), pytest.raises(FormatError, match=r"x\.png: .*(pixels|exceeds limit)"):
        decode_image(bomb(side, side), "x.png")


def test_huge_files_are_refused(tmp_path, monkeypatch, picture):
    (tmp_path / "big.png").write_bytes(encode(picture[1]))
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    with pytest.raises(FormatError, match=r"big\.png: \d+ bytes, expected at most 10"):
        read_image(tmp_path / "big.png")


def seeds():
    tensor = torch.randint(0, 256, (3, 16, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    image = v2.functional.to_pil_image(tensor)
    exif = Image.Exif()
    exif[0x0112] = 6
    yield encode(image, "JPEG", exif=exif)
    yield encode(image, "JPEG", progressive=True)
    yield encode(image.convert("CMYK"), "JPEG")
    yield encode(image)
    yield encode(image.quantize(8), transparency=3, exif=exif)
    yield encode(Image.frombytes("I;16", (24, 8), bytes(range(192)) * 2))


def mutate(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + 1] = bytes([data[at] ^ (1 << rng.randrange(8))]) if at < len(data) else b""
            case 2:
                data[at : at + 4] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"))
            case 3:
                del data[at : at + rng.randrange(1, 64)]
            case 4:
                data[at:at] = data[at : at + rng.randrange(1, 64)]
            case 5:
                if rng.random() < 0.3:
                    del data[at:]
    return bytes(data)


def repair(data):
    """Right checksums in a PNG, so that mutations get past them."""
    out, at = bytearray(data), 8
    while at + 12 <= len(out):
        (size,) = struct.unpack_from(">I", out, at)
        if at + 12 + size > len(out):
            break
        struct.pack_into(">I", out, at + 8 + size, zlib.crc32(out[at + 4 : at + 8 + size]))
        at += 12 + size
    return bytes(out)


def test_mutated_files_give_an_image_or_a_format_error(monkeypatch, tenths):
    monkeypatch.setattr(images, "MAX_PIXELS", 2**20)
    rng, good, bad = random.Random(0), 0, 0
    with peak_below(200_000):
        for seed in seeds():
            for i in range(70 * tenths):
                data = mutate(seed, rng)
                data = repair(data) if i % 2 and seed.startswith(b"\x89PNG") else data
                try:
                    image = decode_image(data, "fuzz")
                except FormatError as error:
                    bad += str(error).startswith("fuzz: ")
                else:
                    assert image.dtype == torch.uint8
                    assert image.shape[0] == 3
                    assert 0 < image[0].numel() <= 2**20
                    good += 1
        assert good > 50 * tenths
        assert bad > 50 * tenths
        assert good + bad == 70 * tenths * len(list(seeds()))


@pytest.mark.skipif(not PHOTOS, reason="no sample photos here")
def test_real_photos():
    assert len(PHOTOS) == 97
    small, large = eval_transform(224), eval_transform(1024)
    turned = {}
    for path in PHOTOS:
        image = read_image(path)
        assert min(image.shape[1:]) >= 106
        out = small(image)
        assert out.shape == (3, 224, 224)
        assert 0 <= out.min() < out.max() <= 1
        assert large(image).shape == (3, 1024, 1024)
        if not torch.equal(image, read_image(path, upright=False)):
            turned[path.name] = image.shape
    assert list(turned) == ["n02951585_can_opener.JPEG"]


# Datasets of files


def test_strings():
    names = ["a", "", "b/ü.png", "\udcff.jpg", "c" * 300]
    strings = Strings(names)
    assert list(strings) == names
    assert len(strings) == 5
    assert strings[-1] == names[-1]
    assert strings[1:4] == names[1:4]
    with pytest.raises(IndexError):
        strings[5]
    assert list(pickle.loads(pickle.dumps(strings))) == names


@pytest.fixture
def tree(tmp_path):
    """Two classes, 6 images in train, 2 in val; a hidden file and a text that are none."""
    for split, count in (("train", 3), ("val", 1)):
        for name in ("b", "a"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                noise = torch.randint(0, 256, (3, 30, 40), dtype=torch.uint8)
                v2.functional.to_pil_image(noise).save(folder / f"{i}.PNG")
            (folder / "._0.PNG").write_bytes(b"x")
            (folder / "notes.txt").write_bytes(b"x")
    return tmp_path


def test_folder_of_images(tree):
    train = create_dataset("images", "train", root=tree, size=16)
    assert (len(train), train.classes) == (6, 2)
    assert [train[i]["label"] for i in range(6)] == [0, 0, 0, 1, 1, 1]
    sample = train[Key(4, 2)]
    assert sample.keys() == {"image", "label", "id"}
    assert (sample["id"], type(sample["id"]), type(sample["label"])) == (4, int, int)
    assert sample["image"].shape == (3, 16, 16)
    assert sample["image"].dtype == torch.float32
    val = create_dataset("images", "val", root=tree, size=16)
    image = eval_transform(16)(read_image(tree / "val" / "b" / "0.PNG"))
    assert torch.equal(val[1]["image"], image)
    assert torch.equal(val[Key(1, 7)]["image"], image)
    (tree / "val" / "c").mkdir()
    with pytest.raises(FormatError, match=r"val/c: not a class of"):
        create_dataset("images", "val", root=tree)
    with pytest.raises(FormatError, match=r"test: no such folder"):
        create_dataset("images", "test", root=tree)


def test_a_sample_is_a_function_of_seed_epoch_and_index(tree):
    def draw(key, seed=1):
        return create_dataset("images", "train", root=tree, size=16, seed=seed)[key]["image"]

    dataset = create_dataset("images", "train", root=tree, size=16, seed=1)
    first = draw(Key(3, 5))
    torch.manual_seed(99)
    random.seed(99)
    state = torch.get_rng_state()
    for key in (0, Key(5, 5), Key(3, 4)):
        dataset[key]
    assert torch.equal(dataset[Key(3, 5)]["image"], first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(draw(Key(3, 6)), first)
    assert not torch.equal(draw(Key(3, 5), seed=2), first)
    assert torch.equal(draw(3), draw(Key(3, 0)))


def test_workers_change_nothing(tree):
    dataset = create_dataset("images", "train", root=tree, size=16)
    keys = [Key(i, 1) for i in (5, 2, 0, 4, 1, 3)]
    got = [batch for workers in (0, 2) for batch in DataLoader(dataset, sampler=keys, num_workers=workers)]
    for alone, shared in zip(got[:6], got[6:], strict=True):
        assert torch.equal(alone["image"], shared["image"])
        assert alone["id"] == shared["id"]


def test_corrupt_files_are_errors_or_skipped_and_counted(tree):
    (tree / "train" / "a" / "1.PNG").write_bytes(b"broken")
    with pytest.raises(FormatError, match=r"a/1\.PNG: not an image"):
        create_dataset("images", "train", root=tree, size=16)[1]
    dataset = create_dataset("images", "train", root=tree, size=16, corrupt="skip")
    assert dataset[1]["id"] == 2
    assert torch.equal(dataset[1]["image"], dataset[2]["image"])
    dataset.skipped.zero_()
    ids = [int(batch["id"]) for batch in DataLoader(dataset, num_workers=2)]
    assert ids == [0, 2, 2, 3, 4, 5]
    assert dataset.skipped.nonzero().flatten().tolist() == [1]
    for path in (tree / "train").rglob("*.PNG"):
        path.write_bytes(b"")
    with pytest.raises(FormatError, match="in a row"):
        dataset[0]


def test_an_evaluation_never_skips(tree):
    (tree / "val" / "a" / "0.PNG").write_bytes(b"broken")
    with pytest.raises(FormatError, match=r"a/0\.PNG"):
        create_dataset("images", "val", root=tree, size=16, corrupt="skip")[0]
    with pytest.raises(ValueError, match="counts every image once"):
        Images(tree, ["a"], [0], classes=1, transform=eval_transform(8), corrupt="skip")


def test_extreme_shapes_are_refused_by_name(tmp_path):
    Image.new("L", (200_000, 1)).save(tmp_path / "line.png")
    line = Images(tmp_path, ["line.png"], [0], classes=1, transform=eval_transform(224))
    with pytest.raises(FormatError, match=r"line\.png: image of 200000 x 1 would become 51200000 x 256"):
        line[0]
    train = Images(tmp_path, ["line.png"], [0], classes=1, transform=train_transform(32), random=True)
    assert train[0]["image"].shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"files": []}, "no images, expected files ending in"),
        ({"labels": [0]}, "one per file, got 1 for 2"),
        ({"labels": [0, 2]}, "from 0 to 1, got 2"),
        ({"labels": [-1, 0]}, "from 0 to 1, got -1"),
        ({"corrupt": "hide"}, "'error' or 'skip', got 'hide'"),
    ],
)
def test_bad_lists(change, told):
    options = dict(files=["a.png", "b.png"], labels=[0, 1], classes=2, transform=eval_transform(8))
    if "files" in change:
        options["labels"] = []
    with pytest.raises(ValueError, match=told):
        Images("root", **{**options, **change})


def test_registry():
    assert {"imagenet", "imagenet_v2", "imagenet_r", "images", "digits"} <= set(list_datasets())
    with pytest.raises(ValueError, match=r"unknown dataset 'imagnet'.*did you mean 'imagenet'"):
        create_dataset("imagnet", "train")
    with pytest.raises(ValueError, match=r"dataset images has no option 'sise'.*did you mean 'size'"):
        create_dataset("images", "train", root=".", sise=3)


def test_folders_of_images_at_sizes_that_are_not_square(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.new("RGB", (40, 30), (0, 128, 255)).save(tmp_path / split / "a" / "x.png")
    for split in ("train", "val"):
        found = create_dataset("images", split, root=tmp_path, size=[24, 32])
        assert found[0]["image"].shape == found.as_judged()[0]["image"].shape == (3, 24, 32)
