"""Checkpoints trained with the authors' release, loaded into our models with the same logits.

Their keys are renamed, their quirks are kept with compat="official": weights go in as they are, nothing is flipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..models.detector import DetectorViT, EventDetector
from ..models.event_vit import EventViT
from ..models.vit import ViT
from ..models.vivit import ViViT
from . import published
from .published import CheckpointError, Published
from .shapes import mismatch

# The model of a task, the dimensions of its stem, and a tensor that no other network with such a stem has.
TASKS: dict[str, tuple[type[nn.Module], int, str]] = {
    "image": (ViT, 4, "classifier.weight"),
    "video": (ViViT, 5, "classifier.weight"),
    "event": (EventViT, 4, "embedding.projection.weight"),
    "detection": (DetectorViT, 4, "fpn2.0.weight"),
    "event_detection": (EventDetector, 4, "embedding.projection.weight"),
}

_RENAMES = (
    (r"attention\.qkv_proj\.", "attention.qkv."),
    (r"attention\.out_proj\.", "attention.proj."),
    (r"\.ffn\.", ".mlp."),
    (r"position_encoder\.position\.weight$", "encoding.w_p"),
    (r"position_encoder\.position_scales$", "encoding.w_p"),
    (r"position_encoder\.a\.weight$", "encoding.w_a"),
    (r"position_encoder\.frequencies$", "encoding.frequencies"),
    (r"^embedding\.projection\.", "embedding."),
    (r"^fpn1\.0\.", "neck.resize.0."),
    (r"^fpn1\.1\.ln\.", "neck.project.0.0.norm."),
    (r"^fpn2\.0\.", "neck.project.1.0.conv."),
    (r"^fpn2\.1\.ln\.", "neck.project.1.0.norm."),
    (r"^fpn3\.1\.", "neck.project.2.0.conv."),
    (r"^fpn3\.2\.ln\.", "neck.project.2.0.norm."),
    (r"^head\.dfl\.conv\.weight$", "head.bins"),
    (r"^head\.cv", "head.o2m.cv"),
    (r"^head\.one2one_cv", "head.o2o.cv"),
    (r"\.cv2\.(\d+)\.2\.", r".box.\1.out."),
    (r"\.cv3\.(\d+)\.2\.", r".cls.\1.out."),
    (r"\.cv2\.(\d+)\.([01])\.", r".box.\1.layers.\2."),
    (r"\.cv3\.(\d+)\.0\.([01])\.", r".cls.\1.layers.\2."),  # depthwise, pointwise
    (r"\.cv3\.(\d+)\.1\.0\.", r".cls.\1.layers.2."),
    (r"\.cv3\.(\d+)\.1\.1\.", r".cls.\1.layers.3."),
    (r"(head\..*)\.bn\.", r"\1.norm."),
)
_PREFIXES = tuple(f"{part}{wrap}" for part in ("classifier.", "detector.", "") for wrap in ("_orig_mod.", ""))
_STEMS = ("embedding.weight", "embedding.projection.weight")
WEIGHTY = ("pape", "pape_ri", "rope_mixed")  # encodings that show in the weights
_COUNTER = "num_batches_tracked"  # of BatchNorm; whole, and of no effect


def _strip(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The network's own keys, whether the mapping is a training checkpoint or a bare state dict."""
    inner = state.get("state_dict", state) if isinstance(state, Mapping) else state
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"state_dict must be a mapping of names to tensors, got {type(inner).__name__}")
    for prefix in _PREFIXES:
        if any(f"{prefix}{stem}" in inner for stem in _STEMS):
            named = ((key, x) for key, x in inner.items() if isinstance(key, str) and key.startswith(prefix))
            inner = {key.removeprefix(prefix): x for key, x in named}
            break
    for key, x in inner.items():
        if not isinstance(key, str):
            raise CheckpointError(f"names must be text, got {key!r}")
        if not isinstance(x, Tensor):
            raise CheckpointError(f"{key} must be a tensor, got {type(x).__name__}")
        if not x.is_floating_point() and not key.endswith(_COUNTER):
            raise CheckpointError(f"{key} must be floating, got {x.dtype}")
    if not any(stem in inner for stem in _STEMS):
        some = ", ".join(list(inner)[:3]) or "nothing"
        raise CheckpointError(f"no embedding.weight found; this is not a checkpoint of the release (it has {some})")
    return dict(inner)


def _infer_encoding(state: Mapping[str, Tensor], encoding: str | None) -> str:
    first = "encoder.layers.0.attention.position_encoder."
    found = None
    for suffix, name in (("ab.weight", "pape"), ("position_scales", "pape_ri"), ("frequencies", "rope_mixed")):
        if first + suffix in state:
            found = name
    if found is None and encoding is None:
        raise CheckpointError(
            "this checkpoint has no encoding weights, so its encoding cannot be told; "
            "pass encoding='sincos', 'rope', 'alibi', 'lookhere' or 'none'"
        )
    if found is not None and encoding not in (None, found):
        raise CheckpointError(f"the weights are those of {found!r}, but encoding={encoding!r} was asked for")
    if found is None and encoding in WEIGHTY:
        raise CheckpointError(f"encoding={encoding!r} was asked for, but its weights are not in the checkpoint")
    return found or str(encoding)


