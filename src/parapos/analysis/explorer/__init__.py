"""The page of `parapos explore`: one HTML file in which a trained ViT runs, to be opened from disk.

Drag a query over an image and see which part of its attention comes from distance, from direction and from content.
export.py turns a model into numbers, engine.js runs it, app.js is what one sees. Nothing is loaded from a network.
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...encodings.looks import LOOKS, label
from ...encodings.parabolic import PaPE, PaPERI
from ...experiments.store import ReportError
from ...training import checkpoint, fit
from ..scores import score_heads
from .export import DTYPES as DTYPES
from .export import describe

LIMIT = 3_000_000  # bytes of a page
SAMPLES, LARGEST = 12, 4  # images in the page, and the largest size as a multiple of the trained one


def build(
    runs: Sequence[Path],
    out: Path,
    *,
    dtype: str = "float32",
    split: str = "test",
    root: str = "",
    tell: Callable[[str], object] = lambda line: None,
) -> Path:
    """Writes the page of one run, or of two side by side, and returns its path.

    The runs must classify the same classes from images of one size. dtype: how weights are stored; "float16" and "int8"
    make pages of larger models possible, at the price of small differences to PyTorch.
    """
    checkpoint.check_writable(out.parent)
    models: list[dict[str, Any]] = []
    samples: list[dict[str, str]] = []
    for folder in runs:
        recipe = fit.load_run(folder)
        model, about = checkpoint.load_weights(folder / "weights.safetensors")
        page_model = describe(model, str(folder), dtype)
        changes = {"root": root} if root else {}
        dataset = recipe.judged(split, **changes)
        sides = set(recipe.data.sides)
        if len(sides) != 1 or 0 in sides:
            raise ReportError(f"{folder}: expected a model trained on square images, got {recipe.data.size}")
        trained = sides.pop()
        scale = recipe.learned.get("preprocessing", {})
        page_model |= {
            "name": folder.resolve().name,
            "encoding": about["encoding"],
            "label": label(about["encoding"]),
            "colour": LOOKS[about["encoding"]][1],
            "trained": trained,
            "classes": list(map(str, dataset.class_names)),
            "mean": _three(scale.get("mean", 0.0)),
            "std": _three(scale.get("scale", 1.0)),
            "positional": _positional(model, dataset, tell),
        }
        for key in ("classes", "patch", "trained", "channels"):
            if models and models[0][key] != page_model[key]:
                raise ReportError(f"{folder}: expected the {key} of {runs[0]}, {models[0][key]}, got {page_model[key]}")
        models.append(page_model)
        if not samples:
            shown = recipe.judged(split, size=LARGEST * trained, **changes)
            samples = _samples(shown, page_model)
    text = page({"models": models, "samples": samples, "largest": LARGEST})
    size = len(text.encode())
    if size > LIMIT:
        smaller = DTYPES[DTYPES.index(dtype) + 1 :]
        hint = f"; try --dtype {smaller[-1]}" if smaller else "; take a smaller model, or one run instead of two"
        raise ReportError(f"the page would have {size / 1e6:.1f} MB, expected at most {LIMIT / 1e6:g} MB{hint}")
    checkpoint.write(out, text.encode())
    return out


def page(data: dict[str, Any]) -> str:
    """The HTML of data as app.js reads them."""
    files = resources.files(__package__)

    def read(*names: str) -> str:
        return "\n".join((files / name).read_text(encoding="utf-8") for name in names)

    text = read("page.html")
    for marker, content in (
        ("/* style */", read("style.css")),
        ("/* data */", json.dumps(data, separators=(",", ":")).replace("</", "<\\/")),
        ("/* worker */", read("engine.js", "worker.js")),
        ("/* app */", read("resize.js", "app.js")),
        ("<!-- title -->", html.escape(" and ".join(model["label"] for model in data["models"]))),
    ):
        if text.count(marker) != 1:
            raise AssertionError(f"page.html must have {marker} once")
        before, after = text.split(marker)
        text = before + content + after
    return text


def _three(values: Any) -> list[float]:
    return [float(values)] * 3 if isinstance(values, int | float) else [float(value) for value in values]


def _positional(model: nn.Module, dataset: Any, tell: Callable[[str], object]) -> list[list[float]] | None:
    """How positional each head is (L, H), from -1 to 1; none for encodings that have no positional part per pair."""
    if not isinstance(model.encoder.encoding, PaPE | PaPERI):  # type: ignore[union-attr]
        return None
    return score_heads(model, dataset, 64, batch=16, tell=tell).bounded.tolist()


def _samples(dataset: Any, about: dict[str, Any]) -> list[dict[str, str]]:
    """Images of a dataset, one of each class as far as they reach, as PNG files in base64."""
    chosen: dict[Any, int] = {}
    for index in range(min(len(dataset), 2000)):
        chosen.setdefault(_label(dataset, index), index)
        if len(chosen) == min(SAMPLES, len(about["classes"])):
            break
    found = []
    for index in sorted(chosen.values()):
        sample = dataset[index]
        name = about["classes"][int(sample["label"])]
        found.append({"label": name, "png": _png(sample["image"], about)})
    return found


def _label(dataset: Any, index: int) -> Any:
    labels = getattr(dataset, "labels", None)
    return labels[index] if labels is not None else int(dataset[index]["label"])


def _png(image: Tensor, about: dict[str, Any]) -> str:
    from torchvision.transforms.v2 import functional as F  # type: ignore[import-untyped]

    mean, std = (image.new_tensor(about[key])[:, None, None] for key in ("mean", "std"))
    buffer = io.BytesIO()
    F.to_pil_image((image * std + mean).clamp(0, 1)).save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
