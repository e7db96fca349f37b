"""PaPE, or another encoding, in a timm model: its ViT, EVA and NaFlexViT families.

B batch, N tokens, D width, H heads, h head size. Attention layers keep their weights and the names of them; each gains
a submodule `encoding`. They change class, as torch's parametrizations do, so `unswap` leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import Eva, EvaAttention
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from . import stored
from .swapping import (
    ATTRIBUTE,
    KeepForBackward,
    Placement,
    SwapError,
    attention,
    check_choice,
    full_state,
    make_encodings,
    new_parameters,
    placement_of,
    set_aside,
    undo,
)

__all__ = ["SwapError", "load", "new_parameters", "save", "swap", "unswap"]

FAMILIES = (VisionTransformer, Eva, NaFlexVit)
M = TypeVar("M", bound=nn.Module)


class _Placed(nn.Module):
    """What replaces `forward` of timm's attention layers."""

    placement: Placement

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        host: Any = self
        if is_causal:
            raise SwapError("causal attention is not supported, expected is_causal=False")
        if self.training and host.attn_drop.p > 0:
            raise SwapError(
                f"attention dropout of {host.attn_drop.p} cannot be applied, because fused attention has no "
                "weights to drop; make the model with attn_drop_rate=0"
            )
        q, k, v = self._project(x)
        if rope is not None:
            q, k = (self._rotate(t, rope).type_as(v) for t in (q, k))
        out = attention(host.encoding, self.placement, x, q, k, v, attn_mask, host.scale)
        out = host.norm(out.transpose(1, 2).flatten(2))  # (B, N, H h)
        if host.gate is not None:
            out = out * host.gate(x).sigmoid()
        return host.proj_drop(host.proj(out))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalised if the model does so, and values: (B, H, N, h) each."""
        host: Any = self
        if host.qkv is None:
            parts = tuple(layer(x) for layer in (host.q_proj, host.k_proj, host.v_proj))
        elif getattr(host, "q_bias", None) is not None:  # EVA keeps a bias of zeros for keys
            bias = torch.cat((host.q_bias, host.k_bias, host.v_bias))
            parts = F.linear(x, host.qkv.weight, bias).chunk(3, dim=-1)
        else:
            parts = host.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (host.num_heads, -1)).transpose(1, 2) for t in parts)
        return host.q_norm(q), host.k_norm(k), v

    def _rotate(self, t: Tensor, rope: Tensor) -> Tensor:
        host: Any = self
        first = host.num_prefix_tokens
        turned = apply_rot_embed_cat(t[:, :, first:], rope, half=getattr(host, "rotate_half", False))
        return torch.cat([t[:, :, :first], turned], dim=2)


class PlacedAttention(_Placed, Attention):
    """timm's `Attention` with an encoding."""


class PlacedAttentionRope(_Placed, AttentionRope):
    """timm's `AttentionRope` with an encoding."""


class PlacedEvaAttention(_Placed, EvaAttention):
    """timm's `EvaAttention` with an encoding."""


SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    Attention: PlacedAttention,
    AttentionRope: PlacedAttentionRope,
    EvaAttention: PlacedEvaAttention,
}
BACK = {new: old for old, new in SWAPS.items()}


