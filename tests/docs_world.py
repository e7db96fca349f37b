"""A folder in which the commands of a page run: generated data, files and tiny runs lie where the page has them."""

from __future__ import annotations

import gzip
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image

from parapos import cli, recipes
from parapos.data import coco_tree, nuscenes_tree
from parapos.data.preparations import PREPARATIONS
from parapos.data.readers import off
from parapos.data.synthetic import pattern, write_cifar10, write_imagenet
from parapos.experiments import schedule, tables_spec
from parapos.training import recipe
from tests.docs_shrinkage import (
    ADDED,
    BENCH,
    DESK_IMAGES,
    ELSEWHERE,
    FILLED,
    ONE_DEVICE,
    ONE_WORKER,
    PROCESSES,
    SEEDS,
    SHORT,
    SMALL,
)
from tests.interop.test_official import DIM, weights
from tests.interop.test_published import config_of, publish
from tests.shown_commands import ROOT

TRUE_SHELF = ("--from-cache", "hyperparameters")  # commands that read what is committed, and train nothing
RUNS = {"runs/rooms": "rooms_desk", "runs/shapes": "shapes_desk"}  # others are named after their recipe


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, name = key.split(".")
        place = values
        for table in tables:
            place = place.setdefault(table, {})
        place[name] = value
    return values


