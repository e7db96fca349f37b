"""A published folder as a run: its recipe, its weights as safetensors, and a note of where they come from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from ..training import checkpoint, recipe
from ..training.recipe import RecipeError
from . import official, published
from .published import Published

NOTES = "official.json"
MODELS = {
    "image": "vit_base_patch16",
    "video": "vivit_base_patch16",
    "event": "event_vit_base_patch16",
    "detection": "vit_det_base",
    "event_detection": "event_det_base",
}


def import_folder(folder: Path, out: Path) -> Published:
    """Makes a run of a published folder, in a folder that is new or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"{out}: expected a folder that is new or empty")
    net, config, options = official.load_folder(folder)
    wanted = _recipe(config, net, options, folder)
    classes = net.num_classes if hasattr(net, "num_classes") else net.classifier.out_features  # type: ignore[union-attr]
    about: dict[str, Any] = dict(model=wanted.model.name, encoding=config.encoding, options=wanted.model.chosen)
    about |= {"outputs": {"num_classes": classes}, "size": wanted.data.size}
    about["learned"] = {"data": wanted.data.name, "task": wanted.task_name, "targets": {"num_classes": classes}}
    checkpoint.write(out / "recipe.toml", dataclasses.replace(wanted, learned=about["learned"]).dumps().encode())
    checkpoint.export(out / "weights.safetensors", net.state_dict(), **about)
    with open(folder / published.WEIGHTS, "rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    notes = {"dataset": config.dataset, "sha256": checksum, "training": config.notes, "unknown": config.unknown}
    checkpoint.write(out / NOTES, (json.dumps(notes, indent=2) + "\n").encode())
    return config


def _recipe(config: Published, net: Any, options: dict[str, Any], folder: Path) -> recipe.Recipe:
    base = recipe.load(config.recipe)
    sections = ("data", "task", "augment", "optim", "run")
    values: dict[str, Any] = {name: dataclasses.asdict(getattr(base, name)) for name in sections}
    model: dict[str, Any] = {**options, "compat": "official"}
    model |= {"dim": config.dim, "heads": config.heads, "head_dim": config.head_dim, "depth": config.depth}
    model |= {"mlp_dim": config.mlp_dim, "patch": config["patch_size"]}
    if config.encoding == "pape":
        model["parabolas"] = config["pape.parabolas"]
    data = values["data"]["options"]
    if config.task == "video":
        model["tubelet"] = config["video.frame_length"]
        for key, known in (("video.frame_step", 10), ("video.max_samples", 5)):
            if config[key] != known:
                raise RecipeError(f"{folder}: {key}: clips of ucf101 are made with {known} here, got {config[key]}")
    if config.task.startswith("event"):
        model["buckets"] = config["events.buckets"]
        data |= {"patch": config["patch_size"], "threshold": config["events.threshold"]}
        data["refractory_us"] = round(config["events.ref_ms"] * 1000)
    if config.task == "event_detection":
        data["last"] = config["events.max_detection_events"]
    if config.task.endswith("detection"):
        model |= {"neck_dim": config["detection.fpn_size"], "reg_max": config["detection.reg_max"]}
        values["task"]["options"] |= {"max_det": config["detection.max_det"]}
        values["task"]["options"] |= {"min_score": float(config["detection.min_conf"])}
    if config.task == "detection":
        model["pad"] = False
        data["raw_ids"] = net.num_classes > 80  # the release counts classes by COCO's ids
    fold = config.notes.get("fold")
    if config.dataset == "ucf101" and fold in (1, 2, 3):
        data["fold"] = fold
    values["model"] = {"name": MODELS[config.task], "encoding": config.encoding, "options": model}
    return recipe.make(values, str(folder / published.CONFIG))
