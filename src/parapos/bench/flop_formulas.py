"""FLOP formulas of the attention operators, so that PyTorch's FlopCounterMode counts it: two for each multiply-add.

Importing this module registers them; parapos itself does not, because the counter loads much else. Counted are the
products with queries, keys and values, and the terms. The count of grouped convolutions is put right, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, register_flop_formula

from ..attention import fused, triton  # noqa: F401 - the operators


def _of_fused(*args: Any) -> tuple[int, int, int, int]:
    """Scores, and the multiply-adds that each takes of queries, of values and of terms: one for each function of D."""
    q, k, v, coefficients, tables = (args[i] for i in (0, 1, 2, 8, 11))
    return prod(q[:3]) * k[2], q[-1], v[-1], sum(c[-1] for c in coefficients) + len(tables)


def _of_triton(*args: Any) -> tuple[int, int, int, int]:
    """The same of the Triton kernel: of all scores, or of those of the blocks in its lists."""
    (q, k, v), inputs = args[:3], dict(zip(triton.Inputs._fields, args, strict=False))
    terms = sum(prod(x[3:]) if n in ("M", "g") else 1 for n in ("M", "g", "slopes", "bias") if (x := inputs[n]))
    scores = inputs["entries"][0] * triton.LIST**2 if inputs["entries"] else prod(q[:3]) * k[2]
    return scores, q[-1], v[-1], terms


def _count(products: Callable[..., Sequence[int]], first: int, times: Sequence[int], *args: Any, **_: Any) -> int:
    """first: where the inputs of attention begin. times: how often queries, values and terms are multiplied."""
    scores, *each = products(*args[first:])
    return 2 * scores * sum(n * count for n, count in zip(times, each, strict=True))


for operator, products, first, times in (
    (torch.ops.parapos.attention, _of_fused, 0, (1, 1, 1)),
    # Scores again, then the gradients of values, weights, queries and keys: five products, and each term twice.
    (torch.ops.parapos.attention_backward, _of_fused, 2, (3, 2, 2)),
    (torch.ops.parapos.triton_attention, _of_triton, 0, (1, 1, 1)),
    # The same with scores and the gradients of weights made in both passes.
    (torch.ops.parapos.triton_attention_backward, _of_triton, 0, (4, 3, 3)),
):
    register_flop_formula(operator)(partial(_count, products, first, times))


def _convolution_backward(*args: Any, **_: Any) -> int:
    """PyTorch counts the gradient of the weights of a grouped convolution as if it had one group."""
    out, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    gradients = int(wanted[0]) + int(wanted[1])  # of the input and of the weights: each costs as much as the forward
    return gradients * int(conv_flop_count(x.shape, weight.shape, out.shape, transposed=transposed))


flop_registry[torch.ops.aten.convolution_backward] = _convolution_backward
