"""Is a head positional or semantic? The score z per layer and head of PaPE, from the parts of its attention scores.

B samples, H heads, N tokens, n query rows, L layers. Attention is A_ij = P_ij Y_ij / gamma_i with P = exp(positional
part) and Y = exp(semantic part). z is the mean of (P - Y) / gamma over the pairs (i, j) that carry most attention: for
each query the fewest keys whose attention adds up to tau. z > 0 is a positional head, z < 0 a semantic one. Padding is
neither query nor key.

Y / gamma = A / P leaves every floating type when P is small, so sums are formed as logarithms in float64. The
positional part is taken whole, zero where j = i: a term that depends on the query alone leaves A as it is, but not z.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.terms import Quadratic, Term
from ..blocks import Attention
from ..data.batch import collate as padded
from ..experiments.store import ReportError
from ..tracing import hooked

TAU, SLACK = 0.8, 1e-9
EXTREME = 700.0  # exp of more leaves float64
BLOCK = 2**22  # scores that are formed at once
EVERY = 10.0  # seconds between lines of progress
WHOLE = slice(None)


@dataclass(frozen=True)
class Parts:
    """The parts of the scores of a layer, (B, H, n, N) in float64, with the factor of q.k in them.

    keys (B, N) and queries (B, n): True for real tokens; None if all are.
    """

    distance: Tensor
    direction: Tensor
    semantics: Tensor
    keys: Tensor | None = None
    queries: Tensor | None = None

    @property
    def position(self) -> Tensor:
        return self.distance + self.direction

    @property
    def scores(self) -> Tensor:
        """The sum of the parts, -inf for keys that are padding."""
        total = self.position + self.semantics
        return total if self.keys is None else total.masked_fill(~self.keys[:, None, None], -torch.inf)

    @property
    def real(self) -> Tensor:
        """Boolean, broadcast to (B, H, n, N): pairs of real tokens."""
        pairs = torch.ones((), dtype=torch.bool, device=self.semantics.device)
        pairs = pairs if self.keys is None else pairs & self.keys[:, None, None, :]
        pairs = pairs if self.queries is None else pairs & self.queries[:, None, :, None]
        return pairs.expand_as(self.semantics)

    @property
    def attention(self) -> Tensor:
        """Softmax of the scores, 0 wherever padding takes part."""
        return self.scores.softmax(-1).masked_fill(~self.real, 0.0)

    def blocks(self) -> Iterator[Parts]:
        yield self


@dataclass(frozen=True)
class Layer:
    """What a layer made its scores of. The parts, N x N numbers each, are formed when they are asked for."""

    q: Tensor  # (B, H, N, h)
    k: Tensor
    term: Quadratic
    factor: float
    mask: Tensor | None = None  # (B, N)
    name: str = ""

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def parts(self, batch: slice = WHOLE, rows: slice = WHOLE) -> Parts:
        """The parts of some samples and some queries."""
        q, k = self.q[batch, :, rows].double(), self.k[batch].double()
        semantics = q @ k.transpose(-1, -2) * self.factor
        M, g = (None if x is None else x[batch, :, rows] for x in (self.term.M, self.term.g))
        term = Quadratic(M, g, self.term.r.take(batch, rows), self.term.key_positions.take(batch))

        def part(one: Quadratic) -> Tensor:
            return (one.scores(torch.float64) * self.factor).expand_as(semantics)

        none = torch.zeros_like(semantics)
        distance = part(dataclasses.replace(term, g=None)) if term.M is not None else none
        direction = part(dataclasses.replace(term, M=None)) if term.g is not None else none
        keys = None if self.mask is None else self.mask[batch]
        return Parts(distance, direction, semantics, keys, None if keys is None else keys[:, rows])

    def blocks(self) -> Iterator[Parts]:
        """All parts, at most about BLOCK scores at a time."""
        samples, heads, tokens, _ = self.q.shape
        step = max(1, BLOCK // max(1, heads * tokens))
        for sample in range(samples):
            for start in range(0, tokens, step):
                yield self.parts(slice(sample, sample + 1), slice(start, start + step))


def quadratic(encoding: nn.Module, terms: Sequence[Term]) -> Quadratic:
    """The one term of a PaPE."""
    if len(terms) != 1 or not isinstance(terms[0], Quadratic):
        raise ReportError(f"expected an encoding with one quadratic term, got {type(encoding).__name__}")
    return terms[0]


@contextmanager
def watch(model: nn.Module, *, scaled: bool = True) -> Iterator[list[Layer]]:
    """In this context a forward pass leaves every layer in the list, which a next pass fills anew.

    scaled=False leaves out the factor of q.k.
    """
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    layers, masks = list[Layer](), dict[nn.Module, Tensor | None]()

    def note_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        masks[module.encoding] = kwargs.get("mask", args[2] if len(args) > 2 else None)

    def note(module: Any, args: tuple[Any, ...], answer: Any) -> None:
        q, k, terms = answer
        if module is attentions[0].encoding:
            layers.clear()
        layers.append(Layer(q, k, quadratic(module, terms), module.scale if scaled else 1.0, masks[module]))

    hooks = [attention.register_forward_pre_hook(note_mask, with_kwargs=True) for attention in attentions]
    hooks += [attention.encoding.register_forward_hook(note) for attention in attentions]
    with hooked(hooks):
        yield layers


@contextmanager
def look(model: nn.Module, scaled: bool) -> Iterator[Callable[[Mapping[str, Any]], Sequence[Layer]]]:
    """In this context, a function that gives the layers of a pass over a batch."""
    with watch(model, scaled=scaled) as layers:

        def run(batch: Mapping[str, Any]) -> list[Layer]:
            model(*(batch[name] for name in getattr(model, "inputs", ("image",))))
            return layers

        yield run


def selected(attention: Tensor, tau: float = TAU) -> Tensor:
    """Boolean (..., N): the fewest keys whose attention adds up to tau, the largest first, then by index."""
    ordered, order = attention.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(attention, dtype=torch.bool).scatter(-1, order, before < tau - SLACK)


@dataclass
class Heads:
    """Sums over pairs, per layer and head (L, H): logarithms of the sums of P / gamma and Y / gamma, their number, the
    sum of the bounded score (P - Y) / (P + Y), and how many pairs have a part beyond +-EXTREME. Where a layer has fewer
    heads than others there are no pairs, and scores are NaN. names: of the layers, if they have some."""

    positional: Tensor
    semantic: Tensor
    pairs: Tensor
    bounded_sum: Tensor
    extreme: Tensor
    samples: int = 0
    names: tuple[str, ...] = ()

    @classmethod
    def empty(cls, depth: int, heads: int) -> Heads:
        shape = (depth, heads)
        low = torch.full(shape, -torch.inf, dtype=torch.float64)
        count = torch.zeros(shape, dtype=torch.int64)
        return cls(low, low.clone(), count, torch.zeros(shape, dtype=torch.float64), count.clone())

    def add(self, layers: Sequence[Any], tau: float | None = TAU, *, samples: int = 1) -> None:
        """Takes in a batch: of each layer an object whose `blocks` are `Parts`. tau=None takes all pairs."""
        for index, layer in enumerate(layers):
            for parts in layer.blocks():
                self._add((index, slice(parts.semantics.shape[1])), parts, tau)
        self.samples += samples

    def _add(self, here: tuple[int, slice], parts: Parts, tau: float | None) -> None:
        lp, ly, scores = parts.position, parts.semantics, parts.scores
        lg = scores.logsumexp(-1, keepdim=True)
        chosen = parts.real if tau is None else selected((scores - lg).exp(), tau) & parts.real

        def log_sum(x: Tensor) -> Tensor:
            return x.masked_fill(~chosen, -torch.inf).transpose(0, 1).flatten(1).logsumexp(-1)

        self.positional[here] = torch.logaddexp(self.positional[here], log_sum(lp - lg))
        self.semantic[here] = torch.logaddexp(self.semantic[here], log_sum(ly - lg))
        self.pairs[here] += chosen.sum((0, 2, 3))
        self.bounded_sum[here] += ((lp - ly) / 2).tanh().masked_fill(~chosen, 0.0).sum((0, 2, 3))
        self.extreme[here] += (((lp.abs() > EXTREME) | (ly.abs() > EXTREME)) & chosen).sum((0, 2, 3))

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
            "z": self.z.where(self.z.isfinite(), torch.nan),
            "log_mean_positional": self.positional - count,
            "log_mean_semantic": self.semantic - count,
            "bounded": self.bounded,
            "pairs": self.pairs,
            "extreme_pairs": self.extreme,
        }
        if self.names:
            about["blocks"] = self.names
        about |= {"samples": self.samples, "averaged": "over all selected pairs"}
        for name, rows in values.items():
            there = [row[pairs > 0].tolist() for row, pairs in zip(rows, self.pairs, strict=True)]
            about[name] = [[None if math.isnan(value) else value for value in row] for row in there]
        return json.dumps(about, indent=1)


def score_heads(
    model: nn.Module,
    dataset: Any,
    samples: int,
    *,
    batch: int | None = None,
    collate: Callable[[Sequence[Any]], Any] | None = None,
    tau: float | None = TAU,
    scaled: bool = True,
    tell: Callable[[str], object] = lambda line: None,
    look: Callable[[Any, bool], AbstractContextManager[Callable[[Any], Sequence[Any]]]] = look,
) -> Heads:
    """z over `samples` of a dataset, spread evenly over it. batch: samples at a time; by default 8 images, or 1 of
    what has more tokens than an image. collate: samples to a batch, by default as the dataset says what is ragged.
    scaled=False leaves out the factor of q.k. look: how layers are seen in a pass, if not as those of `Attention`."""
    total = min(samples, len(dataset))
    chosen = [i * len(dataset) // total for i in range(total)]
    collate = collate or partial(padded, ragged=getattr(dataset, "ragged", ()))
    batch = batch or (8 if "image" in getattr(model, "inputs", ("image",)) else 1)
    heads: Heads | None = None
    reported = time.monotonic()
    with look(model, scaled) as run:
        for start in range(0, total, batch):
            indices = chosen[start : start + batch]
            layers = run(collate([dataset[i] for i in indices]))
            if heads is None:
                heads = Heads.empty(len(layers), max(layer.heads for layer in layers))
                heads.names = tuple(filter(None, (layer.name for layer in layers)))
            heads.add(layers, tau, samples=len(indices))
            if time.monotonic() - reported > EVERY or start + batch >= total:
                reported = time.monotonic()
                tell(f"heads: {heads.samples} of {total} samples")
    if heads is None or not heads.pairs.any(1).all():
        raise ReportError(f"none of the {total} samples has a token, so heads have no score")
    return heads