def write_shelves(folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Recipes and tables with the names of the shipped ones, and less to do."""
    small, tables = {}, {}
    for name, path in recipe.shelf().items():
        small[name] = folder / f"{name}.toml"
        small[name].write_text(tomli_w.dumps({"extends": str(path), **nested({**SMALL[name], **SHORT})}))
    (folder / "tables").mkdir()
    for name, path in recipes.shelf("tables").items():
        text = path.read_text()
        if name in SEEDS:
            text = re.sub(r"^seeds = \[(\d+).*\]", r"seeds = [\1]", text, flags=re.M)
        if name == "efficiency":
            bench = {"encodings": ["none", "rope", "pape"], "batch": 1, **BENCH}
            text = tomli_w.dumps({"title": "Cost of encodings", "bench": bench})
        tables[name] = folder / "tables" / f"{name}.toml"
        tables[name].write_text(text)
    return small, tables


class World:
    """Runs commands of a page in a folder. cache: a folder that worlds share, for data and runs that several need."""

    def __init__(self, folder: Path, cache: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.cache, self.patch = folder, cache, patch
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        (shelf := folder / ".shelf").mkdir()
        self.recipes, self.tables = write_shelves(shelf)
        run_all = schedule.run_all
        patch.setattr(
            schedule, "run_all", lambda jobs, count, *more, **options: run_all(jobs, 0, *more, **options)
        )  # pools: test_schedule.py
        patch.setattr("parapos.bench.model.PROCESSES", 1)
        for split, count in DESK_IMAGES.items():
            patch.setitem(coco_tree.DESK_IMAGES, split, count)
        shutil.copytree(ROOT / "docs" / "results", folder / "docs" / "results")

    def run(self, line: str) -> None:
        """A command as a page shows it; it must end well."""
        if line in PROCESSES:
            self.provide(["data/imagenet"])
            self.run_processes(line)
            return
        words = self.words(line)
        if not any(word in words for word in ("--synthetic", "--help")):
            self.provide(words)
        self.call(words)

    def words(self, line: str) -> list[str]:
        """What is run for a command: without the program, with what the tables add and fill in."""
        for name, value in {"RUN": "runs/digits-pape", **FILLED.get(line, {})}.items():
            line = re.sub(rf"(?<= ){name}\b", value, line)
        for path, other in ELSEWHERE.items():
            line = line.replace(path, other)
        words = shlex.split(line)
        words = words[words.index("parapos") + 1 :]
        if len(words) == 1 and words[0] in ("train", "eval", "predict", "analyze", "import", "export"):
            return [*words, "--help"]  # named in a sentence, without what it works on
        if words[0] == "table" and not {"--from-cache", "hyperparameters", "efficiency"} & set(words):
            words += ["--only", self.rows(words[1])]
        if "--workers" in words:
            words += shlex.split(ONE_WORKER)
        if "--run.devices" in words:
            words += shlex.split(ONE_DEVICE)
        plain = re.sub(r"--plugin \S+ ", "", " ".join(words))
        added = next((more for start, more, _ in ADDED if f"{plain} ".startswith(f"{start} ")), "")
        return [*words, *(added.split() if "--synthetic" not in words else [])]

    def rows(self, name: str) -> str:
        """Rows of a table that stand for all: those that it compares, or the first of PaPE."""
        table = tables_spec.load(name)
        if table.compare is not None:
            return ",".join(table.compare.rows)
        return next((row for row in table.rows if "pape" in row), next(iter(table.rows)))

    def call(self, words: list[str]) -> None:
        with self.patch.context() as patch:
            if not any(word in words for word in TRUE_SHELF):
                patch.setattr(recipes, "shelf", lambda folder=".": self.tables if folder == "tables" else self.recipes)
            try:
                code = cli.main(list(words))
            except SystemExit as stop:
                code = stop.code
        assert code in (0, None), f"parapos {shlex.join(words)} ended with {code}"

    def run_processes(self, line: str) -> None:
        changes = [
            word for key, value in {**SMALL["imagenet"], **SHORT}.items() for word in (f"--{key}", str(value).lower())
        ]
        words = [*shlex.split(line), *changes]
        if words[0] == "torchrun":
            words[:1] = [sys.executable, "-m", "torch.distributed.run"]
            words[words.index("--nproc-per-node") + 1] = "2"
            words += ["--out", "runs/torchrun", "--run.devices", "2"]
        else:
            words[:1] = [sys.executable, "-m", "parapos"]
            words += ["--out", "runs/devices", "--run.devices", "2"]
        done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"

    def provide(self, words: list[str]) -> None:
        """Makes data, files and runs that a command names and that are not there yet."""
        outs = {value for word, value in pairwise(words) if word in ("--out", "--predictions", "--cache")}
        named = [word for word in words if word not in outs] + self.roots(words)
        for word in dict.fromkeys(named):
            if word in FILES and not Path(word).exists() and not list(Path().glob(word)):
                FILES[word](Path(word))
            if word == "data":
                self.provide([f"data/{name}" for name in ("ucf101", "dvsgesture", "gen1", "imagenet", "coco")])
                self.provide([f"data/{name}" for name in ("scannet", "modelnet40", "nuscenes")])
            if (match := re.match(r"data/[a-z0-9_]+", word)) and match[0] != "data/coco_desk":
                self.provide_data(match[0], is_prepared=words[0] != "prepare")
            if match := re.fullmatch(r"(runs/[\w-]+)(/recipe.toml)?", word):
                self.provide_run(match[1])

    def roots(self, words: list[str]) -> list[str]:
        """Folders of data that recipes name, if the command names none."""
        if words[0] == "prepare" and "--root" not in words:
            return [f"data/{words[1]}"]
        names: list[str] = []
        if "--data.root" in words or "--from-cache" in words:
            return []
        if words[0] == "train":
            names = [words[1]]
        if words[0] == "table" and words[1] in recipes.shelf("tables"):
            table = tables_spec.load(words[1])
            names = [table.recipe, *table.blocks.values(), *(column.recipe for column in table.columns.values())]
        known = recipe.shelf()
        return [recipe.load(name).data.root for name in names if name in known]

    def provide_data(self, path: str, *, is_prepared: bool) -> None:
        if Path(path).exists():
            return
        name = path.removeprefix("data/").removesuffix("_tiny").removesuffix("_gaps")
        kept = self.cache / ("prepared" if is_prepared else "raw") / path
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            if path in DATA:
                DATA[path](kept)
            else:
                import_module(PREPARATIONS[name].module).synthetic(kept)
            if is_prepared and name in PREPARATIONS:
                self.call(self.words(f"parapos prepare {name} --root {kept}"))
        shutil.copytree(kept, path)

    def provide_run(self, path: str) -> None:
        if Path(path).exists():
            return
        kept = self.cache / path
        if not kept.exists():
            name = path.removeprefix("runs/")
            source = RUNS.get(path, name if name in self.recipes else name.rpartition("-")[0])
            assert source in self.recipes, f"{path} is not there, and no recipe has this name"
            words = ["train", source, "--out", path]
            if source != name and path not in RUNS:
                words += ["--model.encoding", name.rpartition("-")[2]]
            self.provide(words)
            self.call(words)
            shutil.copytree(path, kept)
            return
        shutil.copytree(kept, path)


def draw_image(path: Path, *, side: int = 160, label: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pattern(label, 4, (side, side), torch.Generator().manual_seed(label))
    Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()).save(path)


def draw_folder(folder: Path) -> None:
    for i in range(2):
        draw_image(folder / f"{i}.png", label=i)


def draw_classes(folder: Path) -> None:
    for label in range(3):
        for i in range(10):
            draw_image(folder / f"class{label}" / f"{i}.png", side=40, label=label)


def draw_digits(folder: Path) -> None:
    """Images of the classes that the recipe digits has."""
    for label in range(10):
        for split in ("train", "test"):
            draw_image(folder / split / str(label) / "0.png", side=40, label=label % 4)


def write_room(path: Path) -> None:
    """Points of a box in ASCII, without colours and normals."""
    path.parent.mkdir(parents=True, exist_ok=True)
    points = np.random.default_rng(0).uniform(0, (3, 3, 2), (400, 3))
    lines = ["ply", "format ascii 1.0", f"element vertex {len(points)}", *(f"property float {axis}" for axis in "xyz")]
    rows = [" ".join(f"{value:.3f}" for value in point) for point in points]
    path.write_text("\n".join([*lines, "end_header", *rows]) + "\n")


def write_chair(path: Path) -> None:
    corners = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)], np.float64)
    faces = np.array([[0, 1, 3], [0, 3, 2], [4, 6, 7], [4, 7, 5], [0, 4, 5], [0, 5, 1], [2, 3, 7], [2, 7, 6]])
    off.write(path, corners, faces)


def write_fashion(root: Path) -> None:
    """Few images in idx files, packed as the true ones."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for kind, count in (("train", 600), ("t10k", 60)):
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", (np.arange(count) % 10).astype(np.uint8))):
            data = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
            (root / f"{kind}-{name}-ubyte.gz").write_bytes(gzip.compress(data, 1))


def write_nuscenes(root: Path) -> None:
    """The generated copy as the full data set is: trainval, and a scene for testing, whose boxes are not given."""
    nuscenes_tree.write_tiny(root)
    (root / "v1.0-mini").rename(root / "v1.0-trainval")
    writer = nuscenes_tree.Writer(root, "v1.0-test")
    writer.constants()
    writer.scene(nuscenes_tree.Scene("scene-0077", 2, 2))
    logs = [row["token"] for row in writer.tables["log"]]
    writer.add("map", token="map", log_tokens=logs, category="semantic_prior", filename="maps/plain.png")
    writer.tables |= {"instance": [], "sample_annotation": []}
    writer.finish()


DATA: dict[str, Any] = {  # other copies than those of `prepare --synthetic`
    "data/cifar10": write_cifar10,
    "data/fashion_mnist": write_fashion,
    "data/imagenet": lambda root: write_imagenet(root, test=1),  # less to judge at 1024 pixels
    "data/nuscenes": write_nuscenes,
}


def write_published(folder: Path) -> None:
    """A network of the authors' release, with the twelve classes of the generated ImageNet."""
    state = weights("pape")
    state["classifier.weight"], state["classifier.bias"] = torch.randn(12, DIM), torch.zeros(12)
    publish(folder, config_of("imagenet", "pape"), state)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)


