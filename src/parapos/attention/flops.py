"""FLOP formulas of the attention operators, so that PyTorch's FlopCounterMode counts it: two for each multiply-add.

Importing this module is what registers them; parapos itself does not, because the counter loads much else. What is
counted is what runs when no key is skipped: the products with queries, keys and values, and the terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import features, triton

Shape = Sequence[int]


def basis_size(shapes: Sequence[Shape], spec: str) -> int:
    """Multiply-adds per score that the terms take: one for each basis function."""
    flat = iter(shapes)
    total = 0
    for name, slots, _, _ in features.parse(spec):
        own = {slot: next(flat) for slot in slots}
        if name == "Quadratic":
            total += sum(prod(shape[3:]) for slot, shape in own.items() if slot in ("M", "g"))
        elif name == "Polynomial":
            total += own["c"][-1]
        else:
            total += 1
    return total


@register_flop_formula(torch.ops.parapos.attention)
def _forward(q: Shape, k: Shape, v: Shape, mask: Any, scale: float, tensors: Any, spec: str, **_: Any) -> int:
    b, h, n, size = q
    return 2 * b * h * n * n * (size + v[-1] + basis_size(tensors, spec))


@register_flop_formula(torch.ops.parapos.attention_backward)
def _backward(
    dout: Shape, q: Shape, k: Shape, v: Shape, mask: Any, scale: float, tensors: Any, spec: str, **_: Any
) -> int:
    """Scores again, then the gradients of values, weights, queries and keys: five products, and each term twice."""
    b, h, n, size = q
    return 2 * b * h * n * n * (3 * size + 2 * v[-1] + 2 * basis_size(tensors, spec))


def _in_kernel(inputs: dict[str, Any]) -> int:
    """Multiply-adds per score of the terms that the Triton kernel is given."""
    forms = sum(prod(inputs[name][3:]) for name in ("M", "g") if inputs[name] is not None)
    return forms + sum(inputs[name] is not None for name in ("slopes", "bias"))


@register_flop_formula(torch.ops.parapos.triton_attention)
def _triton_forward(*args: Any, **_: Any) -> int:
    inputs = dict(zip(triton.Call._fields, args, strict=False))
    b, h, n, size = inputs["q"]
    return 2 * b * h * n * n * (size + inputs["v"][-1] + _in_kernel(inputs))


@register_flop_formula(torch.ops.parapos.triton_attention_backward)
def _triton_backward(*args: Any, **_: Any) -> int:
    """As above, with scores and the gradients of weights made in both passes."""
    inputs = dict(zip(triton.Call._fields, args, strict=False))
    b, h, n, size = inputs["q"]
    return 2 * b * h * n * n * (4 * size + 3 * inputs["v"][-1] + 3 * _in_kernel(inputs))
