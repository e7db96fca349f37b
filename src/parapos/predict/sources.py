"""How files become frames for a model, by what the model takes: images, clips of video, or tokens of events.

A source is made for a model and what its run knows of preprocessing. `read` gives a Medium: the frames of a file, which
are read when they are asked for, and the kind of album that their pictures go to.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..data import FormatError
from ..data.batch import collate
from . import Frame, PredictError

VIDEOS = (".avi", ".mp4", ".mov", ".mkv", ".webm", ".m4v")
RECORDINGS = (".dat", ".aedat")
EVERY = {"time": 6000.0, "age": 500.0}  # milliseconds between answers on a recording, by the clock of its tokens
FITS = ("crop", "stretch", "inside", "pad")
SHOWN_US = 100_000  # of events before a moment, in its picture


@dataclass(frozen=True)
class Medium:
    """The frames of one file, in order, and the name of the album for their pictures."""

    frames: Iterable[Frame]
    album: str = "picture"


class Source(ABC):
    """known: what a run keeps of how its samples were prepared. size and every: what the user asks for.

    suffixes: of files that are taken from a folder. ragged: entries of samples that are padded in a batch.
    """

    suffixes: ClassVar[tuple[str, ...]]
    ragged: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, model: nn.Module, known: Mapping[str, Any], *, size: int | tuple[int, int] | None, every: float | None
    ) -> None:
        self.known, self.every = known, every
        self.patch = getattr(model, "patch", 1)

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Samples to a batch."""
        return collate([dict(sample) for sample in samples], self.ragged)

    @abstractmethod
    def read(self, thing: Any) -> Medium:
        """The frames of a file or of a thing in memory. FormatError or OSError if it cannot be read, at once or while
        frames are taken."""


SOURCES: dict[tuple[str, ...], type[Source]] = {}


def register_source(inputs: tuple[str, ...], cls: type[Source]) -> None:
    """Makes a source known for models that take these inputs. Inputs that have one are an error."""
    if SOURCES.get(inputs, cls) is not cls:
        raise ValueError(f"inputs {', '.join(inputs)} have a source, {SOURCES[inputs].__qualname__}")
    SOURCES[inputs] = cls


def find_source(model: nn.Module) -> type[Source]:
    inputs = tuple(getattr(model, "inputs", ("image",)))
    if inputs not in SOURCES:
        known = "; ".join(", ".join(names) for names in SOURCES)
        told = f"{type(model).__name__} takes {', '.join(inputs)}, and no source gives these; known are {known}"
        raise PredictError(f"{told}. Register one with parapos.predict.sources.register_source")
    return SOURCES[inputs]


class ImageFiles(Source):
    """Images, prepared as the evaluation of the run prepares them, and videos frame by frame.

    known["fit"] says how an image gets the size: "crop" resizes it to cover size / crop and cuts out the centre,
    "stretch" resizes both sides, "inside" resizes it to fit into the size, "pad" also fills up at the right and below.
    Without it, "crop" if known has a crop, else "stretch". mean and scale are those of pixels in [0, 1].
    """

    suffixes = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", *VIDEOS)

    @property
    def multiple(self) -> int:
        """What the sides of an image must be a multiple of."""
        return self.patch

    def __init__(
        self, model: nn.Module, known: Mapping[str, Any], *, size: int | tuple[int, int] | None, every: float | None
    ) -> None:
        super().__init__(model, known, size=size, every=every)
        self.height, self.width = _sides(size if size is not None else known.get("size") or 0)
        if any(side < 1 or side % self.multiple for side in (self.height, self.width)):
            told = f"{self.height} x {self.width}"
            raise PredictError(f"size must be a multiple of the model's patch size {self.multiple}, got {told}")
        self.fit = known.get("fit", "crop" if "crop" in known else "stretch")
        if self.fit not in FITS:
            raise PredictError(f"the run says fit = {self.fit!r}, expected one of {', '.join(FITS)}")
        self.mean, self.scale = (_channels(known.get(name, value)) for name, value in (("mean", 0), ("scale", 1)))

    def read(self, thing: Any) -> Medium:
        if isinstance(thing, str | os.PathLike):
            path = Path(thing)
            if path.suffix.lower() in VIDEOS:
                return Medium(self._video(path), "video")
            from ..data.images import read_image

            return Medium([self.frame(read_image(path, upright=self.known.get("upright", True)))])
        return Medium([self.frame(_to_tensor(thing))])

    def frame(self, picture: Tensor, **about: Any) -> Frame:
        """uint8 (3, H, W) as the model takes it, and the way back."""
        image, zoom, shift = self._fitted(picture)
        image = (image.float() / 255 - self.mean) / self.scale
        return Frame({"image": image, "id": 0}, picture, about, zoom, shift)

    def _fitted(self, picture: Tensor) -> tuple[Tensor, tuple[float, float], tuple[float, float]]:
        from torchvision.transforms import v2  # type: ignore[import-untyped]

        from ..data.augment.boxes import pad
        from ..data.clips import resize
        from ..data.transforms import ResizeShorter

        (height, width), (tall, wide) = picture.shape[1:], (self.height, self.width)
        if self.fit == "stretch":
            return resize(picture, tall, wide), (width / wide, height / tall), (0.0, 0.0)
        if self.fit in ("inside", "pad"):
            factor = min(tall / height, wide / width)
            rows, cols = max(1, round(height * factor)), max(1, round(width * factor))
            image = resize(picture, rows, cols)
            if self.fit == "pad":
                image = pad(image, (tall, wide))
            return image, (width / cols, height / rows), (0.0, 0.0)
        crop = self.known.get("crop", 1.0)
        image = ResizeShorter(int(tall / crop), int(wide / crop))(picture)
        zoom = width / image.shape[2], height / image.shape[1]
        left, top = round((image.shape[2] - wide) / 2), round((image.shape[1] - tall) / 2)
        return v2.functional.center_crop(image, [tall, wide]), zoom, (zoom[0] * left, zoom[1] * top)

    def _video(self, path: Path) -> Iterator[Frame]:
        from ..data.readers.video import stream_frames

        due = 0.0
        for number, (seconds, image) in enumerate(stream_frames(path)):
            if self.every is None or seconds * 1000 >= due - 1e-6:
                due += self.every or 0.0
                yield self.frame(torch.from_numpy(image).permute(2, 0, 1), frame=number, seconds=round(seconds, 6))


