"""Folders that users name as the root of their data."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from . import FormatError


def check_root(root: str | Path) -> Path:
    """The absolute path of a root, which need not exist; FormatError if links lead back to themselves."""
    path = Path(root).expanduser()
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FormatError(f"{root}: a symbolic link that leads back to itself, expected a folder") from None
    return path.resolve()