def write_plugin(path: Path) -> None:
    """The module of the page on extending, without the part that runs it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(block for block in blocks("docs/extending.md", "python") if "fit.train" not in block))


def write_recipe(path: Path) -> None:
    write_plugin(Path("my_package/greys.py"))
    path.write_text(blocks("docs/extending.md", "toml")[0])


def write_window(path: Path) -> None:
    """The encoding of the tutorial."""
    text = (ROOT / "examples/new_encoding.py").read_text()
    Path("my_window.py").write_text(
        text[: text.index("register_encoding") + text[text.index("register_encoding") :].index("\n")]
    )


FILES: dict[str, Any] = {
    "photos/": draw_folder,
    "more/*.png": lambda path: draw_folder(path.parent),
    "holiday.jpg": draw_image,
    "photo.jpg": draw_image,
    "photos_by_class": draw_classes,
    "digits_folder": draw_digits,
    "my_room.ply": write_room,
    "scans/": lambda path: write_room(path / "one.ply"),
    "chair.off": write_chair,
    "published/imagenet-pape": write_published,
    "my_recipe.toml": write_recipe,
    "my_package.greys": lambda path: write_plugin(Path("my_package/greys.py")),
    "my_window": write_window,
    "demo/data": lambda path: draw_splits(path),
}


def draw_splits(folder: Path) -> None:
    for split in ("train", "val", "test"):
        draw_classes(folder / split)
