"""Where points look: what attention gets in each block of a pass, and the points that get most of a query's attention.

N points of a stage, W windows of K slots, H heads, C channels, Q queries, T keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention import attend
from ...positions import Positions
from .geometry import Stage
from .layers import Block
from .network import PointTransformerV3

SCORES = 2**24  # formed at one time


class Patches(NamedTuple):
    """Windows of one width, as attention gets them."""

    points: Tensor  # (W, K) the point in each slot; padding has some point
    owned: Tensor  # (W, K) True where a point belongs: neither a borrowed copy nor padding
    x: Tensor  # (W, K, C)
    positions: Positions
    mask: Tensor | None  # (W, K)


class Seen(NamedTuple):
    """A block in a pass. x (N, C): what its attention gets."""

    name: str
    block: Block
    stage: Stage
    x: Tensor

    def patches(self) -> Iterator[Patches]:
        """All windows, as the block forms them."""
        windows = self.stage.windows(self.block.row % len(self.stage.codes), self.block.patch)
        owned = torch.zeros(len(windows.source), dtype=torch.bool, device=self.x.device)
        owned[windows.slot] = True
        start = 0
        for shape, positions, mask in windows.tables:
            part = slice(start, start + shape[0] * shape[1])
            points = windows.source[part]
            yield Patches(points.view(shape), owned[part].view(shape), self.x[points].view(*shape, -1), positions, mask)
            start = part.stop


class Strongest(NamedTuple):
    """The keys with most attention for some queries, the mean over heads; the rest of a row's attention is elsewhere.
    Points of a stage; keys that a short window does not have get 0."""

    queries: Tensor  # (Q,)
    keys: Tensor  # (Q, T)
    weights: Tensor  # (Q, T), the largest first


@contextmanager
def watch_blocks(model: PointTransformerV3) -> Iterator[list[Seen]]:
    """In this context a pass leaves all its blocks in the list, in the order in which they run. Without gradients."""
    found: list[Seen] = []
    running: dict[Any, tuple[str, Block, Stage]] = {}
    hooks = [model.register_forward_pre_hook(lambda module, args: found.clear())]
    for name, block in model.named_modules():
        if isinstance(block, Block):

            def begin(module: Any, args: Any, norm: Any = block.norm1, name: str = name) -> None:
                running[norm] = (name.removeprefix("backbone."), module, args[1])

            def note(module: Any, args: Any, out: Tensor) -> None:
                found.append(Seen(*running[module], out.detach()))

            hooks += [block.register_forward_pre_hook(begin), block.norm1.register_forward_hook(note)]
    try:
        with torch.no_grad():
            yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def strongest(seen: Seen, queries: int, top: int) -> Strongest:
    """Of about so many queries, evenly spaced along the block's curve; of all points if there are not more."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    attention = seen.block.attn
    step = max(1, -(-len(seen.x) // queries))
    for points, owned, x, positions, mask in seen.patches():
        width = points.shape[1]
        columns = torch.arange(0, width, step, device=x.device)
        count = min(top, width)
        at_once = max(1, SCORES // (attention.heads * len(columns) * width))
        for start in range(0, len(points), at_once):
            part = slice(start, start + at_once)
            asking, context = x[part][:, columns], x[part]
            keys = positions.take(part)
            r = Positions(keys.r[:, columns], unplaced=keys.unplaced)
            q, k, v = attention.project(asking, context)
            q, k, terms = attention.encoding(asking, q, k, r, keys)
            visible = None if mask is None else mask[part]
            answer = attend(q, k, v, terms, visible, attention.encoding.scale, return_weights=True)
            weights, place = answer[1].float().mean(1).topk(count, dim=-1)  # (W, queries, T)
            chosen = owned[part][:, columns]
            found = points[part].gather(1, place.flatten(1)).view_as(place)
            parts.append((points[part][:, columns][chosen], _wide(found[chosen], top), _wide(weights[chosen], top)))
    return Strongest(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _wide(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[1]))


def ancestors(stages: list[Stage]) -> list[Tensor]:
    """For each stage, the point (N,) of it that stands for each point of the first."""
    found = [torch.arange(len(stages[0].cells), device=stages[0].cells.device)]
    for stage in stages[1:]:
        assert stage.groups is not None
        found.append(stage.groups.group[found[-1]])
    return found
