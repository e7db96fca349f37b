"""Which tiles of keys each head of a trained model needs, for a test sample at several times the size of training.

A bound proves that the other tiles have no weight, see attention/sparse.py. A picture for each layer has the share of
tiles that its heads need, and for a few tiles of queries, in orange, the keys that each head has to look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attention.kernels import Call
from ..attention.sparse import DEFAULTS, HeadTiles
from ..attention.terms import Relative
from ..attention.tiles import needed_tiles
from ..blocks import Attention
from ..canvas import new_figure, save
from ..data import find_dataset
from ..encodings.looks import label
from ..experiments.store import ReportError
from ..models import ViViT
from ..tracing import hooked
from ..training import checkpoint, fit, rows
from ..training.recipe import Recipe

DEFAULT = DEFAULTS[torch.float32]
SHOWN = (0.15, 0.5, 0.85)  # tiles of queries, as shares of their list
QUERY, NEEDED, SKIPPED = "#D55E00", "#0072B2", "#e6e6e6"
COLUMNS = ("layer", "head", "tiles", "share")


def larger(recipe: Recipe, factor: int) -> dict[str, Any]:
    """Options that make the samples of a recipe so many times as large a side: images, frames, or the sensor."""
    known = find_dataset(recipe.data.name).options
    if recipe.data.size:
        size = recipe.data.size
        return {"size": size * factor if isinstance(size, int) else tuple(side * factor for side in size)}
    if "enlarge" in known:
        return {"enlarge": factor}
    if not {"height", "width"} <= set(known):
        raise ReportError(f"dataset {recipe.data.name} has no size that could grow, expected images, clips or gestures")
    sides = {side: recipe.data.options.get(side, known[side].default) for side in ("height", "width")}
    return {side: pixels * factor for side, pixels in sides.items()}


def inputs(model: nn.Module, sample: Mapping[str, Any]) -> list[Tensor]:
    """What a model takes of a sample, as a batch of one."""
    names = [name for name in model.inputs if name in sample]  # type: ignore[union-attr]
    return [torch.as_tensor(sample[name])[None] for name in names]


def calls(model: nn.Module, given: Sequence[Tensor], tolerance: float = DEFAULT) -> list[Call]:
    """What each attention layer of a model asks for. A batch of one has no padding."""
    found: list[Call] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, Attention)
        x, r, *mask = args
        if mask and mask[0] is not None and not bool(mask[0].all()):
            raise ReportError("tiles are drawn of samples without padding, got one with some")
        q, k, v = module.project(x)
        q, k, terms = module.encoding(x, q, k, r)
        found.append(Call(q, k, v, tuple(terms), None, module.encoding.scale, tolerance=tolerance))

    with hooked(m.register_forward_pre_hook(keep) for m in model.modules() if isinstance(m, Attention)):
        model(*given)
    return found


def needed(call: Call) -> list[HeadTiles]:
    """The tiles that each head of a call with one sample needs."""
    found = needed_tiles(call, False)
    if found is None:
        raise ReportError(f"{call.names}: scores of far tokens have no bound, expected pape, pape_ri or alibi")
    return found[0]


def run(folder: Path, out: Path, factor: int, *, split: str = "test", root: str = "", index: int = 0) -> list[Path]:
    """Writes tiles.csv, and tiles-N.png for layer N. factor: times the side that the model was trained at."""
    recipe = fit.load_run(folder)
    model, about = checkpoint.load_weights(folder / "weights.safetensors")
    data = recipe.dataset(split, **larger(recipe, factor), **({"root": root} if root else {}))
    if not 0 <= index < len(data):
        raise ReportError(f"index must be from 0 to {len(data) - 1}, got {index}")
    checkpoint.check_writable(out)
    title = f"{label(about['encoding'])}, sample {index} of {recipe.data.name} {split}, {factor}x the trained side"
    lines, paths = [], [out / "tiles.csv"]
    for layer, call in enumerate(calls(model.eval(), inputs(model, data[index])), 1):
        heads = needed(call)
        lines += [
            (layer, i, "{} x {}".format(*h.needed.shape), f"{float(h.needed.float().mean()):.6g}")
            for i, h in enumerate(heads, 1)
        ]
        term = next(term for term in call.terms if isinstance(term, Relative))
        paths.append(out / f"tiles-{layer}.png")
        at = term.key_positions.r[0][:, [2, 1] if isinstance(model, ViViT) else [0, 1]]  # x and y; time is not shown
        draw(paths[-1], heads, at, title=f"{title}, layer {layer}")
    rows.write(paths[0], COLUMNS, lines)
    return paths


def seen(head: HeadTiles, query: int, at: np.ndarray[Any, Any]) -> tuple[Any, Any, Any]:
    """Places of keys (P, 2), the share of the keys at each that a tile of queries needs, and whether one asks there."""
    tokens, looked = head.keys[head.needed[query]].flatten(), np.zeros(len(at))
    looked[tokens[tokens >= 0].numpy()] = 1.0
    own = np.zeros(len(at))
    own[[i for i in head.queries[query].tolist() if i >= 0]] = 1.0
    there = ~np.isnan(at).any(1)
    where, group = np.unique(at[there], axis=0, return_inverse=True)
    count = np.bincount(group.ravel())
    share, asks = (np.bincount(group.ravel(), values[there]) / count for values in (looked, own))
    return where, share, asks > 0


def draw(path: Path, heads: Sequence[HeadTiles], places: Tensor, *, title: str) -> None:
    """A row for each head: its shares, and maps. places (N, 2): where keys are drawn, to the right and down."""
    from matplotlib.colors import LinearSegmentedColormap

    at = places.double().numpy()
    colours = LinearSegmentedColormap.from_list("needed", [SKIPPED, NEEDED])
    shape = (len(heads), 1 + len(SHOWN))
    figure = new_figure((2.3 * shape[1], 2.2 * shape[0]))
    axes = figure.subplots(*shape, squeeze=False)
    for number, (head, line) in enumerate(zip(heads, axes, strict=True), 1):
        shares = head.needed.float().mean(1).sort().values
        line[0].fill_between(np.linspace(0, 1, len(shares)), shares.numpy(), step="mid", color=NEEDED, linewidth=0)
        line[0].set(ylim=(0, 1), xlim=(0, 1), xticks=[], yticks=[0, 1], yticklabels=["0", "1"])
        line[0].set_ylabel(f"head {number}\nneeds {float(shares.mean()):.1%}", fontsize=9)
        for axis, part in zip(line[1:], SHOWN, strict=True):
            where, share, asks = seen(head, int(part * len(head.queries)), at)
            side = max(1.0, 150 / max(1.0, len(where) ** 0.5))
            axis.scatter(*where.T, c=share, cmap=colours, vmin=0, vmax=1, marker="s", s=side**2, linewidths=0)
            axis.scatter(*where[asks].T, c=QUERY, marker="s", s=side**2, linewidths=0)
            axis.set(aspect="equal", xticks=[], yticks=[])
            axis.invert_yaxis()
    axes[0, 0].set_title("share of tiles needed,\ntiles of queries in order", fontsize=8)
    for axis in axes[0, 1:]:
        axis.set_title("blue: looked at\norange: the queries", fontsize=8)
    figure.suptitle(title, fontsize=9)
    save(figure, path)
