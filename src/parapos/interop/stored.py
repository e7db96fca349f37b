"""A swapped model as a folder: `model.safetensors` and `parapos.json`, which says how to build the model again.

What is read is data and never code: JSON of plain values, and tensors whose names and shapes are compared with the
model before memory is taken for it. A model with far more parameters than there are tensors is not built to its end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .shapes import mismatch
from .swapping import SwapError, full_state

ABOUT, WEIGHTS = "parapos.json", "model.safetensors"
FORMAT = 1
LARGEST_JSON = 1 << 20
LARGEST_NUMBER = 1 << 16  # of widths, sides and labels; libraries make lists as long as some of them
LARGEST_DEPTH, DEPTHS = 1 << 10, ("depth", "num_layers", "num_hidden_layers")
LARGEST_TEXT = 1 << 22  # of words and their numbers, from which nothing but the shape of a weight is made
TEXTS = ("vocab_size", "token_id", "token_index", "max_position_embeddings", "rope_theta")
FORBIDDEN = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")  # fetch or read
SIMPLE = (bool, int, float, str, tuple, type(None))
FREE = {"training", "grad_checkpointing", "fused_attn", "gradient_checkpointing"}  # how a model runs, not what it is

M = TypeVar("M", bound=nn.Module)


def plain(value: Any, where: str) -> None:
    """A SwapError for what JSON cannot hold as it is."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) is not str:
                raise SwapError(f"{where}: expected names, got the key {key!r}")
            plain(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            plain(item, f"{where}[{number}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise SwapError(f"{where}: expected a number, a text, a list or a dictionary, got {type(value).__name__}")


def difference(model: nn.Module, again: nn.Module) -> str | None:
    """The first way in which two models differ in structure, settings or shapes of weights, or None."""
    modules, others = dict(model.named_modules()), dict(again.named_modules())
    for name in dict.fromkeys([*modules, *others]):
        a, b = modules.get(name), others.get(name)
        if type(a) is not type(b):
            return f"{name or 'the model'} is {type(a).__name__}, not {type(b).__name__}"
        held, made = (_settings(x) for x in (a, b))
        for key in dict.fromkeys([*held, *made]):
            if held.get(key, "none") != made.get(key, "none"):
                return f"{name or 'the model'}.{key} is {held.get(key, 'none')!r}, not {made.get(key, 'none')!r}"
    return mismatch(again.state_dict(), model.state_dict())


def _settings(module: nn.Module | None) -> dict[str, Any]:
    found = vars(module) if module is not None else {}
    return {
        key: value
        for key, value in found.items()
        if not key.startswith("_") and key not in FREE and isinstance(value, SIMPLE)
    }


def write(folder: str | Path, library: str, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Writes both files; the folder is made if it is not there."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "library": library, **about}, indent=2)
    save_file({name: x.detach().contiguous().clone() for name, x in state.items()}, folder / WEIGHTS)
    (folder / ABOUT).write_text(text + "\n", encoding="utf-8")
    return folder


def entries(held: Any) -> Iterator[tuple[str, Any]]:
    """Every value of JSON at any depth, with the name that it has; items of a list have the name of the list."""
    waiting = [("", held)]
    while waiting:
        key, item = waiting.pop()
        yield key, item
        if isinstance(item, dict):
            waiting += item.items()
        elif isinstance(item, list):
            waiting += ((key, one) for one in item)


def read_json(path: Path) -> Any:
    """What a small file of JSON holds."""
    if not path.is_file():
        raise SwapError(f"{path}: no such file")
    if path.stat().st_size > LARGEST_JSON:
        raise SwapError(f"{path}: expected at most {LARGEST_JSON} bytes of JSON, got {path.stat().st_size}")
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SwapError(f"{path}: not JSON: {error}") from None
    for key, item in entries(held):
        most = LARGEST_DEPTH if key in DEPTHS else LARGEST_TEXT if key.endswith(TEXTS) else LARGEST_NUMBER
        if isinstance(item, int) and abs(item) > most:
            raise SwapError(f"{path}: {key}: expected whole numbers up to {most}, got {str(item)[:40]}")
    return held


def check_about(about: Any, library: str, where: str) -> dict[str, Any]:
    """What a folder says about its model, if `save` wrote it."""
    if not isinstance(about, dict) or about.get("format") != FORMAT or about.get("library") != library:
        raise SwapError(f"{where}: expected what parapos.interop.{library}.save writes, format {FORMAT}")
    return about


def value(about: Mapping[str, Any], key: str, kind: type) -> Any:
    """An entry of the right type."""
    if type(about.get(key)) is not kind:
        raise SwapError(f"{ABOUT}: {key}: expected {kind.__name__}, got {about.get(key, 'none')!r}")
    if kind is dict and (bad := next((name for name in FORBIDDEN if name in about[key]), None)):
        raise SwapError(f"{ABOUT}: {key}.{bad} is not allowed, it would read or fetch other files")
    return about[key]


def settings(about: Mapping[str, Any]) -> dict[str, Any]:
    """What `swap` was given."""
    found = {key: value(about, key, str) for key in ("encoding", "keep", "init")}
    return {**found, "options": value(about, "options", dict)}


@contextmanager
def _at_most(parameters: int) -> Iterator[None]:
    """Ends with a SwapError when more parameters are made."""
    count = 0

    def note(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > parameters:
            raise SwapError(f"the model has more than {parameters} parameters, far more than there are weights")

    handle = register_module_parameter_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()


def rebuild(about: Path, weights: Path, build: Callable[[], M]) -> M:
    """A model with all the weights of a file, in their types and in evaluation mode: built without memory, compared,
    built, filled. about: the file that says how to build it."""
    from safetensors import safe_open

    if not weights.is_file():
        raise SwapError(f"{weights}: no such file")
    try:
        with safe_open(weights, framework="pt") as file:
            shapes = {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in file.keys()}  # noqa: SIM118
            if not shapes:
                raise SwapError(f"{weights}: holds no weights")
            wanted = _hollow(about, build, 4 * len(shapes) + 64)
            if wrong := mismatch(wanted, shapes):
                raise SwapError(f"{weights}: {wrong}")
            state = {name: file.get_tensor(name) for name in shapes}
    except (SwapError, OSError):
        raise
    except Exception as error:  # safetensors has errors of its own
        raise SwapError(f"{weights}: not safetensors: {error}") from None
    return _fill(build(), state).eval()


def _fill(model: M, state: Mapping[str, Tensor]) -> M:
    """Every weight takes the type that it was saved in; buffers that are not saved take that of most weights."""
    sizes: Counter[torch.dtype] = Counter()
    for x in state.values():
        if x.is_floating_point():
            sizes[x.dtype] += x.numel()
    if sizes:
        model.to(sizes.most_common(1)[0][0])
    with torch.no_grad():
        for name, held in full_state(model, keep_vars=True).items():
            if held.is_floating_point() and state[name].is_floating_point():
                held.data = held.data.to(state[name].dtype)
            held.copy_(state[name])
    return model


def _hollow(about: Path, build: Callable[[], nn.Module], parameters: int) -> dict[str, Tensor]:
    try:
        with torch.device("meta"), _at_most(parameters):
            return full_state(build())
    except SwapError:
        raise
    except Exception as error:  # whatever a library says to odd arguments
        raise SwapError(f"{about}: no model can be built from it: {error}") from None
