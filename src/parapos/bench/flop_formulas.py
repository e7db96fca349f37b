"""FLOP formulas of the attention operators, so that PyTorch's FlopCounterMode counts it: two for each multiply-add.

Importing this module registers them; parapos itself does not, because the counter loads much else. Counted are the
products with queries, keys and values, and the terms. The count of grouped convolutions is put right, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, register_flop_formula

from ..attention import fused, triton  # noqa: F401 - the operators

Shape = Sequence[int]


def _products(q: Shape, k: Shape, v: Shape, *rest: Any) -> tuple[int, int, int, int]:
    """Scores, and the multiply-adds that each takes of queries, of values and of terms: one for each function of D."""
    coefficients, tables = rest[5], rest[8]
    return prod(q[:3]) * k[2], q[-1], v[-1], sum(c[-1] for c in coefficients) + len(tables)


@register_flop_formula(torch.ops.parapos.attention)
def _forward(*args: Any, **_: Any) -> int:
    scores, size, value, terms = _products(*args)
    return 2 * scores * (size + value + terms)


@register_flop_formula(torch.ops.parapos.attention_backward)
def _backward(dout: Shape, out: Shape, lse: Shape, wanted: Any, *args: Any, **_: Any) -> int:
    """Scores again, then the gradients of values, weights, queries and keys: five products, and each term twice."""
    scores, size, value, terms = _products(*args)
    return 2 * scores * (3 * size + 2 * value + 2 * terms)


_dense_backward = flop_registry[torch.ops.aten.convolution_backward]


def _convolution_backward(*args: Any, **kwargs: Any) -> int:
    """PyTorch counts the gradient of the weights of a grouped convolution as if it had one group."""
    out, x, weight, transposed, groups, wanted = args[0], args[1], args[2], args[7], args[9], args[10]
    if groups == 1:
        return int(_dense_backward(*args, **kwargs))
    gradients = int(wanted[0]) + int(wanted[1])  # of the input and of the weights: each costs as much as the forward
    return gradients * int(conv_flop_count(x.shape, weight.shape, out.shape, transposed=transposed))


flop_registry[torch.ops.aten.convolution_backward] = _convolution_backward


def _in_kernel(*args: Any) -> tuple[int, int, int, int]:
    """As `_products`, of what the Triton kernel is given: all scores, or those of the blocks in its lists."""
    inputs = dict(zip(triton.Inputs._fields, args, strict=False))
    terms = sum(prod(inputs[x][3:]) if x in ("M", "g") else 1 for x in ("M", "g", "slopes", "bias") if inputs[x])
    scores = inputs["entries"][0] * triton.LIST**2 if inputs["entries"] else prod(args[0][:3]) * args[1][2]
    return scores, args[0][-1], args[2][-1], terms


@register_flop_formula(torch.ops.parapos.triton_attention)
def _triton_forward(*args: Any, **_: Any) -> int:
    scores, size, value, terms = _in_kernel(*args)
    return 2 * scores * (size + value + terms)


@register_flop_formula(torch.ops.parapos.triton_attention_backward)
def _triton_backward(*args: Any, **_: Any) -> int:
    """As above, with scores and the gradients of weights made in both passes."""
    scores, size, value, terms = _in_kernel(*args)
    return 2 * scores * (4 * size + 3 * value + 3 * terms)
