"""Reference outputs of other implementations, in the folder that PARAPOS_GOLDEN names. Without it, such tests skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("PARAPOS_SHARED") or Path(__file__).resolve().parents[2] / "shared")
FOLDER = Path(os.environ.get("PARAPOS_GOLDEN") or SHARED / "golden")
SAMPLES = Path(os.environ.get("PARAPOS_SAMPLES") or SHARED / "samples")


def files(pattern: str) -> pytest.MarkDecorator:
    """Parametrizes `path` over all files of a kind; one skipped case if there are none."""
    found = sorted(FOLDER.glob(pattern)) if FOLDER.is_dir() else []
    cases = [pytest.param(path, id=path.stem) for path in found]
    none = pytest.param(None, marks=pytest.mark.skip(reason=f"no {pattern} in {FOLDER}"), id="none")
    return pytest.mark.parametrize("path", cases or [none])
