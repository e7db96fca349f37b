"""Image files as training samples: robust decoding, and datasets that are lists of files with labels."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor, nn
from torchvision.transforms import v2  # type: ignore[import-untyped]

from . import FormatError
from .sampling import Key, sample_seed
from .transforms import CROP, MEAN, STD, Augment, Size, eval_transform, train_transform

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif")
MAX_BYTES = 256 * 1024**2  # of a file
MAX_PIXELS = 256 * 1024**2 // 3  # of an image: 256 MiB of RGB
MAX_IN_A_ROW = 100  # unreadable files, before something larger is wrong
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes, name: str = "image", *, upright: bool = True) -> Tensor:
    """RGB uint8 (3, H, W) of an encoded image; the content tells the format, not the name.

    Grey, palette and CMYK become RGB, 16 bits become the upper 8, transparency is laid over white, an animation gives
    its first frame. upright turns the image as its EXIF orientation says; an unreadable or invalid one says nothing.
    Whatever cannot be read, and images of more than MAX_PIXELS, raise FormatError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata is no reason to speak
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise FormatError(f"{name}: {width} x {height} pixels, expected at most {MAX_PIXELS} in all")
                image.load()
                turn = _TURNS.get(_orientation(image)) if upright else None
                return _to_rgb(image.transpose(turn) if turn is not None else image)
    except FormatError:
        raise
    except UnidentifiedImageError:
        raise FormatError(f"{name}: not an image, expected one of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders of broken files raise whatever they stumble over
        raise FormatError(f"{name}: cannot be decoded: {type(error).__name__}: {error}") from error


def read_image(path: str | Path, *, upright: bool = True) -> Tensor:
    """`decode_image` of a file. A file that is not there is an OSError, as everywhere."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise FormatError(f"{path}: {size} bytes, expected at most {MAX_BYTES}")
        return decode_image(file.read(), str(path), upright=upright)


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # the block of metadata is broken, the picture need not be
        return None


def _to_rgb(image: Image.Image) -> Tensor:
    if image.mode.startswith("I"):  # 16-bit grey
        grey = v2.functional.pil_to_tensor(image.convert("I")) >> 8
        return grey.clamp(0, 255).to(torch.uint8).repeat(3, 1, 1)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGB", layer.size, "white")
        image.paste(layer, mask=layer)
    return v2.functional.pil_to_tensor(image if image.mode == "RGB" else image.convert("RGB"))


class Strings(Sequence[str]):
    """Many strings in one block of memory, which worker processes share instead of copying object by object."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [os.fsencode(string) for string in strings]
        self._text = b"".join(encoded)
        self._ends = torch.tensor([0, *map(len, encoded)]).cumsum(0)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        if isinstance(index, range):
            return [self[i] for i in index]
        start, end = self._ends[index : index + 2].tolist()
        return os.fsdecode(self._text[start:end])

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))


class Images:
    """Image files below a folder, with labels. An index in an epoch gives {"image", "label", "id"}.

    random says that the transform is; it then draws from (seed, epoch, index) alone. corrupt: "error" raises the
    FormatError of an unreadable file, "skip" takes the next readable one in its place and notes it in `skipped`,
    which is shared by all workers. subset: the classes that occur, if the benchmark also asks for answers among them.
    judged: the transform of evaluation, if another.
    """

    class_names: Sequence[str] | None = None
    preprocessing: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        root: str | Path,
        files: Iterable[str],
        labels: Iterable[int],
        *,
        classes: int,
        transform: nn.Module,
        random: bool = False,
        seed: int = 0,
        upright: bool = True,
        corrupt: str = "error",
        subset: Sequence[int] | None = None,
        judged: nn.Module | None = None,
    ) -> None:
        if corrupt not in ("error", "skip"):
            raise ValueError(f"corrupt must be 'error' or 'skip', got {corrupt!r}")
        if corrupt == "skip" and not random:
            raise ValueError("corrupt='skip' is for training; an evaluation counts every image once")
        self.root, self.files, self.labels = Path(root), Strings(files), torch.tensor(list(labels), dtype=torch.int32)
        if len(self.files) != len(self.labels):
            raise ValueError(f"labels must be one per file, got {len(self.labels)} for {len(self.files)} files")
        if len(self.files) == 0:
            raise FormatError(f"{root}: no images, expected files ending in {', '.join(SUFFIXES)}")
        if self.labels.min() < 0 or self.labels.max() >= classes:
            bad = self.labels.min() if self.labels.min() < 0 else self.labels.max()
            raise ValueError(f"labels must be from 0 to {classes - 1}, got {int(bad)}")
        self.classes, self.transform, self.random, self.seed = classes, transform, random, seed
        self.upright, self.corrupt, self.subset, self.judged = upright, corrupt, subset, judged or transform
        self.skipped = torch.zeros(len(self.files), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.files)

    def as_judged(self) -> Images:
        """The same images as an evaluation sees them: each once, not varied."""
        other = copy(self)
        other.transform, other.random, other.corrupt = self.judged, False, "error"
        return other

    def path(self, index: int) -> Path:
        return self.root / self.files[index]

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        index, epoch = key if isinstance(key, Key) else (key, 0)
        index = range(len(self))[index]
        for _ in range(min(MAX_IN_A_ROW, len(self))):
            try:
                return {"image": self._image(index, epoch), "label": int(self.labels[index]), "id": index}
            except FormatError:
                if self.corrupt == "error":
                    raise
                self.skipped[index] = True
                index = (index + 1) % len(self)
        raise FormatError(f"{self.path(index)}: this and the images before it cannot be read, none of many in a row")

    def _image(self, index: int, epoch: int) -> Tensor:
        path = self.path(index)
        image = read_image(path, upright=self.upright)
        try:
            if not self.random:
                return self.transform(image)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(sample_seed(self.seed, epoch, index))
                return self.transform(image)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None