def convert(state: Mapping[str, Any], heads: int, *, events: bool = False) -> dict[str, Tensor]:
    """The same tensors under our names and in our shapes. events: of a network that takes tokens of events."""
    out = {}
    flat = ("embedding.projection.weight", *(("embedding.weight",) if events else ()))
    for key, x in _strip(state).items():
        if key.endswith("position_encoder.ab.weight"):  # W_a over W_b, each (H m, D)
            stem = key.removesuffix("position_encoder.ab.weight") + "encoding."
            a, b = x.chunk(2, dim=0)
            out[stem + "w_a"], out[stem + "w_b"] = a.unflatten(0, (heads, -1)), b.unflatten(0, (heads, -1))
            continue
        name = key
        for pattern, new in _RENAMES:
            name = re.sub(pattern, new, name)
        if key.endswith("position_encoder.position.weight"):
            x = x.unflatten(0, (heads, -1))  # (H, m, p)
        elif key.endswith("position_scales"):
            x = x.reshape(heads)
        elif key.endswith("position_encoder.frequencies"):
            x = x.reshape(heads, -1, x.shape[-1])
        elif key in flat:
            x = x.flatten(1)  # a convolution that sees a whole patch once is a linear layer
        elif name == "head.bins":
            x = x.flatten()
        out[name] = x
    return out


def load(
    source: str | Path | Mapping[str, Any],
    *,
    task: str | None = None,
    heads: int | None = None,
    encoding: str | None = None,
    **options: Any,
) -> nn.Module:
    """A model in eval mode with the release's weights and its behaviour, quirks included.

    source: a published folder with config.json and model.pt, which say all else; or a network's state dict, or a
    training checkpoint that holds one. options go to the model, such as kernel, drop_path or sensor.

    For a state dict: task: "image", the default, for net(images); "video" for net(videos, lengths=...) with the number
    of real tubelets per sample; "event" for the network of DvsGesture; "detection" for that of COCO, "event_detection"
    for that of GEN1, see `models.detector`. heads cannot be read from the weights. encoding is needed only where it has
    no weights.
    """
    if isinstance(source, str | Path):
        for name, value in (("task", task), ("heads", heads), ("encoding", encoding)):
            if value is not None:
                raise TypeError(f"{name} is read from config.json and cannot be given")
        return load_folder(Path(source), **options)[0]
    return _load_state(source, task or "image", heads, encoding, options)


def load_folder(folder: Path, **options: Any) -> tuple[nn.Module, Published, dict[str, Any]]:
    """The model of a published folder, its config, and the options that make the same model again.

    Sizes of config and weights are compared before memory is taken for either.
    """
    config = published.read_config(folder / published.CONFIG)
    path = folder / published.WEIGHTS
    hollow = published.read_weights(path)
    own = {"drop_path": float(config["model.drop_path"]), **config.encoding_options}
    own |= {"time_scale": float(config["events.time_scale"])} if config.task.startswith("event") else {}
    for name in own.keys() & options.keys() - {"drop_path", "time_scale"}:
        raise TypeError(f"{name} is read from config.json and cannot be given")
    given = {**own, **options}
    args = (config.task, config.heads, None if config.encoding in WEIGHTY else config.encoding)
    try:
        with torch.device("meta"):
            net = _load_state(hollow, *args, dict(given), fill=False)
        _compare(config, net, hollow)
        net = _load_state(published.fill(path), *args, dict(given))
    except ValueError as error:  # CheckpointError, or what a model says of an option
        raise CheckpointError(f"{folder}: {error}") from None
    return net, config, given


