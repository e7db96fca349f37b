"""Position encodings by name. A new one needs its file and one line here; every test picks it up."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from torch import nn

from ..text import nearest
from .additive import NoEncoding, SinCos
from .base import Encoding
from .bias import ALiBi, LookHere
from .claims import Claims
from .looks import LOOKS
from .parabolic import PaPE, PaPERI
from .polynomial import PolynomialEncoding
from .rotary import RoPE, RoPEMixed

ENCODINGS: dict[str, type[Encoding]] = {
    "pape": PaPE,
    "pape_ri": PaPERI,
    "sincos": SinCos,
    "rope": RoPE,
    "rope_mixed": RoPEMixed,
    "alibi": ALiBi,
    "lookhere": LookHere,
    "none": NoEncoding,
    "polynomial": PolynomialEncoding,
}

__all__ = ["ENCODINGS", "Claims", "Encoding", "create_encoding", "fold", "list_encodings", "register_encoding"]


M = TypeVar("M", bound=nn.Module)


def fold(module: M) -> M:
    """Shrink a trained model for inference, in place: PaPE keeps W_p^T W_b, p outputs per head, instead of W_b's m."""
    for encoding in module.modules():
        if isinstance(encoding, Encoding):
            encoding.fold()
    return module


def list_encodings() -> list[str]:
    """The names that `create_encoding` knows."""
    return list(ENCODINGS)


def register_encoding(name: str, cls: type[Encoding], *, label: str | None = None, color: str = "#444444") -> None:
    """Makes an encoding known by a name, with a display name and the colour "#rrggbb" of its curves. A name that is
    taken is an error."""
    if ENCODINGS.get(name, cls) is not cls:
        raise ValueError(f"encoding {name!r} is taken by {ENCODINGS[name].__qualname__}, expected a new name")
    if not isinstance(getattr(cls, "claims", None), Claims):
        raise TypeError(f"{cls.__name__} must say what it promises: claims = Claims(...), as every encoding does")
    if not (color.startswith("#") and len(color) == 7 and set(color[1:].lower()) <= set("0123456789abcdef")):
        raise ValueError(f"color must be '#rrggbb', got {color!r}")
    ENCODINGS[name] = cls
    LOOKS[name] = (label or name, color)


def create_encoding(name: str, *, dim: int, heads: int, head_dim: int, pos_dim: int, **options: Any) -> Encoding:
    """A position encoding for attention of `heads` heads with query/key size `head_dim` over tokens of width `dim`."""
    if name not in ENCODINGS:
        known = list_encodings()
        raise ValueError(f"unknown encoding {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    cls = ENCODINGS[name]
    known = [
        p.name
        for init in (cls.__init__, Encoding.__init__)
        for p in inspect.signature(init).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    ]
    for option in options:
        if option not in known:
            own = sorted(set(known) - {"dim", "heads", "head_dim", "pos_dim"})
            raise TypeError(f"encoding {name!r} has no option {option!r}, only {', '.join(own)}{nearest(option, own)}")
    return cls(dim=dim, heads=heads, head_dim=head_dim, pos_dim=pos_dim, **options)
