"""The error budget: a kernel may be off by twice what the reference in the same dtype is off by; gradients thrice.

Distances are root mean squares; the largest single error may be twice its own allowance, because it is one number of
many, and luck. Where the reference is exact by luck, half a unit in the last place is allowed, one for a single error.
"""

from __future__ import annotations

import torch
from torch import Tensor

Numbers = dict[str, Tensor]  # "out" and gradients by name, in float64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def excess(
    ours: Numbers, theirs: Numbers, truth: Numbers, dtype: torch.dtype, size: int, reach: float = 1.0
) -> dict[str, float]:
    """Each quantity's error over its allowance; above 1 is a failure.

    size: products in a score. reach: the largest factor that multiplies the gradient of a score, |D|^2 for M.
    """
    assert truth.keys() == theirs.keys() == ours.keys()
    # A gradient of exactly 0, as of the only key that a query sees, is a difference of such sums.
    largest = max(x.abs().max() for x in truth.values()) * size * reach
    found = {}
    for name, exact in truth.items():
        assert torch.isfinite(ours[name]).all(), name
        factor = 2 if name == "out" else 3
        eps = torch.finfo(dtype).eps
        least = eps * (exact.square().mean().sqrt() / 2 or largest), eps * (exact.abs().max() or largest)
        allowed, mine = (theirs[name] - exact).abs(), (ours[name] - exact).abs()
        rms = mine.square().mean().sqrt() / torch.maximum(factor * allowed.square().mean().sqrt(), least[0])
        top = mine.max() / torch.maximum(2 * factor * allowed.max(), least[1])
        found[name] = max(rms.nan_to_num(0.0).item(), top.nan_to_num(0.0).item())
    return found


def assert_within_budget(
    ours: Numbers, theirs: Numbers, truth: Numbers, dtype: torch.dtype, size: int, reach: float = 1.0
) -> None:
    ratios = excess(ours, theirs, truth, dtype, size, reach)
    assert all(ratio <= 1 for ratio in ratios.values()), f"{dtype}: error over allowance {ratios}"
