"""Weights of the original UniTR, by the names that they have here."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from .backbone import PLAN

LAYER = r"^mm_backbone\.stage_0\.(\d+)\.encoder_list\.(\d+)\."
HERE = r"backbone.blocks.\1.layers.\2."
RENAMED = (
    (r"^vfe\.", "pillars."),
    (r"^mm_backbone\.patch_embed\.", "patches."),
    (LAYER + r"norm\.", HERE + "norm."),
    (LAYER + r"win_attn\.self_attn\.in_proj_", HERE + "attention.qkv."),
    (LAYER + r"win_attn\.self_attn\.out_proj\.", HERE + "attention.proj."),
    (LAYER + r"win_attn\.lidar_(\w+)\.", HERE + r"lidar.\3."),
    (LAYER + r"win_attn\.(\w+)\.", HERE + r"image.\3."),
    (r"(\.lidar|\.image)\.linear([12])\.", r"\1.mlp.fc\2."),
    (r"^mm_backbone\.lidar_residual_norm_stage_0\.(\d+)\.", r"backbone.blocks.\1.lidar_norm."),
    (r"^mm_backbone\.residual_norm_stage_0\.(\d+)\.", r"backbone.blocks.\1.image_norm."),
    (r"^mm_backbone\.out_norm(\d+)\.", r"camera_map.norms.\1."),
    (r"^mm_backbone\.neighbor_pos_embed\.position_embedding_head\.", "backbone.lift_residual."),
    (r"^(neck|vtransform|fuser)\.", r"camera_map.\1."),
    (r"^backbone_2d\.", "bev."),
    (r"^dense_head\.", "head."),
)
LAYERS = {"image_input_layer": "image", "lidar_input_layer": "lidar", "lidar2image_input_layer": "canvas",
          "image2lidar_input_layer": "bev"}  # fmt: skip
EMBEDDING = re.compile(
    r"^mm_backbone\.(\w+_input_layer)\.posembed_layers\.0\.(\d+)\.(\d+)\.position_embedding_head\.(.*)$"
)
CONSTANTS = re.compile(r"(^|\.)(grid|frustum|dx|bx|nx|global_step|bev_pos|.*_range)$")  # no parameters


def from_original(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a `UniTR` with encoding="learned", from that of the original, whole or in part."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if CONSTANTS.search(name):
            continue
        if (match := EMBEDDING.match(name)) is not None:
            layer, block, part, rest = match.groups()
            new = f"backbone.learned.embeddings.{LAYERS[layer]}{_block(LAYERS[layer], int(block))}_{part}.{rest}"
        else:
            new = name
            for pattern, replacement in RENAMED:
                new = re.sub(pattern, replacement, new)
        found[new] = torch.as_tensor(value)
    return found


def _block(space: str, number: int) -> int:
    """The block of the network whose embedding has this number among those of its space."""
    blocks = [i for i, (name, _) in enumerate(PLAN) if space in ("image", "lidar") or name == space]
    return blocks[number]
