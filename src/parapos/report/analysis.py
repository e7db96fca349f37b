"""Is a head positional or semantic? The score z per layer and head of PaPE, and the maps of one query.

B images, H heads, N tokens, L layers. Attention is A_ij = P_ij Y_ij / gamma_i with P = exp(positional part) and
Y = exp(semantic part). z is the mean of (P - Y) / gamma over the pairs (i, j) that carry most attention: for each query
the fewest keys whose attention adds up to tau. z > 0 is a positional head, z < 0 a semantic one.

Y / gamma = A / P leaves every floating type when P is small, so sums are formed as logarithms in float64. The
positional part is taken whole, zero where j = i: a term that depends on the query alone leaves A as it is, but not z.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.terms import Quadratic
from ..blocks import Attention
from ..data.batch import collate
from ..training import checkpoint, fit
from . import plots
from .sweep import ReportError

TAU, SLACK = 0.8, 1e-9
EXTREME = 700.0  # exp of more leaves float64
ENCODINGS = ("pape", "pape_ri")


@dataclass(frozen=True)
class Parts:
    """The parts of the scores of a layer, (B, H, N, N) in float64, with the factor of q.k in them."""

    distance: Tensor
    direction: Tensor
    semantics: Tensor

    @property
    def position(self) -> Tensor:
        return self.distance + self.direction

    @property
    def attention(self) -> Tensor:
        return (self.position + self.semantics).softmax(-1)


@contextmanager
def watch(model: nn.Module, *, scaled: bool = True) -> Iterator[list[Parts]]:
    """In this context a forward pass leaves the parts of every layer in the list, which a next pass fills anew."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    found: list[Parts] = []

    def note(module: Any, args: tuple[Any, ...], answer: Any) -> None:
        q, k, terms = answer
        if len(terms) != 1 or not isinstance(terms[0], Quadratic):
            raise ReportError(f"expected a model with {' or '.join(ENCODINGS)}, got {type(module).__name__}")
        if module is layers[0].encoding:
            found.clear()
        factor, term = module.scale if scaled else 1.0, terms[0]
        semantics = q.double() @ k.double().transpose(-1, -2) * factor

        def part(some: Quadratic) -> Tensor:
            return (some.scores(torch.float64) * factor).expand_as(semantics)

        none = torch.zeros_like(semantics)
        distance = part(dataclasses.replace(term, g=None)) if term.M is not None else none
        direction = part(dataclasses.replace(term, M=None)) if term.g is not None else none
        found.append(Parts(distance, direction, semantics))

    hooks = [layer.encoding.register_forward_hook(note) for layer in layers]
    try:
        with torch.no_grad():
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def selected(attention: Tensor, tau: float = TAU) -> Tensor:
    """Boolean (..., N): the fewest keys whose attention adds up to tau, the largest first, then by index."""
    ordered, order = attention.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(attention, dtype=torch.bool).scatter(-1, order, before < tau - SLACK)


