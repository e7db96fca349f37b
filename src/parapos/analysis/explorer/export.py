"""A ViT as numbers that the explorer's page can run: a description in JSON and its weights in one piece.

H heads, D width, h size of a query head, m parabolas. Every encoding is brought to the same few forms, which engine.js
knows: a quadratic form and a slope read from the token, turns of q and k by frequencies, a slope and a field of view
per head, or a sine table.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor, nn

from ...blocks import Block
from ...encodings.additive import NoEncoding, SinCos
from ...encodings.base import Encoding
from ...encodings.bias import ALiBi, LookHere
from ...encodings.parabolic import PaPE, PaPERI
from ...encodings.rotary import RoPE, RoPEMixed
from ...experiments.store import ReportError
from ...models import ViT

DTYPES = ("float32", "float16", "int8")
KNOWN = "pape, pape_ri, rope, rope_mixed, alibi, lookhere, sincos, none"


def describe(model: nn.Module, name: str, dtype: str = "float32") -> dict[str, Any]:
    """What engine.js needs of a model. dtype: of the weights in the page; float32 gives PyTorch's numbers."""
    if not isinstance(model, ViT):
        raise ReportError(f"{name}: expected a ViT that classifies images, got {type(model).__name__}")
    if dtype not in DTYPES:
        raise ReportError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    tensors: dict[str, Tensor] = {
        "embedding.weight": model.embedding.weight.flatten(1),
        "embedding.bias": _or_zeros(model.embedding.bias, model.embedding.weight),
        "classifier.weight": model.classifier.weight,
        "classifier.bias": model.classifier.bias,
    }
    if model.cls is not None:
        tensors["cls"] = model.cls.flatten()
    for part in ("norm_pre", "norm_post"):
        tensors |= _affine(part, getattr(model.encoder, part))
    layers = []
    for index, block in enumerate(model.encoder.layers):
        assert isinstance(block, Block)
        attention = block.attention
        more, about = _encoding(attention.encoding, name)
        about |= {
            "scale": attention.encoding.scale,
            "valueDim": attention.head_dim,
            "hidden": block.mlp.fc1.out_features,
        }
        about["headDim"] = attention.qk_dim + about.pop("padding", 0)
        more["qkv.weight"], more["qkv.bias"] = _padded_qkv(attention, about["headDim"])
        more |= _affine("proj", attention.proj)
        for part in ("norm1", "norm2"):
            more |= _affine(part, getattr(block, part))
        for part in ("fc1", "fc2"):
            more |= _affine(part, getattr(block.mlp, part))
        tensors |= {f"{index}.{key}": value for key, value in more.items()}
        layers.append(about)
    first = model.encoder.encoding
    weights, places = pack(tensors, dtype)
    return {
        "dim": first.dim,
        "heads": first.heads,
        "patch": model.patch,
        "channels": model.embedding.in_channels,
        "pool": model.pool,
        "cls": {True: "origin", False: "", "unplaced": "unplaced"}[model.cls_token],
        "sincosBase": first.base if isinstance(first, SinCos) else 0,
        "layers": layers,
        "tensors": places,
        "weights": weights,
    }


def _or_zeros(bias: Tensor | None, weight: Tensor) -> Tensor:
    return weight.new_zeros(weight.shape[0]) if bias is None else bias


def _affine(name: str, module: Any) -> dict[str, Tensor]:
    return {f"{name}.weight": module.weight, f"{name}.bias": module.bias}


def _padded_qkv(attention: Any, size: int) -> tuple[Tensor, Tensor]:
    """The projection with query and key heads filled up with zeros to a size, as RoPE does it."""
    heads, more = attention.heads, size - attention.qk_dim
    weight, bias = attention.qkv.weight, attention.qkv.bias
    split = 2 * heads * attention.qk_dim
    parts = []
    for x in (weight, bias[:, None]):
        wide = x[:split].unflatten(0, (2 * heads, attention.qk_dim))
        wide = torch.cat([wide, wide.new_zeros(2 * heads, more, x.shape[1])], dim=1).flatten(0, 1)
        parts.append(torch.cat([wide, x[split:]]))
    return parts[0], parts[1][:, 0]


