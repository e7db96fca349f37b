"""A folder that the authors published: `config.json` says what was trained, `model.pt` holds its weights.

Nothing in it is run, and nothing is allocated before it is known to fit: the pickle of a checkpoint is read as weights
only, first without memory for them, and sizes are compared with the file's own.
"""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..text import nearest
from . import pickles


class CheckpointError(ValueError):
    """The folder or state dict is not one that the authors' release makes."""


CONFIG, WEIGHTS = "config.json", "model.pt"
LARGEST_CONFIG = 1 << 20
# The last records of an archive: of large files, where that one is, and the end.
END64, LOCATOR, END = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI"), struct.Struct("<4s4H2IH")
MOST = 1 << 16  # of any size in a config; more is a mistake
# dataset: the task that `official.load` knows, and our recipe
DATASETS = {
    "coco": ("detection", "coco"),
    "dvsgesture": ("event", "dvsgesture"),
    "gen1": ("event_detection", "gen1"),
    "imagenet": ("image", "imagenet"),
    "imagenet_renditions": ("image", "imagenet"),
    "imagenetv2": ("image", "imagenet"),
    "ucf101": ("video", "ucf101"),
}
POSITIONAL = {"absolute": "sincos", "nope": "none"} | {
    name: name for name in ("alibi", "lookhere", "rope", "rope_mixed", "pape", "pape_ri")
}
SIZES = {  # width, heads, head size, layers, MLP
    "nano": (128, 4, 32, 4, 256),
    "tiny": (256, 4, 64, 7, 512),
    "small": (512, 8, 64, 10, 2048),
    "base": (768, 12, 64, 12, 3072),
}
PARTS = ("_hidden_size", "_num_heads", "_head_size", "_num_layers", "_intermediate_size")
# key: default, and the least that it may be. A whole number as default asks for whole numbers.
NUMBERS: dict[str, tuple[float, float]] = {
    "patch_size": (16, 1),
    **{f"model.{name}": (-1, -1) for name in PARTS},
    "model.drop_path": (0.1, 0),
    "model.dropout": (0.0, 0),
    "pape.parabolas": (50, 1),
    "rope.base": (10000.0, 1e-6),
    "rope_mixed.base": (100.0, 1e-6),
    "absolute.base": (10000.0, 1e-6),
    "events.buckets": (10, 1),
    "events.threshold": (256, 1),
    "events.ref_ms": (0.0, 0),
    "events.time_scale": (50000.0, 1e-6),
    "events.max_detection_events": (500000, 1),
    "video.frame_length": (2, 1),
    "video.frame_step": (10, 1),
    "video.max_samples": (5, 1),
    "detection.fpn_size": (256, 1),
    "detection.reg_max": (16, 2),
    "detection.max_det": (100, 1),
    "detection.min_conf": (0.001, 0),
}
RATES = ("model.drop_path", "model.dropout")  # less than 1
LARGE = ("events.max_detection_events", "events.time_scale", "rope.base", "absolute.base")  # may pass MOST
TRAINING = (
    "optimizer", "train", "batch_size", "epochs", "fold", "compile", "seed", "num_workers", "precision", "devices",
    "scheduler", "augment", "wandb", "checkpoint", "loss", "name", "notes",
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A config that was read. notes: keys of training, as they were. unknown: keys that nothing here knows."""

    dataset: str
    encoding: str
    size: str
    dim: int
    heads: int
    head_dim: int
    depth: int
    mlp_dim: int
    numbers: Mapping[str, float]
    notes: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.numbers[key]

    @property
    def task(self) -> str:
        return DATASETS[self.dataset][0]

    @property
    def recipe(self) -> str:
        return DATASETS[self.dataset][1]

    @property
    def encoding_options(self) -> dict[str, Any]:
        """Options of the encoding that its weights do not tell."""
        key = {"rope": "rope.base", "sincos": "absolute.base"}.get(self.encoding)
        return {} if key is None else {"base": float(self.numbers[key])}


def read_config(path: Path) -> Published:
    """The config of a folder, every known key checked."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a published folder has {CONFIG} and {WEIGHTS}")
    if (size := path.stat().st_size) > LARGEST_CONFIG:
        raise CheckpointError(f"{path}: expected at most {LARGEST_CONFIG} bytes of JSON, got {size}")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a dictionary, got {type(values).__name__}")
    try:
        return parse(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def parse(values: Mapping[str, Any]) -> Published:
    """A config from its nested dictionary."""
    flat, notes, unknown = _flatten(values)
    dataset = _choice(flat, "dataset", tuple(DATASETS))
    encoding = POSITIONAL[_choice(flat, "positional", tuple(POSITIONAL), "nope")]
    size = _choice(flat, "model.size", tuple(SIZES), "base")
    if flat.get("normalize", False) is not False:
        if flat["normalize"] is not True:
            raise CheckpointError(f"normalize: expected true or false, got {flat['normalize']!r}")
        raise CheckpointError("normalize: positions divided by the size of the grid are not supported, expected false")
    numbers = {key: _number(flat, key) for key in NUMBERS}
    chosen = [numbers[f"model.{name}"] for name in PARTS]
    for name, value in zip(PARTS, chosen, strict=True):
        if value == 0:
            raise CheckpointError(f"model.{name}: expected a positive number, or -1 for that of model.size, got 0")
    dim, heads, head_dim, depth, mlp_dim = (
        int(default if value == -1 else value) for value, default in zip(chosen, SIZES[size], strict=True)
    )
    if depth > 1024:
        raise CheckpointError(f"model._num_layers: expected at most 1024, got {depth}")
    return Published(dataset, encoding, size, dim, heads, head_dim, depth, mlp_dim, numbers, notes, tuple(unknown))


def _flatten(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Known keys as "section.key", keys of training, and the names of others."""
    known = {*NUMBERS, "dataset", "positional", "normalize", "model.size"}
    sections = {key.partition(".")[0] for key in known if "." in key}
    flat: dict[str, Any] = {}
    notes: dict[str, Any] = {}
    unknown: list[str] = []
    for key, value in values.items():
        if key in sections:
            if not isinstance(value, dict):
                raise CheckpointError(f"{key}: expected a dictionary, got {type(value).__name__}")
            for inner, held in value.items():
                name = f"{key}.{inner}"
                if name in known:
                    flat[name] = held
                else:
                    unknown.append(name)
        elif key in known:
            flat[key] = value
        elif key in TRAINING:
            notes[key] = value
        else:
            unknown.append(key)
    return flat, notes, unknown


def _choice(flat: Mapping[str, Any], key: str, known: tuple[str, ...], default: str | None = None) -> str:
    value = flat.get(key, default)
    if not isinstance(value, str) or value not in known:
        hint = nearest(value, list(known)) if isinstance(value, str) else ""
        got = "nothing" if value is None else repr(value)[:80]
        raise CheckpointError(f"{key}: expected one of {', '.join(known)}, got {got}{hint}")
    return value


def _number(flat: Mapping[str, Any], key: str) -> float:
    default, least = NUMBERS[key]
    value = flat.get(key, default)
    whole = isinstance(default, int)
    kinds = (int,) if whole else (int, float)
    most = math.nextafter(1, 0) if key in RATES else 1e12 if key in LARGE else MOST
    if type(value) not in kinds or not least <= value <= most:  # NaN is not between them
        kind = "a whole number" if whole else "a number"
        reason = f"{kind} from {least:g} to {'less than 1' if key in RATES else f'{most:g}'}"
        raise CheckpointError(f"{key}: expected {reason}, got {repr(value)[:80]}")
    return value


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint without memory: their names, shapes and types. `fill` reads them.

    Refused are files that are no archive, archives that are compressed, hold more than the file does or have two
    directories, pickles that ask for anything but tensors, and storages of another size than their record.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a published folder has {CONFIG} and {WEIGHTS}")
    held = path.stat().st_size
    records = _records(path, held)
    try:
        storages = pickles.check(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))
    except pickles.PickleError as error:
        raise CheckpointError(f"{path}: refused, expected a dictionary of tensors alone: {error}") from None
    except RuntimeError as error:  # of PyTorch's reader of archives
        raise CheckpointError(f"{path}: not a checkpoint that torch.save wrote: {str(error)[:200]}") from None
    for key, size in storages.items():
        if (got := records.get(f"data/{key}")) != size:
            record = "no record" if got is None else f"a record of {got} bytes"
            raise CheckpointError(f"{path}: storage {key[:80]!r} claims {str(size)[:40]} bytes, but has {record}")
    found = _load(path, "meta")
    for name, x in found.items():
        if x.layout != torch.strided or not x.is_contiguous():
            raise CheckpointError(f"{path}: {name} is not stored in full, expected a plain tensor")
        if x.numel() * x.element_size() > held:
            raise CheckpointError(f"{path}: {name} claims {tuple(x.shape)}, more than the file holds")
    if sum(x.numel() * x.element_size() for x in found.values()) > held:
        raise CheckpointError(f"{path}: its tensors claim more bytes than the file has")
    return found


def _records(path: Path, held: int) -> dict[str, int]:
    """The bytes of each record of an archive, by its name in the folder of the first, as PyTorch's reader takes it.

    held: bytes of the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries, start = archive.infolist(), archive.start_dir
        expected = _directory(path, held)
    except Exception as error:  # whatever a reader of archives stumbles over
        raise CheckpointError(f"{path}: not a checkpoint that torch.save wrote: {error}") from None
    if expected != (len(entries), start):
        raise CheckpointError(f"{path}: its directory is not where torch.save writes it")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise CheckpointError(f"{path}: {entry.filename[:80]!r} is compressed, expected what torch.save writes")
    if sum(entry.file_size for entry in entries) > held:
        raise CheckpointError(f"{path}: claims to hold more bytes than the file has")
    names = [entry.filename.casefold() for entry in entries]  # PyTorch's reader takes upper case for lower
    if len(set(names)) < len(names):
        raise CheckpointError(f"{path}: two of its entries have one name")
    top = entries[0].filename.partition("/")[0] + "/" if entries else ""
    return {entry.filename.removeprefix(top): entry.file_size for entry in entries if entry.filename.startswith(top)}


def _directory(path: Path, held: int) -> tuple[int, int] | None:
    """How many entries an archive has and where its directory starts, or None where two readers may differ on it.

    zipfile looks for the directory right before the end records, PyTorch's reader at the offset that they tell. The
    file must end with directory, end record and locator for large files (or neither) and end record, without a gap.
    """
    with path.open("rb") as file:
        file.seek(max(held - END64.size - LOCATOR.size - END.size, 0))
        tail = file.read()
    end, locator, end64 = tail[-END.size :], tail[-END.size - LOCATOR.size : -END.size], tail[: END64.size]
    mark, *disks, here, entries, size, start, comment = END.unpack(end)
    if mark != b"PK\5\6" or any(disks) or here != entries or comment:
        return None
    at = held - END.size
    if locator.startswith(b"PK\6\7"):
        at -= LOCATOR.size + END64.size
        if LOCATOR.unpack(locator) != (b"PK\6\7", 0, at, 1):
            return None
        mark, length, _, _, *disks, here, entries64, size64, start64 = END64.unpack(end64)
        if mark != b"PK\6\6" or length != END64.size - 12 or any(disks) or here != entries64:
            return None
        short = (min(entries64, 0xFFFF), min(size64, 0xFFFFFFFF), min(start64, 0xFFFFFFFF))
        if (entries, size, start) != short:
            return None
        entries, size, start = entries64, size64, start64
    return (entries, start) if start + size == at else None


def fill(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint that `read_weights` has looked at."""
    return _load(path, "cpu")


def _load(path: Path, device: str) -> dict[str, Tensor]:
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch's own words advise to load it unsafely
        reason = f"{type(error).__name__} while reading it"
        raise CheckpointError(f"{path}: refused, expected a dictionary of tensors alone: {reason}") from None
    if not isinstance(state, dict) or not state:
        raise CheckpointError(f"{path}: expected a dictionary of tensors, got {type(state).__name__}")
    for name, x in state.items():
        if not isinstance(name, str) or not isinstance(x, Tensor):
            got = f"{type(name).__name__} to {type(x).__name__}"
            raise CheckpointError(f"{path}: expected names of tensors, got {got}")
    return state
