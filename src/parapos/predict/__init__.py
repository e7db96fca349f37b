"""A run applied to your own files: `load(run)(image)` in Python, `parapos predict` on the command line.

    predictor = parapos.predict.load("runs/digits")
    found = predictor("digit.png")          # a path, a PIL image, an array (H, W, 3) or a tensor (3, H, W) of bytes
    found.answers                           # [{"class": 3, "name": "3", "score": 0.98}, ...], the best first
    found.draw().save("answer.png")

Three small registries hold what differs between runs, so that a new modality or task needs no change here:
    sources.SOURCES   by the inputs of a model: how a file becomes samples, each with a picture
    views.VIEWS       by the name of a task: how outputs become answers, and how answers are drawn
    albums.ALBUMS     how the pictures of one file are written: an image, a video, a strip through time
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from PIL.Image import Image

    from .sources import Source
    from .views import View

__all__ = ["Frame", "PredictError", "Prediction", "Predictor", "load"]

BATCH = 8
DEVICES = ("auto", "cpu", "cuda")
SINGLE = ("picture", "cloud")  # albums of files that have one frame


class PredictError(ValueError):
    """A run cannot be applied as asked. The message says why."""


@dataclass(frozen=True)
class Frame:
    """What a model answers at once: an image, a frame of a video, a moment of a recording.

    sample: the entries that the model takes. picture: uint8 (3, H, W) to draw on. about: what tells it from the other
    frames of its file, for the JSON file. zoom, shift: a point (x, y) in pixels of the sample is at zoom * (x, y) +
    shift in the picture.
    """

    sample: Mapping[str, Any]
    picture: Tensor
    about: Mapping[str, Any] = field(default_factory=dict)
    zoom: tuple[float, float] = (1.0, 1.0)
    shift: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Prediction:
    """The answers to a frame, the best first, in plain types as the JSON file has them.

    extra: what the view gives beyond them, such as arrays with an entry per point. model: the one that answered.
    """

    answers: list[dict[str, Any]]
    frame: Frame
    view: View
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)
    model: nn.Module | None = field(default=None, repr=False)

    def draw(self) -> Image:
        """The picture with the answers."""
        from .drawing import to_image

        return self.view.draw(to_image(self.extra.get("picture", self.frame.picture)), self.answers)

    def as_json(self) -> dict[str, Any]:
        return {**self.frame.about, **self.extra.get("metrics", {}), self.view.key: self.answers}


class Predictor:
    """A model with a source, which prepares what it looks at, and a view, which reads what it says."""

    def __init__(self, model: nn.Module, source: Source, view: View, *, device: torch.device, batch: int) -> None:
        self.model, self.source, self.view = model.eval().to(device), source, view
        self.device, self.batch = device, batch

    def __call__(self, thing: Any) -> Prediction | list[Prediction]:
        """The prediction for an image, a cloud or a file of one; a list for a video or a recording, which have many,
        and for a list."""
        if isinstance(thing, list | tuple):
            frames = [frame for one in thing for frame in self.source.read(one).frames]
            return list(self.predict(frames))
        medium = self.source.read(thing)
        found = list(self.predict(medium.frames))
        return found[0] if medium.album in SINGLE else found

    def predict(self, frames: Iterable[Frame]) -> Iterator[Prediction]:
        """Predictions in the order of frames, of which at most `batch` are held at a time. An error while frames are
        read comes after the predictions for those before it."""
        rest, problem = iter(frames), None
        part: list[Frame] = []
        while problem is None:
            part.clear()
            try:
                for frame in islice(rest, self.batch):
                    part.append(frame)  # one by one: what was read before an error counts
            except ValueError as error:  # of the file
                problem = error
            if not part and problem is None:
                return
            yield from self._predict(part)
        raise problem

    @torch.no_grad()
    def _predict(self, frames: Sequence[Frame]) -> Iterator[Prediction]:
        if not frames:
            return
        batch = self.source.collate([frame.sample for frame in frames])
        batch = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        for frame, (answers, extra) in zip(frames, self.view.read(self.model, batch, frames), strict=True):
            yield Prediction(answers, frame, self.view, extra, self.model)


def load(
    run: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    threshold: float | None = None,
    every: float | None = None,
    batch: int = BATCH,
    cells: int | None = None,
    device: str = "auto",
) -> Predictor:
    """The predictor of a run's folder, which has all that is needed.

    size: side in pixels or (height, width), by default that of training. threshold: least score of an answer, by
    default that of the task's view. every: milliseconds between two answers on a video or a recording. batch: frames
    at a time. cells: of a point cloud at a time, 100,000 by default; larger ones are cut into pieces. device: "auto" is
    a GPU if there is one.
    """
    from ..training import checkpoint, fit
    from . import cloud_page, driving, points  # noqa: F401 (they register themselves)
    from .sources import find_source
    from .views import find_view

    if device not in DEVICES:
        raise PredictError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise PredictError("device cuda: torch finds no CUDA device here; use cpu")
    if batch < 1:
        raise PredictError(f"batch must be at least 1, got {batch}")
    if every is not None and not 0 < every < float("inf"):
        raise PredictError(f"every must be a positive number of milliseconds, got {every}")
    folder = Path(run)
    wanted = fit.load_run(folder)
    model, about = checkpoint.load_weights(folder / "weights.safetensors")
    learned = about.get("learned") or wanted.learned
    targets = learned.get("targets", checkpoint.outputs_of(about))
    view = find_view(wanted.task_name)(targets, threshold)
    known = {**wanted.data.options, "size": wanted.data.size, **learned.get("preprocessing", {})}
    source = find_source(model)(model, known, size=size, every=every)
    if cells is not None:
        if not isinstance(source, points.PointFiles) or source.kind != "scene":
            raise PredictError("cells has no effect: only scenes of points are cut into pieces")
        if cells < 1:
            raise PredictError(f"cells must be at least 1, got {cells}")
        source.cells = cells
    target = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    return Predictor(model, source, view, device=target, batch=batch)