def _encoding(encoding: Encoding, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description of an encoding in a layer."""
    if type(encoding) is PaPE:
        return _pape(encoding)
    if type(encoding) is PaPERI:
        square = -encoding.w_p.square()[:, None, None] * torch.tensor([1.0, 0.0, 1.0])  # (H, 1, 3)
        form = {"kind": "parabolas", "parabolas": 1, "offset": 0.0, "activation": True}
        return {"a": encoding.w_a[:, None], "outer": square}, {"form": form}
    if type(encoding) is RoPE and encoding.compat is None:
        count = encoding.padded // 4  # frequencies per axis
        one = encoding.base ** (-torch.arange(count, dtype=torch.float64) * (4 / encoding.padded))
        axes = torch.zeros(2, 2 * count, dtype=torch.float64)
        axes[0, :count], axes[1, count:] = one, one
        return {"frequencies": axes.expand(encoding.heads, -1, -1)}, {"padding": encoding.padded - encoding.head_dim}
    if type(encoding) is RoPEMixed:
        learned = encoding.frequencies
        return {"frequencies": 1 / learned if encoding.param == "divisor" else learned}, {}
    if type(encoding) is ALiBi and encoding.compat is None:
        return {}, {"bias": [{"field": "all", "slope": slope} for slope in encoding.slopes]}
    if type(encoding) is LookHere:
        looks = [{"field": f, "slope": slope * encoding.multiplier} for f, slope in encoding.directions]
        return {}, {"bias": looks, "clsIsFree": True}
    if type(encoding) in (SinCos, NoEncoding):
        return {}, {}
    compat = " with compat='official'" if encoding.compat else ""
    raise ReportError(f"{name}: the page knows {KNOWN}, got {type(encoding).__name__}{compat}")


def _pape(encoding: PaPE) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    if encoding.form == "direct":
        assert encoding.w_l is not None
        assert encoding.l_0 is not None
        assert encoding.w_g is not None
        tensors = {"lower": encoding.w_l, "l_0": encoding.l_0, "slope": encoding.w_g}
        return tensors, {"form": {"kind": "direct", "floor": encoding.floor}}
    w_p = encoding._projection()  # (H, m, 2)
    x, y = w_p.unbind(-1)
    form = {"kind": "parabolas", "parabolas": w_p.shape[1], "offset": encoding.offset}
    if encoding.distance:
        tensors["outer"] = -torch.stack([x * x, x * y, y * y], -1)  # (H, m, 3)
        if encoding.w_a is not None:
            tensors["a"] = encoding.w_a
        else:
            assert encoding.a is not None
            tensors["constant_a"] = encoding.a
    if encoding.direction:
        if encoding.b is not None:
            tensors["constant_g"] = (w_p * encoding.b[..., None]).sum(1)
        else:
            folded = encoding.w_g if encoding.w_b is None else w_p.transpose(1, 2) @ encoding.w_b
            assert folded is not None
            tensors["slope"] = folded
    return tensors, {"form": {**form, "activation": encoding.activation}}


def pack(tensors: dict[str, Tensor], dtype: str) -> tuple[str, dict[str, Any]]:
    """All tensors as one text in base64, and where each begins, its shape and type. int8 has a factor per row; tensors
    that are no matrices stay float32 then, as they are small."""
    blob, places = bytearray(), {}
    for name, tensor in tensors.items():
        x = tensor.detach().to("cpu", torch.float64)
        rows = x.flatten(0, -2) if x.ndim > 1 else x[None]
        kind = dtype if dtype != "int8" or x.ndim > 1 else "float32"
        blob += bytes(-len(blob) % 4)
        places[name] = {"offset": len(blob), "shape": list(rows.shape), "dtype": kind}
        if kind == "int8":
            factor = (rows.abs().amax(1) / 127).clamp(min=1e-30).float()
            blob += factor.numpy().astype("<f4").tobytes()
            blob += (rows / factor[:, None]).round().clamp(-127, 127).to(torch.int8).numpy().tobytes()
        else:
            blob += rows.numpy().astype("<f4" if kind == "float32" else "<f2").tobytes()
    return base64.b64encode(bytes(blob)).decode(), places
