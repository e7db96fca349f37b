"""The error budget: a kernel may be off by twice what the reference in the same dtype is off by; gradients thrice.

Distances are root mean squares; the largest single error may be twice its own allowance. Where the reference is
exact by luck, one unit in the last place is allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

import parapos
from parapos.attention import features
from parapos.attention.select import attend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUSED = ["features"]  # that run here and have gradients; the others have tests of their own
# Ways that the features kernel takes at other sizes: columns, and columns with ranges of keys.
WAYS = {"columns": {"SMALL": 0}, "windows": {"SMALL": 0, "QUERIES": 16}}


@contextmanager
def way(kernel: str) -> Iterator[str]:
    """The kernel that goes this way, made to go it."""
    with patch.multiple(features, **WAYS.get(kernel, {"SMALL": features.SMALL})):
        yield "features" if kernel in WAYS else kernel


def ways(name: str) -> list[str]:
    """Kernels, and ways of kernels, that an encoding can take."""
    return FUSED + (list(WAYS) if name in ("pape", "pape_ri") else [])


@dataclass
class Case:
    """One attention call, made in `dtype` and able to run in float64 on the very same numbers."""

    encoding: parapos.Encoding
    tensors: dict[str, Tensor]  # x, q, k, v in dtype
    r: Tensor
    mask: Tensor | None
    dtype: torch.dtype

    def run(self, kernel: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Output and gradients of everything that has one, in float64 for comparison. Padded rows are left out."""
        encoding = copy.deepcopy(self.encoding).to(dtype)
        leaves = {name: t.detach().clone().to(dtype).requires_grad_() for name, t in self.tensors.items()}
        x, q, k, v = leaves["x"], leaves["q"], leaves["k"], leaves["v"]
        q_, k_, terms = encoding(encoding.add(x, self.r), q, k, self.r)
        out = attend(q_, k_, v, terms, self.mask, encoding.scale, kernel)
        assert isinstance(out, Tensor)
        assert out.dtype == dtype
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(self.dtype).to(dtype)
        if self.mask is not None:
            weight = weight * self.mask[:, None, :, None]
            out = out * self.mask[:, None, :, None]
        wanted = leaves | dict(encoding.named_parameters())
        grads = torch.autograd.grad((out * weight).sum(), list(wanted.values()), allow_unused=True)
        found = {f"d{name}": g for name, g in zip(wanted, grads, strict=True) if g is not None}
        return {"out": out.detach().double()} | {name: g.double() for name, g in found.items()}


def make_case(
    name: str,
    *,
    p: int = 2,
    dtype: torch.dtype = torch.float32,
    r: Tensor | None = None,
    n: int = 17,
    batch: int = 1,
    heads: int = 2,
    head_dim: int = 16,
    dim: int = 24,
    mask: Tensor | None = None,
    **options: object,
) -> Case:
    g = torch.Generator().manual_seed(0)
    if name == "lookhere":
        options.setdefault("directions", [("up-left", 0.5), ("right", 0.5), ("all", 0.25)][:heads])
    torch.manual_seed(0)
    encoding = parapos.create_encoding(name, dim=dim, heads=heads, head_dim=head_dim, pos_dim=p, **options)
    encoding = encoding.to(dtype)
    if r is None:
        side = max(1, round(n ** (1 / p)))
        r = torch.randint(1, 2 * side + 1, (n, p), generator=g).float()
    n = r.shape[-2]
    tensors = {"x": torch.randn(batch, n, dim, generator=g)}
    for key in "qkv":
        tensors[key] = torch.randn(batch, heads, n, head_dim, generator=g)
    return Case(encoding, {key: t.to(dtype) for key, t in tensors.items()}, r, mask, dtype)


def excess(case: Case, kernel: str) -> dict[str, float]:
    """For each quantity the kernel's error over its allowance, root mean square; above 1 is a failure.

    The largest error may be twice its own allowance: it is one number of many, and luck.
    """
    truth, reference = (case.run("reference", dtype) for dtype in (torch.float64, case.dtype))
    with way(kernel) as name:
        ours = case.run(name, case.dtype)
    assert truth.keys() == reference.keys() == ours.keys()
    # A gradient that is exactly 0 is a difference of sums of head_dim products.
    largest = max(t.abs().max() for t in truth.values()) * case.tensors["q"].shape[-1]
    found = {}
    for name, t in truth.items():
        assert torch.isfinite(ours[name]).all(), name
        factor = 2 if name == "out" else 3
        ulp = torch.finfo(case.dtype).eps * (t.abs().max() or largest)
        theirs, mine = (reference[name] - t).abs(), (ours[name] - t).abs()
        rms = mine.square().mean().sqrt() / (factor * theirs.square().mean().sqrt() + ulp)
        top = mine.max() / (2 * factor * theirs.max() + ulp)
        found[name] = max(rms.nan_to_num(0.0).item(), top.nan_to_num(0.0).item())
    return found


def assert_within_budget(case: Case, kernel: str) -> None:
    bad = {name: ratio for name, ratio in excess(case, kernel).items() if not ratio <= 1}
    assert not bad, f"{kernel} in {case.dtype}: error over allowance {bad}"