@dataclass
class Heads:
    """Sums over pairs, per layer and head (L, H): logarithms of the sums of P / gamma and Y / gamma, their number, the
    sum of the bounded score (P - Y) / (P + Y), and how many pairs have a part beyond +-EXTREME."""

    positional: Tensor
    semantic: Tensor
    pairs: Tensor
    bounded_sum: Tensor
    extreme: Tensor
    images: int = 0

    @classmethod
    def empty(cls, depth: int, heads: int) -> Heads:
        shape = (depth, heads)
        low = torch.full(shape, -torch.inf, dtype=torch.float64)
        count = torch.zeros(shape, dtype=torch.int64)
        return cls(low, low.clone(), count, torch.zeros(shape, dtype=torch.float64), count.clone())

    def add(self, layers: Sequence[Parts], tau: float | None = TAU) -> None:
        """Takes in a batch. tau=None takes all pairs."""
        for index, parts in enumerate(layers):
            lp, ly = parts.position, parts.semantics
            lg = (lp + ly).logsumexp(-1, keepdim=True)
            chosen = torch.ones_like(lp, dtype=torch.bool) if tau is None else selected((lp + ly - lg).exp(), tau)

            def log_sum(x: Tensor, chosen: Tensor = chosen) -> Tensor:
                return x.masked_fill(~chosen, -torch.inf).transpose(0, 1).flatten(1).logsumexp(-1)

            self.positional[index] = torch.logaddexp(self.positional[index], log_sum(lp - lg))
            self.semantic[index] = torch.logaddexp(self.semantic[index], log_sum(ly - lg))
            self.pairs[index] += chosen.sum((0, 2, 3))
            self.bounded_sum[index] += (((lp - ly) / 2).tanh() * chosen).sum((0, 2, 3))
            self.extreme[index] += (((lp.abs() > EXTREME) | (ly.abs() > EXTREME)) & chosen).sum((0, 2, 3))
        self.images += layers[0].semantics.shape[0]

    @property
    def z(self) -> Tensor:
        count = self.pairs.double().log()
        return (self.positional - count).exp() - (self.semantic - count).exp()

    @property
    def bounded(self) -> Tensor:
        return self.bounded_sum / self.pairs

    def as_json(self, **about: Any) -> str:
        """Numbers beyond float64 are null; the logarithms of both means say what they are."""
        count = self.pairs.double().log()
        values = {
            "z": [[x if abs(x) < float("inf") else None for x in row] for row in self.z.tolist()],
            "log_mean_positional": (self.positional - count).tolist(),
            "log_mean_semantic": (self.semantic - count).tolist(),
            "bounded": self.bounded.tolist(),
            "pairs": self.pairs.tolist(),
            "extreme_pairs": self.extreme.tolist(),
        }
        return json.dumps({**about, "images": self.images, "averaged": "over all selected pairs", **values}, indent=1)


