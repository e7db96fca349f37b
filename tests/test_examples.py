"""The tutorials run to their end, and each is on the site."""

from __future__ import annotations

import importlib.util
import os
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAST = ("idea", "own_attention", "new_encoding", "key_cache")
NEEDS = {"timm_model": ("timm", "transformers", "parapos.interop.timm"), "detection": ("faster_coco_eval",)}
NEEDS |= {"video": ("av",), "events": ("numba",)}
SCRIPTS = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize(
    "script", [s if s in FAST else pytest.param(s, marks=pytest.mark.full) for s in SCRIPTS]
)  # the others train, which takes longer
@pytest.mark.usefixtures("registries")
def test_tutorials_run(script, tmp_path, monkeypatch):
    for module in NEEDS.get(script, ()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    assert os.getcwd() == str(tmp_path)


def test_tutorials_begin_with_what_they_give():
    for script in SCRIPTS:
        text = (ROOT / "examples" / f"{script}.py").read_text()
        if script != "key_cache":
            assert text.startswith("# %% [markdown]\n# # "), script
            assert "\n# After this page " in text, script


def test_tutorials_are_on_the_site():
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    (listed,) = (part["Tutorials"] for part in config["project"]["nav"] if "Tutorials" in part)
    assert sorted(Path(next(iter(page.values()))).stem for page in listed) == SCRIPTS
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    assert all(f"../examples/{script}.py" in gallery for script in SCRIPTS)
