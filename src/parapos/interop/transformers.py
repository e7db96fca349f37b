"""PaPE, or another encoding, in a vision model of Hugging Face transformers: ViT, DeiT, DINOv2 with and without
registers, DINOv3, I-JEPA, SigLIP, SigLIP2 and CLIP, alone or as the image tower of a larger model.

B batch, N tokens, D width, H heads, h head size. Their attention layers call a function that the config names; a swap
registers one, and the mask function of the same name: without it transformers would leave masks out in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

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

NAME = "parapos"  # of the attention function, and the key of the config
TOWERS = (
    "clip_vision_model",
    "deit",
    "dinov2",
    "dinov2_with_registers",
    "dinov3_vit",
    "ijepa",
    "siglip_vision_model",
    "siglip2_vision_model",
    "vit",
    "vit_msn",
)
WHOLES = ("clip", "siglip", "siglip2")  # models around a tower that `save` and `load` know
IMPLEMENTATIONS = (None, "eager", "sdpa", NAME)  # of attention; other names may be fetched as code
FETCHING = ("auto_map", "backbone", "quantization_config", "use_pretrained_backbone")
M = TypeVar("M", bound=nn.Module)


def placed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls for config._attn_implementation = "parapos": (B, N, H, h), and no weights."""
    host: Any = module
    if not hasattr(module, "placement"):  # another part of the model with the same config
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if is_causal or getattr(module, "is_causal", False):
        raise SwapError("causal attention is not supported, expected is_causal=False")
    if dropout > 0:
        raise SwapError(
            f"attention dropout of {dropout} cannot be applied, because fused attention has no weights to drop; "
            "set attention_dropout or attention_probs_dropout_prob of the config to 0"
        )
    if kwargs.get("output_attentions"):
        raise SwapError("fused attention has no weights to give, expected output_attentions=False")
    tokens, host.tokens = host.tokens, None
    if tokens is None:
        raise SwapError(f"{type(module).__name__} was called without tokens that could be seen")
    scale = host.encoding.scale if scaling is None else scaling
    out = attention(host.encoding, host.placement, tokens, query, key, value, attention_mask, scale)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, placed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class CatchTokens:
    """A forward pre-hook of attention layers: the tokens are not among what the attention function is given."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        module.tokens = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


class PlaceTokens:
    """A forward hook of the embeddings: a grid from the size of the image, or one per sample from `spatial_shapes`."""

    def __init__(self, placement: Placement, patch: tuple[int, int]) -> None:
        self.placement, self.patch = placement, patch

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> None:
        given = dict(zip(("pixel_values", "spatial_shapes"), args, strict=False)) | dict(kwargs)
        pixels, count = given["pixel_values"], output.shape[1]
        if pixels.ndim == 3:  # SigLIP2: patches of images of several sizes, padded behind
            shapes = given["spatial_shapes"].to(output.device)  # (B, 2): rows, cols
            index = torch.arange(count, device=output.device)
            cols = shapes[:, 1:]
            r = torch.stack([index % cols, index // cols], dim=-1).float() + 1  # (B, N, 2)
            self.placement.put(r)
        else:
            rows, cols = (side // patch for side, patch in zip(pixels.shape[-2:], self.patch, strict=True))
            if count < rows * cols:
                raise SwapError(f"expected a token for each of {rows} x {cols} patches, got {count} tokens")
            self.placement.put_grid(rows, cols, count - rows * cols, output.device)


class NoRotation:
    """A forward hook that makes rotary embeddings turn nothing: cos = 1, sin = 0."""

    def __call__(self, module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.ones_like(output[0]), torch.zeros_like(output[1])


def swap(
    model: M,
    encoding: str = "pape",
    *,
    keep: str = "add",
    init: str = "identity",
    options: Mapping[str, Any] | None = None,
) -> M:
    """The model itself, with a position encoding in every attention layer of its image tower. Class and register tokens
    have no position.

    keep: "add" leaves the model's own positions in place, "replace" takes them out.
    init: "identity" starts PaPE at W_p = 0, so that it changes nothing until it learns; "default" as the encoding draws
    its parameters. options: of the encoding, such as {"parabolas": 16}.
    """
    settings = check_choice(model, keep, init, encoding, options)
    tower = _tower(model)
    layers = _attention_layers(tower)
    made = make_encodings(settings, [_sizes(layer) for _, layer in layers])
    placement = Placement(settings)
    patch = _patch(tower)
    placement.handles.append(tower.embeddings.register_forward_hook(PlaceTokens(placement, patch), with_kwargs=True))
    for (block, layer), new in zip(layers, made, strict=True):
        layer.encoding, layer.placement, layer.tokens = new.train(layer.training), placement, None
        placement.handles.append(layer.register_forward_pre_hook(CatchTokens(), with_kwargs=True))
        placement.handles.append(block.register_forward_hook(KeepForBackward(placement)))
    placement.settings["implementation"] = tower.config._attn_implementation
    tower.config._attn_implementation = NAME
    setattr(tower, ATTRIBUTE, placement)
    if keep == "replace":
        _take_out_positions(tower, placement)
    return model


def unswap(model: M) -> M:
    """The model as it was before `swap`, with the weights that it has now."""
    tower, placement = placement_of(model)
    for _, layer in _attention_layers(tower):
        del layer.encoding, layer.placement, layer.tokens
    tower.config._attn_implementation = placement.settings["implementation"]  # type: ignore[union-attr]
    undo(tower, placement)
    return model


def _tower(model: nn.Module) -> Any:
    """The module that embeds patches and holds the layers, of a family that is known."""
    for module in model.modules():
        embeddings = getattr(module, "embeddings", None)
        config = getattr(module, "config", None)
        if (
            isinstance(embeddings, nn.Module)
            and getattr(config, "model_type", None) in TOWERS
            and _has_patches(embeddings)
        ):
            return module
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    raise SwapError(f"expected a model with an image tower of {', '.join(TOWERS)}, got {kind}")


def _has_patches(embeddings: nn.Module) -> bool:
    return any(
        isinstance(getattr(embeddings, name, None), nn.Module) for name in ("patch_embeddings", "patch_embedding")
    )


def _patch(tower: Any) -> tuple[int, int]:
    size = tower.config.patch_size
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _attention_layers(tower: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Blocks and their attention layers, in order."""
    found: list[tuple[nn.Module, Any]] = []
    for block in tower.modules():
        for layer in block.children():
            if all(hasattr(layer, name) for name in ("q_proj", "k_proj", "head_dim", "is_causal", "config")):
                found.append((block, layer))
    if not found:
        raise SwapError(f"{type(tower).__name__} has no attention layers with q_proj and k_proj")
    for _, layer in found:
        if layer.k_proj.out_features != layer.q_proj.out_features:
            sizes = f"{layer.q_proj.out_features} and {layer.k_proj.out_features}"
            raise SwapError(f"expected as many heads of keys as of queries, got widths {sizes}: grouped heads")
        if layer.is_causal:
            raise SwapError(f"{type(layer).__name__} is causal, expected attention that looks both ways")
    return found