def load(run: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a run or of a weights file, if it has parts to look at."""
    model, about = checkpoint.load_weights(run / "weights.safetensors" if run.is_dir() else run)
    if about["encoding"] not in ENCODINGS:
        told = f"expected a model with {' or '.join(ENCODINGS)}, whose scores have a positional part per pair"
        raise ReportError(f"{run}: {told}, got {about['encoding']}")
    return model, about


def score_heads(
    model: nn.Module,
    dataset: Any,
    images: int,
    *,
    batch: int = 8,
    tau: float | None = TAU,
    scaled: bool = True,
    tell: Callable[[str], object] = lambda line: None,
) -> Heads:
    """z over `images` of a dataset, spread evenly over it. scaled=False leaves out the factor of q.k."""
    total = min(images, len(dataset))
    chosen = [i * len(dataset) // total for i in range(total)]
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    found = Heads.empty(len(layers), layers[0].heads)
    with watch(model, scaled=scaled) as parts:
        for start in range(0, total, batch):
            model(collate([dataset[i] for i in chosen[start : start + batch]])["image"])
            found.add(parts, tau)
            if start // batch % 25 == 0 or start + batch >= total:
                tell(f"heads: {found.images} of {total} images")
    return found


def make_maps(
    model: nn.Module, image: Tensor, *, layer: int, head: int, query: tuple[int, int] | None = None, name: str = ""
) -> plots.Maps:
    """Maps of a query on an image (3, H, W). layer and head from 1; query: row and column of a patch from 1, the
    middle if not given."""
    patch = getattr(model, "patch", 1)
    if image.shape[1] % patch or image.shape[2] % patch:
        told = f"{image.shape[1]} x {image.shape[2]}"
        raise ReportError(f"sides of the image must be multiples of the model's patch size {patch}, got {told}")
    rows, cols = image.shape[1] // patch, image.shape[2] // patch
    query = query or ((rows + 1) // 2, (cols + 1) // 2)
    with watch(model) as parts:
        model(image[None])
        layers = list(parts)
    heads = layers[0].semantics.shape[1]
    for what, value, most in (("layer", layer, len(layers)), ("head", head, heads)):
        if not 1 <= value <= most:
            raise ReportError(f"{what} must be from 1 to {most}, got {value}")
    for what, value, most in (("row", query[0], rows), ("column", query[1], cols)):
        if not 1 <= value <= most:
            raise ReportError(f"{what} of the query must be from 1 to {most} at this size, got {value}")
    first = layers[0].semantics.shape[2] - rows * cols  # class tokens come before the patches
    at = first + (query[0] - 1) * cols + query[1] - 1
    one = layers[layer - 1]

    def grid(x: Tensor) -> Tensor:
        return x[0, head - 1, at, first:].unflatten(0, (rows, cols))

    return plots.Maps(
        name=name,
        image=image,
        query=(query[0] - 1, query[1] - 1),
        distance=grid(one.distance),
        direction=grid(one.direction),
        semantics=grid(one.semantics),
        attention=grid(one.attention),
    )


def save_maps(path: Path, found: plots.Maps) -> None:
    """The numbers of the maps as a NumPy archive."""
    import numpy

    names = ("image", "distance", "direction", "semantics", "attention")
    buffer = io.BytesIO()
    arrays = {name: getattr(found, name).numpy() for name in names}
    arrays["sum"] = (found.distance + found.direction + found.semantics).numpy()
    numpy.savez_compressed(buffer, query=numpy.array(found.query), **arrays)
    checkpoint.write(path, buffer.getvalue())


def run(
    folder: Path,
    out: Path,
    *,
    images: int = 1000,
    split: str = "test",
    root: str = "",
    index: int = 0,
    image: Path | None = None,
    size: int | None = None,
    query: tuple[int, int] | None = None,
    layer: int | None = None,
    head: int | None = None,
    tau: float | None = TAU,
    scaled: bool = True,
    tell: Callable[[str], object] = lambda line: None,
) -> list[Path]:
    """All of `parapos analyze` for a run: heads.png, heads.json, maps.png and maps.npz in a folder.

    Without layer and head, those of the most positional head (largest bounded score), within what is given.
    """
    model, about = load(folder)
    wanted = fit.load_run(folder)
    changes = {"root": root} if root else {}
    dataset = wanted.dataset(split, **changes)
    if image is None and not 0 <= index < len(dataset):
        raise ReportError(f"index must be from 0 to {len(dataset) - 1}, got {index}")
    size = size or wanted.data.size
    picture = (
        read(image, size, wanted.data.options) if image else wanted.dataset(split, size=size, **changes)[index]["image"]
    )
    found = score_heads(model, dataset, images, tau=tau, scaled=scaled, tell=tell)
    title = f"{plots.NAMES[about['encoding']]}, {found.images} images of {wanted.data.name}"
    paths = [out / name for name in ("heads.png", "heads.json", "maps.png", "maps.npz")]
    plots.heads(paths[0], found.z, found.bounded, title=title)
    told = found.as_json(run=folder.name, split=split, size=wanted.data.size, tau=tau, scaled=scaled)
    checkpoint.write(paths[1], f"{told}\n".encode())
    layer, head = choose(found.bounded, layer, head)
    maps = make_maps(model, picture, layer=layer, head=head, query=query, name=f"{size} px")
    plots.maps(paths[2], [maps], title=f"{plots.NAMES[about['encoding']]}, layer {layer}, head {head}")
    save_maps(paths[3], maps)
    return paths


def choose(bounded: Tensor, layer: int | None, head: int | None) -> tuple[int, int]:
    """Layer and head from 1; what is not given is that of the largest score."""
    depth, count = bounded.shape
    layers = [layer] if layer is not None else range(1, depth + 1)
    heads = [head] if head is not None else range(1, count + 1)
    pairs = [(l, h) for l in layers for h in heads]
    inside = [(l, h) for l, h in pairs if 1 <= l <= depth and 1 <= h <= count]
    return max(inside, key=lambda pair: float(bounded[pair[0] - 1, pair[1] - 1])) if inside else pairs[0]


def read(path: Path, size: int, options: Mapping[str, Any]) -> Tensor:
    """An image file at a size, as the evaluation of a dataset with these options would show it."""
    from ..data.images import read_image
    from ..data.transforms import eval_transform

    own = {key: options[key] for key in ("crop", "normalize") if key in options}
    return eval_transform(size, **own)(read_image(path, upright=options.get("upright", True)))
