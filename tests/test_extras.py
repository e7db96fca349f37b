"""What the package imports, an extra brings; what an extra lists, the package imports or a reason stands here."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = {"scikit-learn": "sklearn", "faster-coco-eval": "faster_coco_eval", "tomli-w": "tomli_w", "pillow": "PIL"}
THROUGH = {  # not imported by name, but by what is
    "tensorboard": "lightning writes its files with it",
    "onnxscript": "torch.onnx.export needs it",
    "onnxruntime": "runs what was exported",
    "onnx": "torch.onnx.export needs it",
}
COMPARED = {"pycocotools", "spconv"}  # benchmarks measure against them where they are installed
BROUGHT = {"numpy": "scikit-learn", "PIL": "torchvision", "packaging": "lightning"}  # by a package of an extra


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {"": project["dependencies"], **project["optional-dependencies"]}
    names = {extra: [re.match(r"[\w.-]+", line)[0] for line in lines] for extra, lines in found.items()}
    return {extra: [name for name in lines if name != "parapos"] for extra, lines in names.items()}


@cache
def imported(folder: Path) -> dict[str, str]:
    """Top-level packages that the files of a folder import, and one that does."""
    found: dict[str, str] = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], str(file.relative_to(ROOT)))
    return {name: file for name, file in found.items() if name not in sys.stdlib_module_names and name != "parapos"}


def test_every_import_has_an_extra():
    known = {
        MODULES.get(name, name) for extra, names in extras().items() if extra not in ("dev", "docs") for name in names
    }
    missing = {
        name: file for name, file in imported(ROOT / "src").items() if name not in known | COMPARED | set(BROUGHT)
    }
    assert not missing


def test_every_extra_is_imported():
    package, tools = imported(ROOT / "src"), imported(ROOT / "tools") | imported(ROOT / "tests")
    for extra, names in extras().items():
        if extra == "dev":
            continue
        used = package if extra != "docs" else package | tools | {"zensical": "", "mkdocstrings-python": ""}
        for name in names:
            assert MODULES.get(name, name) in used or name in THROUGH, f"{extra} lists {name}, which nothing imports"


def test_reasons_are_needed():
    """A reason whose package is gone from the extras, or is imported after all, is out of date."""
    listed = {name for names in extras().values() for name in names}
    assert set(THROUGH) <= listed
    assert set(BROUGHT) <= set(imported(ROOT / "src")) | {"packaging"}