class PlaceGrid:
    """A forward hook of the patch embedding of ViT and EVA."""

    def __init__(self, placement: Placement, prefix: int) -> None:
        self.placement, self.prefix = placement, prefix

    def __call__(self, embed: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.ndim == 4:  # dynamic sizes: (B, rows, cols, D), or (B, D, rows, cols)
            channels_first = str(getattr(embed, "output_fmt", "NHWC")).endswith("NCHW")
            rows, cols = output.shape[2:] if channels_first else output.shape[1:3]
        else:
            rows, cols = embed.dynamic_feat_size(tuple(args[0].shape[-2:]))  # type: ignore[operator]
        self.placement.put_grid(rows, cols, self.prefix, output.device)


class PlacePatches:
    """A forward hook of NaFlex embeddings, which are told the row and column of each patch, or get a whole image."""

    def __init__(self, placement: Placement, prefix: int) -> None:
        self.placement, self.prefix = placement, prefix

    def __call__(self, embed: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        tokens, grid = output
        coord = kwargs.get("patch_coord", args[1] if len(args) > 1 else None)
        if coord is None:
            rows, cols = grid
            self.placement.put_grid(rows, cols, self.prefix, tokens.device)
        else:  # (B, N, 2), (y, x) from 0; never in half precision, whatever the tokens are in
            self.placement.put(coord.flip(-1).float() + 1, self.prefix)


class FollowDropout:
    """A forward hook of patch dropout: positions of the patches that stay."""

    def __init__(self, placement: Placement, prefix: int) -> None:
        self.placement, self.prefix = placement, prefix

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        kept = output[1]
        if kept is not None:
            known = self.placement.positions
            assert known is not None
            r = known.r[:, self.prefix :]
            r = r.expand(kept.shape[0], -1, -1).gather(1, kept[..., None].expand(-1, -1, r.shape[2]))
            self.placement.put(r, self.prefix)


def swap(
    model: M,
    encoding: str = "pape",
    *,
    keep: str = "add",
    init: str = "identity",
    options: Mapping[str, Any] | None = None,
) -> M:
    """The model itself, with a position encoding in every attention layer. Class and register tokens have no position.

    keep: "add" leaves the model's own positions in place, "replace" takes them out.
    init: "identity" starts PaPE at W_p = 0, so that it changes nothing until it learns; "default" as the encoding draws
    its parameters. options: of the encoding, such as {"parabolas": 16}.
    """
    settings = check_choice(model, keep, init, encoding, options)
    if not isinstance(model, FAMILIES):
        known = ", ".join(family.__name__ for family in FAMILIES)
        raise SwapError(f"expected a timm model of the families {known}, got {type(model).__name__}")
    layers = [_attention_of(block, number) for number, block in enumerate(model.blocks)]
    placement = Placement(settings)
    made = make_encodings(settings, [_sizes(layer) for layer in layers])
    placement.handles = _place(model, placement)
    for layer, new in zip(layers, made, strict=True):
        layer.__class__ = SWAPS[type(layer)]
        layer.encoding, layer.placement = new.train(layer.training), placement
    for block in model.blocks:
        placement.handles.append(block.register_forward_hook(KeepForBackward(placement)))
    setattr(model, ATTRIBUTE, placement)
    if keep == "replace":
        _take_out_positions(model, placement)
    return model


def unswap(model: M) -> M:
    """The model as it was before `swap`, with the weights that it has now."""
    owner, placement = placement_of(model)
    for layer in owner.modules():
        if type(layer) in BACK:
            del layer.encoding, layer.placement
            layer.__class__ = BACK[type(layer)]
    undo(owner, placement)
    return model


def _attention_of(block: nn.Module, number: int) -> Any:
    layer = getattr(block, "attn", None)
    if type(layer) not in SWAPS:
        found = f"{type(block).__name__} with {type(layer).__name__}" if layer is not None else type(block).__name__
        known = ", ".join(cls.__name__ for cls in SWAPS)
        raise SwapError(f"block {number} is a {found}, expected `attn` to be one of {known}; parallel blocks have none")
    host: Any = layer
    if getattr(host, "num_kv_groups", 1) > 1:
        raise SwapError(f"block {number} has grouped heads, {host.num_kv_groups} queries to a key; expected one")
    return host


def _sizes(layer: Any) -> tuple[Tensor, int, int, int]:
    first = layer.q_proj if layer.qkv is None else layer.qkv
    return layer.proj.weight, first.in_features, layer.num_heads, layer.head_dim


def _place(model: Any, placement: Placement) -> list[Any]:
    """Hooks that write positions, where the model embeds and drops patches."""
    prefix, drop = model.num_prefix_tokens, model.patch_drop
    drops = drop is not None and not isinstance(drop, nn.Identity)
    if drops and isinstance(model, VisionTransformer):
        raise SwapError("patch dropout of VisionTransformer does not say which patches stay; use patch_drop_rate=0")
    if isinstance(model, NaFlexVit):
        handles = [model.embeds.register_forward_hook(PlacePatches(placement, prefix), with_kwargs=True)]
    else:
        if not hasattr(model.patch_embed, "dynamic_feat_size"):
            raise SwapError(f"patch embedding {type(model.patch_embed).__name__} does not say what grid it makes")
        handles = [model.patch_embed.register_forward_hook(PlaceGrid(placement, prefix))]
    if drops:
        handles.append(drop.register_forward_hook(FollowDropout(placement, prefix)))
    return handles


def _take_out_positions(model: Any, placement: Placement) -> None:
    if isinstance(model, NaFlexVit):
        if model.embeds.pos_embed_type != "none":
            for name in ("pos_embed", "pos_embed_y", "pos_embed_x"):
                if getattr(model.embeds, name, None) is not None:
                    set_aside(model, f"embeds.{name}", placement)
            set_aside(model, "embeds.pos_embed_type", placement, "none")
    elif model.pos_embed is not None:
        set_aside(model, "pos_embed", placement)
    if getattr(model, "rope", None) is not None:
        set_aside(model, "rope", placement)


def save(model: nn.Module, folder: str | Path, model_args: Mapping[str, Any] | None = None) -> Path:
    """Writes a swapped model: `model.safetensors`, and `parapos.json` with what `load` needs to build it again.

    model_args: what `timm.create_model` was given beyond the name. The model is built from it once more, without
    memory for weights, and compared; a model that would come back as another one is refused.
    """
    owner, placement = placement_of(model)
    name = (getattr(owner, "pretrained_cfg", None) or {}).get("architecture")
    if owner is not model or not name:
        raise SwapError("save needs a model that timm.create_model made; save other ones by their state_dict")
    args = {"num_classes": owner.num_classes, "global_pool": owner.global_pool, **dict(model_args or {})}
    stored.plain(args, "model_args")
    with torch.device("meta"):
        again = _build(name, args)
    swap(again, **placement.settings)
    if difference := stored.difference(model, again):
        raise SwapError(
            f"timm.create_model({name!r}, **{args}) makes another model: {difference}; pass model_args with all that "
            "timm.create_model was given"
        )
    return stored.write(folder, "timm", full_state(model), {"model": name, "args": args, **placement.settings})


def load(folder: str | Path) -> nn.Module:
    """The model that `save` wrote, in evaluation mode. Every weight must be there and none beside them."""

    path = Path(folder) / stored.ABOUT
    about = stored.check_about(stored.read_json(path), "timm", str(path))
    name, args, settings = stored.value(about, "model", str), stored.value(about, "args", dict), stored.settings(about)
    return stored.rebuild(path, path.with_name(stored.WEIGHTS), lambda: swap(_build(name, args), **settings))


def _build(name: str, args: Mapping[str, Any]) -> nn.Module:
    if not timm.is_model(name):  # a name such as hf-hub:... would be fetched
        raise SwapError(f"timm {timm.__version__} has no model {name!r}")
    make: Callable[..., nn.Module] = timm.create_model
    return make(name, pretrained=False, **args)
