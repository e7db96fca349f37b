"""Generated data sets that are written when they are first asked for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from . import FormatError


def ensure(root: str | Path, marker: str, write: Callable[[Path], object]) -> None:
    """Has `write` make the folder, unless what `marker` names is in it. Several processes may ask at once: whoever is
    first moves a whole folder into place."""
    root = Path(root)
    if (root / marker).exists():
        return
    part = root.with_name(f".{root.name}.{os.getpid()}.part")
    write(part)
    try:
        if root.is_dir():
            root.rmdir()  # an empty one may be there
        part.rename(root)
    except OSError:
        if not (root / marker).exists():
            raise FormatError(f"{root}: not empty, expected a new folder or the generated data set") from None
        shutil.rmtree(part)