class MaskedImages(ImageFiles):
    """Images of any size, for models that pad them and take a mask of the patches that hold pixels."""

    @property
    def multiple(self) -> int:
        return 1

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        from ..models.detector import pad_images

        image, mask = pad_images([sample["image"] for sample in samples], self.patch)
        return {"image": image, "mask": mask}


class VideoClips(Source):
    """Videos as one clip each: the tubelets that the run was trained on. The picture has their first frames."""

    suffixes = VIDEOS

    def __init__(
        self, model: nn.Module, known: Mapping[str, Any], *, size: int | tuple[int, int] | None, every: float | None
    ) -> None:
        super().__init__(model, known, size=size, every=every)
        if every is not None:
            raise PredictError("every has no effect: this model answers once for a whole clip")
        given: tuple[Any, Any] = (known.get("height"), known.get("width")) if size is None else _sides(size)
        if not all(type(side) is int and side > 0 and side % self.patch == 0 for side in given):
            told = f"multiples of the model's patch size {self.patch} as height and width, got {given[0]} x {given[1]}"
            raise PredictError(f"size: expected {told}; give --size HEIGHTxWIDTH")
        self.height, self.width = given

    def read(self, thing: Any) -> Medium:
        from ..data.clips import TUBELET, TUBELETS, read_clip, resize, scale_pixels

        frames, problem = read_clip(_path(thing), self.known.get("spacing", "starts"))
        resized = resize(frames, self.height, self.width)
        video = torch.zeros(3, TUBELET * TUBELETS, self.height, self.width)
        video[:, : len(frames)] = scale_pixels(resized, self.known.get("pixel_scale", "raw255")).transpose(0, 1)
        sample = {"video": video, "tubelets": len(frames) // TUBELET, "id": 0}
        about = {"problem": problem} if problem else {}
        return Medium([Frame(sample, torch.cat(list(frames[::TUBELET]), dim=2), about)])


class Recordings(Source):
    """Event recordings, answered at several moments. Tokens are made as in training.

    With the clock "age", a moment looks back at the last events before it; with "time", a recording is cut into pieces
    of `every` milliseconds, and each is a sample of its own.
    """

    suffixes = RECORDINGS
    ragged = ("codes", "x", "y", "t")

    def __init__(
        self, model: nn.Module, known: Mapping[str, Any], *, size: int | tuple[int, int] | None, every: float | None
    ) -> None:
        super().__init__(model, known, size=size, every=every)
        from ..data.event_tokens import Tokenizing

        if size is not None:
            raise PredictError("size has no effect: events are taken at the pixels of their sensor")
        names = [f.name for f in fields(Tokenizing)]
        missing = [name for name in (*names, "clock") if name not in known]
        if missing:
            told = f"the run does not say {', '.join(missing)} of its events"
            raise PredictError(f"{told}: it was trained by an older version, train it again")
        self.tokenizing = Tokenizing(**{name: known[name] for name in names})
        self.clock, self.last = known["clock"], known.get("last")
        self.step = round(1000 * (every or EVERY[self.clock]))

    def read(self, thing: Any) -> Medium:
        from ..data.events import clean

        path, truncated = _path(thing), self.known.get("truncated", "error")
        if path.suffix.lower() == ".aedat":
            from ..data.readers import aedat

            events = aedat.read(path, truncated=truncated)
        else:
            from ..data.readers import dat

            events = dat.read(path, truncated=truncated)
        events = clean(events, self.tokenizing.width, self.tokenizing.height)
        if not len(events):
            raise FormatError(f"{path}: no events on the sensor, expected some")
        if self.known.get("unique"):
            rows = np.stack([events.t, events.x, events.y, events.polarity])
            events = events.select(np.sort(np.unique(rows, axis=1, return_index=True)[1]))
        return Medium(self._frames(events), "strip")

    def _frames(self, events: Any) -> Iterator[Frame]:
        from ..data.event_tokens import tensors
        from ..data.events import Events

        width, height = self.tokenizing.width, self.tokenizing.height
        first, end = int(events.t[0]), int(events.t[-1])
        begin = first if self.clock == "time" else first // self.step * self.step  # ages are asked for at full steps
        for start in range(begin, max(end, begin + 1) + (self.clock == "time"), self.step):
            moment = min(start + self.step, end + 1) - 1 if self.clock == "time" else start + self.step
            lower, upper = np.searchsorted(events.t, [start, moment + 1])
            if self.clock == "age":
                lower = max(0, int(upper) - self.last) if self.last else 0
            part = events.select(slice(int(lower), int(upper)))
            origin = 0 if self.clock == "time" else moment
            given = Events(part.t - start, part.x, part.y, part.polarity) if self.clock == "time" else part
            tokens = self.tokenizing(given)
            sample = {**tensors(tokens, self.clock, origin=origin), "id": 0}
            shown = part if self.clock == "time" else part.select(part.t > moment - SHOWN_US)
            about = {"start_us": start, "time_us": moment} if self.clock == "time" else {"time_us": moment}
            yield Frame(sample, paint_events(shown, height, width), {**about, "tokens": len(tokens)})


ON, OFF = (213, 46, 0), (0, 84, 179)  # colours of events that got brighter and darker


def paint_events(events: Any, height: int, width: int) -> Tensor:
    """uint8 (3, H, W): white where nothing happens, the more events the darker; ON is red, OFF is blue."""
    counts = np.zeros((2, height, width))
    np.add.at(counts, (events.polarity.astype(np.int64), events.y.astype(np.int64), events.x.astype(np.int64)), 1)
    strength = np.log1p(counts) / np.log1p(max(2.0, float(counts.max())))
    ink = sum(strength[i][None] * (255 - np.array(colour)[:, None, None]) for i, colour in enumerate((OFF, ON)))
    return torch.from_numpy((255 - ink).clip(0, 255).astype(np.uint8))


def _sides(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _channels(value: Any) -> Tensor:
    """(3, 1, 1) or (1, 1, 1) of a number or three."""
    return torch.as_tensor(value, dtype=torch.float32).reshape(-1, 1, 1)


def _path(thing: Any) -> Path:
    if not isinstance(thing, str | os.PathLike):
        raise PredictError(f"expected the path of a file, got {type(thing).__name__}")
    return Path(thing)


def _to_tensor(thing: Any) -> Tensor:
    """uint8 (3, H, W) of a PIL image, an array (H, W), (H, W, 3) or a tensor (3, H, W) of bytes."""
    if hasattr(thing, "convert"):
        thing = np.array(thing.convert("RGB"))
    if isinstance(thing, np.ndarray):
        thing = torch.from_numpy(np.ascontiguousarray(thing))
        thing = thing.expand(3, -1, -1) if thing.ndim == 2 else thing.movedim(-1, 0)
    if not isinstance(thing, Tensor) or thing.dtype != torch.uint8 or thing.ndim != 3 or thing.shape[0] != 3:
        got = f"{thing.dtype} {tuple(thing.shape)}" if isinstance(thing, Tensor) else type(thing).__name__
        expected = "a path, a PIL image, an array (H, W, 3) or a tensor (3, H, W) of bytes"
        raise PredictError(f"expected {expected}, got {got}")
    return thing


SOURCES[("image",)] = ImageFiles
SOURCES[("image", "mask")] = MaskedImages
SOURCES[("video", "tubelets")] = VideoClips
SOURCES[("codes", "x", "y", "t", "length")] = Recordings
