"""All of `parapos predict`: a run applied to files, one JSON file and a picture for each.

A file that cannot be read is named and left out. A video that ends too early keeps the frames before its end.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data import FormatError
from . import SINGLE, Frame, PredictError, Prediction, Predictor
from .albums import ALBUMS, Album

FORMAT = 1  # of the JSON file
Track = Callable[[Sequence[int], str], Iterable[int]]


@dataclass
class Report:
    """What was done: entries of the JSON file, what was left out and why, and what was written."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    written: list[Path] = field(default_factory=list)


def list_files(inputs: Sequence[str | Path], suffixes: Sequence[str], out: Path | None = None) -> list[Path]:
    """The files that paths, folders and patterns stand for, each once. Of a folder, all below it that end in one of
    the suffixes, sorted; hidden ones and what lies in `out` are left out. PredictError if one stands for nothing."""
    found: dict[Path, None] = {}
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            some = [file for file in _below(path, out) if file.suffix.lower() in suffixes]
            if not some:
                raise PredictError(f"{path}: no file in this folder ends in {', '.join(suffixes)}")
        elif path.exists():
            some = [path]
        elif glob.has_magic(str(given)):
            matches = (Path(name) for name in sorted(glob.glob(str(given), recursive=True)))
            some = [file for file in matches if file.is_file()]
            if not some:
                raise PredictError(f"{given}: no file matches this pattern")
        else:
            raise PredictError(f"{path}: no such file or folder")
        found.update(dict.fromkeys(some))
    return list(found)


def _below(folder: Path, out: Path | None) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not _is(here / name, out))
        yield from (here / name for name in sorted(names) if not name.startswith("."))


def _is(path: Path, other: Path | None) -> bool:
    return other is not None and other.exists() and path.resolve() == other.resolve()


def predict_files(
    predictor: Predictor, files: Sequence[Path], out: Path, *, pictures: bool, track: Track, about: dict[str, Any]
) -> Report:
    """Predicts every file and writes OUT/predictions.json and, with pictures, OUT/pictures. track: shows progress.

    about: what the JSON file says of the run."""
    report = Report()
    folder = out / "pictures"
    (folder if pictures else out).mkdir(parents=True, exist_ok=True)
    names = _names(files)
    batch: list[tuple[Path, Frame]] = []  # images of several files, which go through the model together

    def flush() -> None:
        found = predictor.predict([frame for _, frame in batch])
        for (path, _), prediction in zip(batch, found, strict=True):
            _add(report, path, "picture", [prediction], folder / names[path] if pictures else None)
        batch.clear()

    for index in track(range(len(files)), "files"):
        path = files[index]
        try:
            medium = predictor.source.read(path)
            some = [(path, frame) for frame in medium.frames] if medium.album == "picture" else []
        except (FormatError, OSError) as error:
            report.skipped[str(path)] = _reason(error, path)
            continue
        batch += some
        if len(batch) >= predictor.batch or not some:
            flush()
        if not some:
            _add(
                report, path, medium.album, predictor.predict(medium.frames), folder / names[path] if pictures else None
            )
    flush()
    order = {str(path): place for place, path in enumerate(files)}
    report.entries.sort(key=lambda entry: order[entry["file"]])
    skipped = [{"file": name, "reason": reason} for name, reason in report.skipped.items()]
    path = out / "predictions.json"
    text = _dumps({"format": FORMAT, **about, "files": report.entries, "skipped": skipped})
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    report.written.insert(0, path)
    return report


def _add(report: Report, path: Path, kind: str, found: Iterable[Prediction], stem: Path | None) -> None:
    """Writes the predictions of one file and notes them. A reading error after some frames ends the file there."""
    album: Album | None = None if stem is None else ALBUMS[kind](stem, path.name)
    rows: list[dict[str, Any]] = []
    size: dict[str, int] = {}
    try:
        for prediction in found:
            if kind != "cloud":
                height, width = prediction.frame.picture.shape[1:]
                size = {"width": width, "height": height}
            rows.append(prediction.as_json())
            if album is not None:
                album.add(prediction)
    except FormatError as error:
        report.skipped[str(path)] = _reason(error, path)
        if not rows:
            return
        report.skipped[str(path)] += f"; kept the {len(rows)} frames before"
    finally:
        if album is not None and rows:
            album.close()
    entry: dict[str, Any] = {"file": str(path), **size}
    if album is not None and rows:
        entry["picture"] = os.path.join(album.path.parent.name, album.path.name)
        report.written += album.paths
    report.entries.append({**entry, **rows[0]} if kind in SINGLE else {**entry, "frames": rows})


def _dumps(content: dict[str, Any]) -> str:
    """JSON with a line for each key, and for each entry of a list."""

    def text(value: Any) -> str:
        if isinstance(value, list) and value:
            return "[\n  " + ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value) + "\n ]"
        return json.dumps(value, ensure_ascii=False)

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {text(value)}" for key, value in content.items()) + "\n}\n"


def _names(files: Sequence[Path]) -> dict[Path, str]:
    """A name for the picture of each file: its own, with a number if another file has the same."""
    used: set[str] = set()
    names = {}
    for path in files:
        name, number = path.stem, 1
        while name.lower() in used:
            number += 1
            name = f"{path.stem}-{number}"
        used.add(name.lower())
        names[path] = name
    return names


def _reason(error: Exception, path: Path) -> str:
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return " ".join(told.removeprefix(f"{path}: ").split("\n"))
