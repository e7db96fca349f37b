"""Where tokens are. Every coordinate convention of the project is written here and nowhere else.

B batch, N tokens, p position dims. A position tensor r is (N, p), (1, N, p) or (B, N, p).
- Order: images (x, y), videos (t, y, x), events (x, y, t), points as given.
- Unit: one patch, one tubelet, one time scale, one point unit. Grids and tubelets count from 1.
- The class token comes first and sits at the origin, or has no position at all.
- A row of NaN means "this token has no position"; a row that is NaN in part is an error.
Positions are float32, float64 or integers, never half precision: bfloat16 cannot hold 257.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from .tracing import is_transformed

LARGEST = 1e15  # their squares must fit in float32
ClassToken = bool | Literal["unplaced"]
T = TypeVar("T")


def _indices(sizes: Sequence[tuple[str, int]], device: torch.device | str | None) -> list[Tensor]:
    """Row-major index grids, one per axis, counted from 1; each is flattened to (N,)."""
    for name, size in sizes:
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    axes = [torch.arange(1, size + 1, device=device, dtype=torch.float32) for _, size in sizes]
    return [axis.reshape(-1) for axis in torch.meshgrid(*axes, indexing="ij")]


def _with_cls(r: Tensor, cls: ClassToken) -> Tensor:
    if not (cls is True or cls is False or cls == "unplaced"):
        raise ValueError(f"cls must be True, False or 'unplaced', got {cls!r}")
    if cls is False:
        return r
    first = r.new_full((*r.shape[:-2], 1, r.shape[-1]), 0.0 if cls is True else torch.nan)
    return torch.cat([first, r], dim=-2)


def grid_positions(
    rows: int,
    cols: int,
    *,
    cls: ClassToken = False,
    scale: float = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """(rows * cols [+ 1], 2): (x, y) from 1, row-major; `scale` is position interpolation.

    `cls=True` puts a class token at (0, 0) in front, `cls="unplaced"` one without a position.
    """
    y, x = _indices([("rows", rows), ("cols", cols)], device)
    return _with_cls(torch.stack([x, y], dim=-1) * scale, cls)


def tubelet_positions(
    frames: int,
    rows: int,
    cols: int,
    *,
    cls: ClassToken = False,
    scale: float | Sequence[float] = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """(frames * rows * cols [+ 1], 3): (t, y, x) from 1; `scale` is one factor or one per axis."""
    axes = _indices([("frames", frames), ("rows", rows), ("cols", cols)], device)
    r = torch.stack(axes, dim=-1)
    return _with_cls(r * torch.as_tensor(scale, dtype=r.dtype, device=r.device), cls)


def event_positions(x: Tensor, y: Tensor, t: Tensor, *, time_scale: float, cls: ClassToken = False) -> Tensor:
    """(..., N [+ 1], 3): (x, y, t / time_scale) from patch indices and times of equal shape (..., N).

    float64, so microsecond clocks keep their digits; a relative encoding subtracts before it rounds.
    """
    if not (x.shape == y.shape == t.shape):
        raise ValueError(f"x, y and t must have one shape, got {tuple(x.shape)}, {tuple(y.shape)}, {tuple(t.shape)}")
    if not time_scale > 0:
        raise ValueError(f"time_scale must be positive, got {time_scale}")
    return _with_cls(torch.stack([x.double(), y.double(), t.double() / time_scale], dim=-1), cls)


def point_positions(points: Tensor, *, unit: float = 1.0, cls: ClassToken = False) -> Tensor:
    """(..., N [+ 1], p): coordinates divided by `unit`, the length that shall count as one."""
    if points.ndim < 2:
        raise ValueError(f"points must be (..., N, p), got {tuple(points.shape)}")
    if not unit > 0:
        raise ValueError(f"unit must be positive, got {unit}")
    return _with_cls(points.to(torch.promote_types(points.dtype, torch.float32)) / unit, cls)


@dataclass(eq=False)  # a frozen one would be hashed by its fields while compiling
class Positions:
    """Positions that were checked once, and all that is made from them alone, made once and shared by all layers.

    r: (B or 1, N, p), floating. unplaced: whether some token may have no position; None if unknown, which is safe and
    costs one attention column. Prepare them with `Positions.of`, and do not write to r afterwards; reorder them with
    `gather`, join them with `cat`.
    """

    r: Tensor
    unplaced: bool | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def unchecked(cls, r: Tensor) -> Positions:
        """Positions (N, p) or (B, N, p) as they are; `of` checks them."""
        return cls(r[None] if r.ndim == 2 else r)

    @classmethod
    def of(cls, r: Tensor | Positions, pos_dim: int | None = None) -> Positions:
        """Checks shape, type and values. Values are not looked at while compiling or under a function transform."""
        known, r = (r, r.r) if isinstance(r, Positions) else (None, r[None] if r.ndim == 2 else r)
        if r.ndim != 3 or (pos_dim is not None and r.shape[-1] != pos_dim):
            want = "p" if pos_dim is None else str(pos_dim)
            raise ValueError(f"positions must be (N, {want}) or (B, N, {want}), got {tuple(r.shape)}")
        if known is not None:
            return known
        if r.dtype in (torch.float16, torch.bfloat16, torch.bool) or r.dtype.is_complex:
            raise TypeError(f"positions must be float32, float64 or integers, got {r.dtype}")
        if not r.dtype.is_floating_point:
            return cls(r.double(), unplaced=False)
        if torch.compiler.is_compiling() or is_transformed():
            return cls(r)
        if (r.abs() > LARGEST).any():
            raise ValueError(
                f"positions must be at most {LARGEST:g}, or NaN for a token without one; got {r.abs().max()}"
            )
        partly, fully = r.isnan().any(-1), r.isnan().all(-1)
        for b, n in (partly & ~fully).nonzero().tolist():
            raise ValueError(
                f"position {n} of sample {b} is NaN in part, {r[b, n].tolist()}; "
                "a token without a position has NaN in every coordinate"
            )
        return cls(r, unplaced=bool(partly.any()))

    def once(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """What `make` returns, made at the first call with this key, and as fit for training as for inference.

        Of each kind, key[0], only the last is kept. What is compiled or differentiated by position makes its own.
        """
        if torch.compiler.is_compiling() or is_transformed() or self.r.requires_grad:
            return make()
        key = tuple(None if x is self else x for x in key)  # nothing that positions hold may hold them
        last, found = self._made.get(key[0], (None, None))
        if last != key:
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                found = make()
            self._made[key[0]] = key, found
        return found

    def hide(self, visible: Tensor) -> Positions:
        """The same without the positions of padding; visible (B, N) is True for real tokens. Made once for a mask."""
        passing = torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or visible.is_inference()
        known = None if passing or self.r.requires_grad else (visible, visible._version)
        last, found = self._made.get("hidden", (None, None))
        if last is None or known is None or last[0] is not known[0] or last[1] != known[1]:
            found = Positions(torch.where(visible[..., None], self.r, torch.nan), self.unplaced)
            if known is not None:
                self._made["hidden"] = known, found
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files hold the positions alone."""
        return {**self.__dict__, "_made": {}}

    def take(self, samples: slice, tokens: slice = slice(None)) -> Positions:
        """Some samples and some of their tokens."""
        return Positions((self.r[samples] if self.r.shape[0] > 1 else self.r)[:, tokens], self.unplaced)

    def gather(self, index: Tensor) -> Positions:
        """Tokens by index: (W, K) from one sample, (B, K) or (B, W, K) from B; windows become samples, (B W, K).

        An index of -1 stands for padding and has no position.
        """
        b, n, p = self.r.shape
        if index.ndim not in (2, 3) or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"index must be integers (W, K) or (B, W, K), got {index.dtype} {tuple(index.shape)}")
        if b > 1 and index.shape[0] != b:
            raise ValueError(f"index must have {b} samples as the positions have, got {tuple(index.shape)}")
        rows = index.flatten(1).long()
        found = self.r.expand(len(rows), n, p).gather(1, rows.clamp(min=0)[..., None].expand(-1, -1, p))
        found = torch.where((rows < 0)[..., None], torch.nan, found)
        return Positions(found.reshape(-1, index.shape[-1], p), None if self.unplaced is False else self.unplaced)

    @staticmethod
    def cat(parts: Sequence[Positions]) -> Positions:
        """Tokens of several sets, one after another."""
        if not parts:
            raise ValueError("cat needs at least one set of positions")
        batch = max(part.r.shape[0] for part in parts)
        flags = [part.unplaced for part in parts]
        unplaced = True if any(flags) else False if all(flag is False for flag in flags) else None
        return Positions(torch.cat([part.r.expand(batch, -1, -1) for part in parts], dim=1), unplaced)


