"""How the pictures of one file are written: one image, a video, or a strip through time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from . import Prediction
from .drawing import CELLS, make_strip

RATE = 25  # frames per second of a video with one frame, which tells none


class Album(ABC):
    """A context that takes predictions one by one. stem: path of what is written, without its suffix."""

    suffix = ".png"

    def __init__(self, stem: Path, title: str) -> None:
        self.path, self.title = stem.with_name(f"{stem.name}{self.suffix}"), title

    @property
    def paths(self) -> list[Path]:
        """All files that were written, `path` first."""
        return [self.path]

    @abstractmethod
    def add(self, prediction: Prediction) -> None: ...

    def close(self) -> None:
        """Ends what is written. Called once, also if reading the file failed after some frames."""
        return


class Picture(Album):
    def add(self, prediction: Prediction) -> None:
        prediction.draw().save(self.path)


class Video(Album):
    """MPEG-4 in AVI, as fast as the frames that were looked at."""

    suffix = ".avi"

    def __init__(self, stem: Path, title: str) -> None:
        super().__init__(stem, title)
        self._first: Prediction | None = None
        self._writer: Any = None

    def add(self, prediction: Prediction) -> None:
        if self._first is None:
            self._first = prediction
            return
        if self._writer is None:
            seconds = prediction.frame.about["seconds"] - self._first.frame.about["seconds"]
            self._open(round(1 / seconds) if seconds > 0 else RATE)
        self._writer.add(_even(prediction.draw()))

    def _open(self, rate: int) -> None:
        from ..data.readers.video import VideoWriter

        assert self._first is not None
        self._writer = VideoWriter(self.path, rate=max(1, min(rate, 240)))
        self._writer.add(_even(self._first.draw()))

    def close(self) -> None:
        if self._writer is None and self._first is not None:
            self._open(RATE)
        if self._writer is not None:
            self._writer.__exit__(None, None, None)


class Strip(Album):
    """All moments in rows; of many, CELLS that are evenly spaced."""

    def __init__(self, stem: Path, title: str) -> None:
        super().__init__(stem, title)
        self._cells: list[tuple[str, Callable[[], Image]]] = []

    def add(self, prediction: Prediction) -> None:
        about = prediction.frame.about
        end = f"{about['time_us'] / 1e6:.2f} s"
        name = f"{about['start_us'] / 1e6:.2f} to {end}" if "start_us" in about else end
        self._cells.append((name, prediction.draw))

    def close(self) -> None:
        count = len(self._cells)
        if count:
            shown = [self._cells[i * count // min(count, CELLS)] for i in range(min(count, CELLS))]
            told = f"{count} moments" if count <= CELLS else f"{CELLS} of {count} moments"
            make_strip([(name, draw()) for name, draw in shown], f"{self.title}: {told}").save(self.path)


ALBUMS: dict[str, type[Album]] = {"picture": Picture, "video": Video, "strip": Strip}


def register_album(name: str, cls: type[Album]) -> None:
    """Makes an album known to sources by a name. A name that is taken is an error."""
    if ALBUMS.get(name, cls) is not cls:
        raise ValueError(f"album {name!r} is taken by {ALBUMS[name].__qualname__}, expected a new name")
    ALBUMS[name] = cls


def _even(image: Image) -> Any:
    """(H, W, 3) with even sides, as videos must have: at most one row and column of pixels is cut off."""
    return np.array(image)[: image.height // 2 * 2, : image.width // 2 * 2]