def _compare(config: Published, net: Any, state: Mapping[str, Tensor]) -> None:
    """Whether the weights are those of the network that the config describes."""
    attention, state = net.encoder.layers[0].attention, _strip(state)
    found = {
        "positional": _infer_encoding(state, None if config.encoding in WEIGHTY else config.encoding),
        "model._hidden_size": attention.qkv.in_features,
        "model._head_size": attention.head_dim,
        "model._num_layers": len(net.encoder.layers),
        "model._intermediate_size": net.encoder.layers[0].mlp.fc1.out_features,
        "patch_size": net.patch,
    }
    wanted: dict[str, Any] = {
        "positional": config.encoding,
        "model._hidden_size": config.dim,
        "model._head_size": config.head_dim,
        "model._num_layers": config.depth,
        "model._intermediate_size": config.mlp_dim,
        "patch_size": config["patch_size"],
    }
    if config.encoding == "pape":
        found["pape.parabolas"], wanted["pape.parabolas"] = attention.encoding.parabolas, config["pape.parabolas"]
    if config.task.startswith("event"):
        found["events.buckets"], wanted["events.buckets"] = net.buckets, config["events.buckets"]
    if config.task == "video":
        found["video.frame_length"], wanted["video.frame_length"] = net.tubelet, config["video.frame_length"]
    if config.task.endswith("detection"):
        found |= {"detection.fpn_size": state["fpn2.0.weight"].shape[0], "detection.reg_max": net.reg_max}
        wanted |= {key: config[key] for key in ("detection.fpn_size", "detection.reg_max")}
    for key, value in wanted.items():
        if found[key] != value:
            raise CheckpointError(f"{key}: config.json says {value}, the weights are those of {found[key]}")


def _load_state(
    state_dict: Mapping[str, Any],
    task: str,
    heads: int | None,
    encoding: str | None,
    options: dict[str, Any],
    fill: bool = True,
) -> nn.Module:
    """fill: whether values are looked at and copied, or shapes alone are compared."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"heads must be a positive integer, got {heads!r}")
    state = _strip(state_dict)
    name = _infer_encoding(state, encoding)
    for option in ("parabolas", "compat", "tubelet", "neck", "neck_dim", "reg_max", "buckets", "pad"):
        if option in options:
            raise TypeError(f"{option} is read from the checkpoint and cannot be given")
    cls, ndim, needed = TASKS[task]
    stem = next(state[name] for name in _STEMS if name in state)
    others = [other for other, (_, n, mark) in TASKS.items() if n == stem.ndim and mark in state and other != task]
    hint = "".join(f"; try task={other!r}" for other in others[-1:])
    if task == "event" and stem.ndim == 4 and stem.shape[1] % 2:
        raise CheckpointError(f"embedding.weight has {stem.shape[1]} channels, expected two for each bucket")
    if stem.ndim != ndim or not stem.numel():
        raise CheckpointError(
            f"embedding.weight of a network for task={task!r} has {ndim} dimensions and is not empty, "
            f"got {tuple(stem.shape)}{hint}"
        )
    if others and needed not in state and task != "event":
        raise CheckpointError(f"a network for task={task!r} has {needed}, this one has not{hint}")
    try:
        dim, channels, *tubelet, patch, _ = stem.shape
        options |= {"tubelet": tubelet[0]} if tubelet else {}
        options |= {"buckets": channels // 2} if task.startswith("event") else {"channels": channels}
        layers = {int(m[1]) for key in state if (m := re.match(r"encoder\.layers\.(\d{1,4})\.", key))}
        depth = len(layers)
        if not layers or layers != set(range(depth)):
            raise CheckpointError(f"layers must be 0, 1, ... without gaps, got {sorted(layers)[:8]}")
        inner = state["encoder.layers.0.attention.out_proj.weight"].shape[1]
        mlp_dim = state["encoder.layers.0.ffn.fc1.weight"].shape[0]
        if task in ("image", "video", "event"):
            classes = state["classifier.weight"].shape[0]
        else:
            classes = state["head.cv3.0.2.weight"].shape[0]
            options |= {"neck_dim": state["fpn2.0.weight"].shape[0]}
            options |= {"reg_max": state["head.cv2.0.2.weight"].shape[0] // 4}
            options |= {"pad": False} if task == "detection" else {}
    except (KeyError, IndexError) as error:
        raise CheckpointError(f"the checkpoint is incomplete: {error}") from error
    if inner % heads:
        raise CheckpointError(f"{heads} heads do not divide the attention width {inner}")
    if name == "pape":
        w_p = state.get("encoder.layers.0.attention.position_encoder.position.weight")
        if w_p is None:
            raise CheckpointError("the checkpoint is incomplete: W_a and W_b are there, W_p is not")
        rows = w_p.shape[0]
        if rows % heads:
            raise CheckpointError(f"{heads} heads do not divide the {rows} rows of W_p")
        options["parabolas"] = rows // heads
    net = cls(
        dim=dim,
        heads=heads,
        head_dim=inner // heads,
        depth=depth,
        mlp_dim=mlp_dim,
        num_classes=classes,
        patch=patch,
        encoding=name,
        compat="official",
        **options,
    )
    try:
        with torch.no_grad():
            counters = {key: x for key, x in net.state_dict().items() if key.endswith(_COUNTER)}
            found = {**counters, **convert(state, heads, events=task.startswith("event"))}
            if fill:
                net.load_state_dict(found)
            elif wrong := mismatch(net.state_dict(), found):
                raise CheckpointError(wrong)
    except RuntimeError as error:
        raise CheckpointError(str(error)[:2000]) from error
    return net.eval()
