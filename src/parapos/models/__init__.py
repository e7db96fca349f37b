"""Models by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..text import nearest
from .event_vit import EventViT
from .vit import ViT
from .vivit import ViViT

# dim, heads, depth, mlp_dim; the "official" sizes are those of the authors' release.
_VIT: dict[str, dict[str, Any]] = {
    "vit_base_patch16": dict(dim=768, heads=12, depth=12, mlp_dim=3072),
    "vit_small_patch16": dict(dim=384, heads=6, depth=12, mlp_dim=1536),
    "vit_official_small_patch16": dict(dim=512, heads=8, depth=10, mlp_dim=2048),
    "vit_official_tiny_patch16": dict(dim=256, heads=4, depth=7, mlp_dim=512),
    "vit_official_nano_patch16": dict(dim=128, heads=4, depth=4, mlp_dim=256),
    "vit_nano_patch4": dict(dim=64, heads=4, depth=4, mlp_dim=128, patch=4, pool="mean"),
}
_BASE = _VIT["vit_base_patch16"]
_NANO = _VIT["vit_official_nano_patch16"]

MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    **{name: (ViT, size) for name, size in _VIT.items()},
    "vivit_base_patch16": (ViViT, _BASE),
    "vivit_nano_patch16": (ViViT, _NANO),
    "event_vit_base_patch16": (EventViT, _BASE),
    "event_vit_nano_patch16": (EventViT, _NANO),
}

__all__ = ["MODELS", "EventViT", "ViT", "ViViT", "create_model", "list_models"]


def list_models() -> list[str]:
    """The names that `create_model` knows."""
    return list(MODELS)


def create_model(name: str, **options: Any) -> nn.Module:
    """A model by name. Options are those of its class; `encoding` and the encoding's own options among them."""
    if name not in MODELS:
        known = list_models()
        raise ValueError(f"unknown model {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    cls, size = MODELS[name]
    return cls(**{**size, **options})
