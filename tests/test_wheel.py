"""The wheel has all files of the package, and what the demo and the explorer need runs from it alone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import parapos
from parapos import cli
from parapos.analysis import explorer
from parapos.experiments import demo
assert parapos.__file__.startswith({home!r}), parapos.__file__
assert demo.committed().seeds == 8
folder = demo.shipped_folder()
explorer.build([folder / name for name in ("pape", "rope")], __import__("pathlib").Path("page.html"))
cli.main(["demo", "--help"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    builders = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling, which builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(path)


def test_the_wheel_is_the_package(wheel):
    files = {path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {str(path.relative_to(ROOT / "src")) for path in files}
    for needed in ("cells.csv", "pape/weights.safetensors", "pape/recipe.toml", "rope/weights.safetensors"):
        assert f"parapos/shipped/demo/{needed}" in names


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """run(words, cwd): Python with the unpacked wheel instead of the source tree."""
    home = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home)

    def run(script, cwd):
        words = [sys.executable, "-c", script.format(home=str(home))]
        environment = {**os.environ, "PYTHONPATH": str(home)}
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_what_the_demo_needs_is_in_the_wheel(run, tmp_path):
    assert "usage: parapos demo" in run(SCRIPT, tmp_path)
    assert (tmp_path / "page.html").stat().st_size < 3e6


@pytest.mark.full
def test_the_demo_runs_from_the_wheel(run, tmp_path):
    quick = 'from parapos import cli; raise SystemExit(cli.main(["demo", "--quick", "--out", "demo"]))'
    assert "SMOKE TEST, NOT A RESULT" in run(quick, tmp_path)
    assert (tmp_path / "demo" / "extrapolation.png").stat().st_size > 10_000
