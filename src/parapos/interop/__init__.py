"""Models and weights from elsewhere, and ours for elsewhere. Each page of it is imported when it is first used, because
most need a library that the core does not."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import official

if TYPE_CHECKING:
    from . import export, hub, timm, transformers

__all__ = ["export", "hub", "official", "timm", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