def is_image(name: str) -> bool:
    """By its name: not hidden, and with a suffix of an image."""
    return not name.startswith(".") and name.lower().endswith(SUFFIXES)


def list_folders(root: Path) -> list[str]:
    """Names of the folders in a folder, sorted; hidden ones are left out."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def list_images(root: Path) -> list[str]:
    """Names of the image files in a folder, sorted."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if is_image(entry.name) and entry.is_file())


@dataclass(frozen=True)
class Listing:
    """Files below a folder in their order, the class of each, the number of classes, and names of classes."""

    root: Path
    classes: int
    files: list[str] = field(repr=False)
    labels: list[int] = field(repr=False)
    names: Sequence[str] | None = field(default=None, repr=False)


def list_classes(root: Path, rank: Mapping[str, int], classes: int, names: Sequence[str] | None = None) -> Listing:
    """root/<name>/<image>, sorted by name, then by image. rank: the class of every name that may occur. names: of all
    classes."""
    files: list[str] = []
    labels: list[int] = []
    for name in list_folders(root):
        if name not in rank:
            raise FormatError(f"{root / name}: not a class of the {len(rank)} known")
        found = [f"{name}/{file}" for file in list_images(root / name)]
        files += found
        labels += [rank[name]] * len(found)
    return Listing(root, classes, files, labels, names)


def open_images(
    read: Callable[[], Listing],
    split: str,
    size: Size,
    *,
    seed: int = 0,
    augment: Augment | None = None,
    crop: float = CROP,
    normalize: bool = False,
    upright: bool = True,
    corrupt: str = "error",
    subset: bool = False,
) -> Images:
    """The images of a listing as a split; it is read after all options are checked.

    augment is for "train", which is random, and crop for the others. corrupt="skip" holds for "train", which alone may
    replace an image. subset=True: the benchmark also asks for answers among the classes that occur.
    """
    random = split == "train"
    judged = eval_transform(size, crop=crop, normalize=normalize)
    transform = train_transform(size, augment, normalize=normalize) if random else judged
    listing = read()
    images = Images(
        listing.root,
        listing.files,
        listing.labels,
        classes=listing.classes,
        transform=transform,
        random=random,
        seed=seed,
        upright=upright,
        corrupt=corrupt if random else "error",
        subset=sorted(set(listing.labels)) if subset else None,
        judged=judged,
    )
    images.class_names = listing.names
    mean, scale = (MEAN, STD) if normalize else ([0.0] * 3, [1.0] * 3)
    images.preprocessing = {"crop": crop, "mean": list(mean), "scale": list(scale)}
    return images


def image_folder(
    split: str,
    *,
    root: str | Path,
    size: Size = 224,
    seed: int = 0,
    augment: Augment | None = None,
    crop: float = CROP,
    normalize: bool = False,
    upright: bool = True,
    corrupt: str = "error",
) -> Images:
    """root/<split>/<class>/<image>. The classes are the folders of root/train, in sorted order, for every split. Other
    options are those of `open_images`."""
    root = Path(root)

    def read() -> Listing:
        for folder in (root / "train", root / split):
            if not folder.is_dir():
                flat = root.is_dir() and any(list_images(root / name) for name in list_folders(root))
                hint = (
                    f"; {root} is a flat folder of classes, which `parapos demo --data {root}` splits" if flat else ""
                )
                told = f"expected root/train/<class>/<image> and root/{split}"
                raise FormatError(f"{folder}: no such folder, {told}{hint}")
        names = list_folders(root / "train")
        return list_classes(root / split, {name: i for i, name in enumerate(names)}, len(names), names)

    return open_images(
        read,
        split,
        size,
        seed=seed,
        augment=augment,
        crop=crop,
        normalize=normalize,
        upright=upright,
        corrupt=corrupt,
    )