def placed(r: Tensor) -> Tensor:
    """(B or 1, N) boolean: which tokens have a position."""
    return ~r.isnan().any(-1)


def centre(r: Tensor) -> tuple[Tensor, Tensor]:
    """The middle (B or 1, 1, p) of the positions that there are, and how far they reach from it (B or 1, 1, 1).

    The middle is a multiple of a power of two that is at most one, so integers that span two or more stay integers when
    it is subtracted. Relative encodings do not notice the shift; half precision does. In float64.
    """
    r = r.detach().double()
    here = placed(r)[..., None]  # (B or 1, N, 1)
    found = here.any(1, keepdim=True)
    high = torch.where(found, torch.where(here, r, -torch.inf).amax(1, keepdim=True), 0.0)
    low = torch.where(found, torch.where(here, r, torch.inf).amin(1, keepdim=True), 0.0)
    half, middle = high / 2 - low / 2, high / 2 + low / 2
    fine = torch.maximum(half, middle.abs() * torch.finfo(r.dtype).eps / 2).amax(-1, keepdim=True)
    quantum = torch.exp2(torch.floor(torch.log2(fine.clamp(min=1e-30)))).clamp(max=1.0)
    middle = (middle / quantum).round() * quantum
    return middle, torch.maximum(high - middle, middle - low).amax(-1, keepdim=True)
