"""Files that are whole or not there: checkpoints to go on from, and weights to use.

A checkpoint is what `torch.save` writes, of plain types alone, and loads with `weights_only=True`: nothing in it runs.
Its format holds a checksum of every tensor, which is compared before a run goes on from it. Weights are safetensors,
with all that is needed to build the model again in the header.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from torch import Tensor, nn

from ..models import MODELS, create_model
from .schema import need_bounded

HEADER = "parapos"  # the key in the metadata of safetensors; one key, for they have no order
FORMAT = 1
NEEDED: dict[str, type] = {"model": str, "encoding": str, "options": dict}  # of a header


class CheckpointError(RuntimeError):
    """A file of a run is damaged, foreign or dangerous. The message names it."""


def write(path: Path, data: bytes | memoryview) -> None:
    """Puts a file in place at once: it holds the old content or the new, whatever happens on the way."""
    with _replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(data)


def check_writable(folder: Path) -> None:
    """Makes a folder. If nothing can be written to it, an OSError says so now and not after the work."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".{os.getpid()}.probe"
    probe.touch()
    probe.unlink()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Where to write a file, which is flushed to disk and put in its place when the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    except OSError as error:  # a full disk does not say which file
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush(path.parent)


def _flush(path: Path) -> None:
    """What was written to a file or folder is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def save(state: Mapping[str, Any], path: Path) -> None:
    """Writes a checkpoint of plain types: numbers, texts, lists, dictionaries and tensors. Tensors are streamed to disk
    one by one, so that none is in memory twice."""
    plain = _plain(state, "")
    with _replacing(path) as temporary, open(temporary, "wb") as file:
        stream = _Stream(file)
        try:
            torch.save(plain, stream)  # type: ignore[arg-type]
        except RuntimeError:  # torch's words for any error of a file
            raise stream.error or CheckpointError(f"{path}: torch cannot write it") from None


class _Stream:
    """A file to write into that remembers its error."""

    error: OSError | None = None

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {_plain(k, where): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(_plain(v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) is str:
        return sys.intern(value)  # equal states then give equal bytes: pickle writes an object once
    if value is None or type(value) in (bool, int, float):
        return value
    raise CheckpointError(f"a checkpoint holds plain types only, got {type(value).__name__} at {where or 'its top'}")


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint file, or None: its checksums are compared."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        return None if bad is None else f"checksum of {bad} does not match"
    except Exception as error:  # whatever a reader of archives stumbles over
        return f"truncated or not a checkpoint ({error})"


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint. What is damaged, or holds more than plain types, raises CheckpointError and runs nothing."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    if (wrong := damage(path)) is not None:
        raise CheckpointError(f"{path}: {wrong}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a foreign file might need
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own words advise to load it unsafely
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it names {foreign[1]}" if foreign else f"{type(error).__name__} while reading it"
        raise CheckpointError(f"{path}: refused, expected plain types alone: {reason}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: expected a dictionary, got {type(state).__name__}")
    return state


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.ckpt"


def steps(folder: Path) -> dict[int, Path]:
    """Checkpoints of a folder by step, the latest first."""
    names = [(re.fullmatch(r"step-(\d{9,})\.ckpt", path.name), path) for path in folder.glob("*.ckpt")]
    paths = {int(match[1]): path for match, path in names if match}
    return dict(sorted(paths.items(), reverse=True))


def latest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint of a folder, and a message for each newer one that is damaged."""
    messages: list[str] = []
    for path in steps(folder).values():
        if (wrong := damage(path)) is None:
            return path, messages
        messages.append(f"{path}: {wrong}; using the one before it")
    if messages:
        raise CheckpointError("; ".join(messages) + ", but there is none")
    return None, []


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints, and what a killed process left half written."""
    for path in list(steps(folder).values())[keep:]:
        path.unlink(missing_ok=True)
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def export(path: str | Path, weights: Mapping[str, Tensor], **about: Any) -> None:
    """Writes weights as safetensors. about: what `load_weights` needs (model, encoding, options, and the outputs of the
    task or the number of classes) and more."""
    from safetensors.torch import save_file

    header = {HEADER: json.dumps({"format": FORMAT, **about})}
    with _replacing(Path(path)) as temporary:
        save_file({k: v.detach().contiguous() for k, v in weights.items()}, temporary, metadata=header)


def load_weights(path: str | Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of an exported file in evaluation mode, and what the file says about itself."""
    from safetensors import safe_open

    if not Path(path).is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: not safetensors: {error}") from None
    try:
        about = _about(header.get(HEADER, "{}"))
        need_bounded(about["options"])
        build = partial(create_model, about["model"], encoding=about["encoding"], **outputs_of(about))
        with torch.device("meta"):  # before memory is taken for whatever the header says
            compare(build(**about["options"]).state_dict(), weights)
        model = build(**about["options"])
        model.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    except Exception as error:
        message = str(error) or type(error).__name__
        raise CheckpointError(f"{path}: header and weights do not make a model: {message}") from None
    if (bad := not_finite(model)) is not None:
        raise CheckpointError(f"{path}: {bad} holds NaN or infinity; these weights cannot be used")
    return model.eval(), about


def not_finite(model: nn.Module) -> str | None:
    """The name of the first tensor of the weights, parameter or buffer, that is not finite."""
    return next((name for name, x in model.state_dict().items() if not bool(x.isfinite().all())), None)


def _about(text: str) -> dict[str, Any]:
    """What a weights file says about itself, if it says what is needed."""
    about = json.loads(text)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        got = about.get("format", "none") if isinstance(about, dict) else type(about).__name__
        raise ValueError(f"expected format {FORMAT}, got {got}")
    for key, kind in {**NEEDED, **({"outputs": dict} if "outputs" in about else {"classes": int})}.items():
        if type(about.get(key)) is not kind:
            raise ValueError(f"{key}: expected {kind.__name__}, got {about.get(key, 'none')!r}")
    size = about.get("size", 0)
    if type(size) is not int and not (isinstance(size, list) and all(type(side) is int for side in size)):
        raise ValueError(f"size: expected int, got {size!r}")
    missing = [name for name in about.get("plugins", ()) if name not in sys.modules]
    if about["model"] not in MODELS and missing:
        raise ValueError(f"model {about['model']!r} comes from a plug-in; import {', '.join(missing)} first")
    return about


def outputs_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a model that its data decided, of what a weights file says about itself."""
    return about["outputs"] if "outputs" in about else {"num_classes": about["classes"]}


def compare(wanted: Mapping[str, Tensor], found: Mapping[str, Any]) -> None:
    """A ValueError for the first tensor whose name or shape is not the wanted one."""
    for name in [*wanted, *found]:
        a, b = wanted.get(name), found.get(name)
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
            message = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (a, b)]
            raise ValueError(f"{name}: expected {message[0]}, got {message[1]}")


class SafeIO(CheckpointIO):
    """Lightning's reader and writer of checkpoints, through `save` and `load`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        save(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)
