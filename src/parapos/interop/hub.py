"""Runs on the Hugging Face Hub, or in any folder of the same form: weights as safetensors, the recipe, a model card."""

from __future__ import annotations

import csv
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .. import __version__
from ..training import checkpoint, fit
from ..training.recipe import Recipe

WEIGHTS, RECIPE, CARD, EVALUATIONS = "weights.safetensors", "recipe.toml", "README.md", "evaluations.csv"
FILES = (WEIGHTS, RECIPE, CARD, EVALUATIONS)
PIPELINES = {"classification": "image-classification", "detection": "object-detection"}
ABOUT_ROW = ("data", "split", "size", "position_scale", "samples")  # of evaluations.csv, beside its metrics
CITATION = """\
@article{ohrstrom2026parabolic,
  title  = {Parabolic Position Encoding: Vision-Centric, Principled, Extrapolatable, General},
  author = {{\\O}hrstr{\\o}m, Christoffer Koo and Cabral Muchacho, Rafael I. and Dong, Yifei and Moumtzidellis, Filippos
            and G{\\"u}ldenring, Ronja and Pokorny, Florian T. and Nalpantidis, Lazaros},
  year   = {2026}
}
"""


def save(run: str | Path, folder: str | Path, *, license: str | None = None) -> Path:
    """Writes what a hub shows of a run: its weights, recipe and evaluations, and a model card. Gives the folder."""
    run, folder = Path(run), Path(folder)
    wanted = fit.load_run(run)
    model, about = checkpoint.load_weights(run / WEIGHTS)  # strictly: what does not load is not published
    checkpoint.check_writable(folder)
    shutil.copyfile(run / WEIGHTS, folder / WEIGHTS)
    checkpoint.write(folder / RECIPE, wanted.dumps().encode())
    if (run / EVALUATIONS).is_file():
        shutil.copyfile(run / EVALUATIONS, folder / EVALUATIONS)
    card = model_card(wanted, about, model, _evaluations(run / EVALUATIONS), license=license)
    checkpoint.write(folder / CARD, card.encode())
    return folder


def push_to_hub(
    run: str | Path, repo_id: str, *, private: bool = False, license: str | None = None, api: Any = None
) -> str:
    """Uploads a run and gives its address. api: a `huggingface_hub.HfApi`, by default one with your own login."""
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    with tempfile.TemporaryDirectory() as scratch:
        folder = save(run, Path(scratch) / "model", license=license)
        api.create_repo(repo_id=repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=str(folder), allow_patterns=list(FILES)))


def from_pretrained(name: str | Path, *, revision: str | None = None) -> nn.Module:
    """The model of a folder, or of a repository on the hub by its name, in evaluation mode.

    Weights are safetensors alone, and every one must be there; nothing else of a repository is fetched but its recipe.
    """
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(str(name), revision=revision, allow_patterns=[WEIGHTS, RECIPE]))
    elif revision is not None:
        raise ValueError(f"revision is for repositories on the hub, {folder} is a folder")
    return checkpoint.load_weights(folder / WEIGHTS)[0]


def model_card(
    wanted: Recipe,
    about: Mapping[str, Any],
    model: nn.Module,
    evaluations: list[dict[str, str]],
    *,
    license: str | None = None,
) -> str:
    """Markdown with the metadata that the hub reads. Figures are those of the run's own evaluations, with the command
    that printed each."""
    head = ["library_name: parapos", "tags:", "- parapos", f"- {about['encoding']}", "- vision"]
    head += [f"license: {license}"] if license else []
    head += [f"pipeline_tag: {PIPELINES[wanted.task_name]}"] if _takes_images(wanted, model) else []
    size = sum(p.numel() for p in model.parameters())
    options = ", ".join(f"{key} {value}" for key, value in about["options"].items()) or "none"
    optim = wanted.optim
    text = [
        "---", *head, "---", "",
        f"# {about['model']} with {about['encoding']} on {wanted.data.name}", "",
        f"{size:,} parameters, written by parapos {__version__}.", "",
        "```python", "import parapos", 'model = parapos.interop.hub.from_pretrained("NAME OR FOLDER")', "```", "",
        "## Recipe", "",
        f"- model: {about['model']}; options: {options}",
        f"- encoding: {about['encoding']}",
        f"- training: {optim.epochs} epochs of batches of {optim.batch}, AdamW at {optim.lr:g}, weight decay "
        f"{optim.weight_decay:g}, seed {wanted.run.seed}",
        "- all of it: recipe.toml, which `parapos train recipe.toml` follows", "",
        "## Data", "",
        f"{wanted.data.name}, task {wanted.task_name}"
        + (f", at {_size(wanted.data.size)} pixels." if wanted.data.size else "."), "",
        "## Metrics", "", *_metrics(wanted, evaluations), "",
        "## Citation", "", "```bibtex", CITATION.rstrip(), "```", "",
    ]  # fmt: skip
    return "\n".join(text)


def _takes_images(wanted: Recipe, model: nn.Module) -> bool:
    inputs = getattr(model, "inputs", ("image",))
    return wanted.task_name in PIPELINES and "image" in inputs


def _size(size: int | tuple[int, int] | list[int]) -> str:
    return str(size) if isinstance(size, int) else "x".join(map(str, size))


def _evaluations(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _metrics(wanted: Recipe, evaluations: list[dict[str, str]]) -> list[str]:
    """A table, one row per evaluation, and the command that printed each."""
    if not evaluations:
        return ["This run was not evaluated."]
    names = [name for name in evaluations[0] if name not in ABOUT_ROW and "." not in name]
    columns = ["data", "split", "size", *names, "command"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in evaluations:
        command = ["parapos", "eval", "RUN", "--split", row.get("split", "test")]
        command += ["--data", row["data"]] if row.get("data", wanted.data.name) != wanted.data.name else []
        command += ["--size", row["size"]] if row.get("size", "0") not in ("0", "") else []
        scale = row.get("position_scale") or "1.0"
        command += ["--position-scale", scale] if float(scale) != 1 else []
        for key, value in row.items():  # options of the task
            command += [f"--{key}", value] if key and "." in key and value else []
        cells = [row.get(name) or "" for name in ("data", "split", "size")]
        cells += [f"{float(row[name]):.4f}" if row.get(name) else "" for name in names]
        lines.append("| " + " | ".join([*cells, f"`{shlex.join(command)}`"]) + " |")
    return lines
