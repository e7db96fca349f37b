"""Models by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..text import nearest
from .detector import DetectorViT, EventDetector
from .event_vit import EventViT
from .ptv3 import PointTransformerV3
from .unitr import UniTR
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
# For images of 64 x 176 pixels.
_UNITR_NANO: dict[str, Any] = dict(
    point_range=(-21.6, -21.6, -5.0, 21.6, 21.6, 3.0), pillar=0.6, dim=32, heads=4, mlp_dim=64, window=12, shift=6,
    set_size=24, lift_heights=5, bev_dims=(32, 32, 64, 64), bev_out=32, query_dim=32, query_heads=4, query_mlp_dim=64,
    queries=20, query_radius=3,
)  # fmt: skip

MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    **{name: (ViT, size) for name, size in _VIT.items()},
    "vivit_base_patch16": (ViViT, _BASE),
    "vivit_nano_patch16": (ViViT, _NANO),
    "event_vit_base_patch16": (EventViT, _BASE),
    "event_vit_nano_patch16": (EventViT, _NANO),
    "vit_det_base": (DetectorViT, _BASE),
    "vit_det_nano": (DetectorViT, _NANO),
    "event_det_base": (EventDetector, _BASE),
    "event_det_nano": (EventDetector, _NANO),
    "ptv3_scannet": (PointTransformerV3, {}),
    "ptv3_modelnet40": (PointTransformerV3, dict(task="classification", num_classes=40, grid_size=0.01)),
    "ptv3_nano": (PointTransformerV3, dict(enc_dims=(32, 64, 96), enc_depths=(1, 1, 2), patch=256, drop_path=0.0)),
    "unitr": (UniTR, {}),
    "unitr_nano": (UniTR, _UNITR_NANO),
}

__all__ = [
    "MODELS",
    "DetectorViT",
    "EventDetector",
    "EventViT",
    "PointTransformerV3",
    "UniTR",
    "ViT",
    "ViViT",
    "create_model",
    "list_models",
    "register_model",
]


def list_models() -> list[str]:
    """The names that `create_model` knows."""
    return list(MODELS)


def register_model(name: str, cls: type[nn.Module], **options: Any) -> None:
    """Makes a model known by a name: a class, and options that the name stands for. It is built with `encoding`, with
    what its task derives from the data (num_classes, for one) and with a recipe's options. Its `inputs` name the
    entries of a batch that forward takes. A name that is taken is an error."""
    if MODELS.get(name, (cls, options)) != (cls, options):
        raise ValueError(f"model {name!r} is taken by {MODELS[name][0].__qualname__}, expected a new name")
    MODELS[name] = (cls, options)


def create_model(name: str, **options: Any) -> nn.Module:
    """A model by name. Options are those of its class; `encoding` and the encoding's own options among them."""
    if name not in MODELS:
        known = list_models()
        raise ValueError(f"unknown model {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    cls, size = MODELS[name]
    return cls(**{**size, **options})