def _sizes(layer: Any) -> tuple[Tensor, int, int, int]:
    weight, size = layer.q_proj.weight, layer.head_dim
    return weight, layer.q_proj.in_features, layer.q_proj.out_features // size, size


def _take_out_positions(tower: Any, placement: Placement) -> None:
    """Learned tables become zeros that do not learn, so that the tower takes the sizes it took before."""
    embeddings = tower.embeddings
    if isinstance(table := getattr(embeddings, "position_embeddings", None), nn.Parameter):
        set_aside(tower, "embeddings.position_embeddings", placement, _zeros(table))
    if isinstance(table := getattr(embeddings, "position_embedding", None), nn.Embedding):
        set_aside(tower, "embeddings.position_embedding.weight", placement, _zeros(table.weight))
    rotary = getattr(tower, "rope_embeddings", None)
    if isinstance(rotary, nn.Module):
        placement.handles.append(rotary.register_forward_hook(NoRotation()))


def _zeros(like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros_like(like), requires_grad=False)


def save(model: PreTrainedModel, folder: str | Path) -> Path:
    """Writes a swapped model with `save_pretrained`, as safetensors; its config.json says what was swapped.

    `load` brings it back. The loader of transformers alone would warn of unexpected weights and run without them.
    """
    tower, placement = placement_of(model)
    _check_family(type(model), "save")
    settings = {key: value for key, value in placement.settings.items() if key != "implementation"}
    stored.plain(settings["options"], "options")
    about = {"format": stored.FORMAT, "library": "transformers", "model": type(model).__name__, **settings}
    folder = Path(folder)
    config: Any = tower.config
    config._attn_implementation = placement.settings["implementation"]  # plain loaders do not know ours
    setattr(model.config, NAME, about)
    try:
        model.save_pretrained(
            folder, state_dict=full_state(model), save_original_format=False
        )  # the names that modules have now
    finally:
        delattr(model.config, NAME)
        config._attn_implementation = NAME
    return folder


def _check_family(family: Any, where: str) -> None:
    """A SwapError for a class whose config could name other models, which it would fetch or build."""
    is_model = isinstance(family, type) and issubclass(family, PreTrainedModel)
    kind = getattr(getattr(family, "config_class", None), "model_type", None)
    if not is_model or kind not in TOWERS + WHOLES:
        name = getattr(family, "__name__", "none")
        raise SwapError(f"{where}: expected a model of {', '.join(TOWERS + WHOLES)}, got {name}")


def _check_config(values: Mapping[str, Any], where: str) -> None:
    for key, value in stored.entries(values):
        legal = (None, False) if key in FETCHING else IMPLEMENTATIONS if "implementation" in key else (value,)
        if value not in legal:
            raise SwapError(f"{where}: {key} = {str(value)[:40]!r} is not allowed, it could fetch or run other things")


def load(folder: str | Path) -> PreTrainedModel:
    """The model that `save` wrote, in evaluation mode. Every weight must be there and none beside them."""
    path = Path(folder) / "config.json"
    values = stored.read_json(path)
    about = stored.check_about(values.pop(NAME, None) if isinstance(values, dict) else None, "transformers", str(path))
    family: Any = getattr(transformers, stored.value(about, "model", str), None)
    if family is None:
        raise SwapError(f"{path}: transformers {transformers.__version__} has no model {about['model']!r}")
    _check_family(family, str(path))
    _check_config(values, str(path))
    settings = stored.settings(about)

    def build() -> PreTrainedModel:
        config: PreTrainedConfig = family.config_class.from_dict(values)
        return swap(family._from_config(config), **settings)

    return stored.rebuild(path, path.with_name(stored.WEIGHTS), build)
