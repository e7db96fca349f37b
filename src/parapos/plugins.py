"""Extensions from outside of the package: modules that register encodings, models, datasets and tasks when imported.

A recipe names them as `plugins = ["my_package.my_module"]`, a command line as `--plugin my_package.my_module`, and an
installed package as an entry point of the group "parapos", which every command loads. Importing parapos loads none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module, metadata

GROUP = "parapos"
given: list[str] = []  # modules that the command line names: recipes made after it name them too


class PluginError(ValueError):
    """A plug-in cannot be loaded. The message names it and says why."""


def load(names: Sequence[str]) -> None:
    """Loads the installed plug-ins, then the modules of these names. A loaded module is not loaded again."""
    load_installed()
    for name in names:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            advice = "install it, or put its folder into PYTHONPATH"
            raise PluginError(f"cannot import {name!r}: {error}; {advice}") from None
        except Exception as error:  # whatever the module does
            raise PluginError(f"cannot import {name!r}: {type(error).__name__}: {error}") from error


@cache
def load_installed() -> None:
    """Loads the entry points of installed packages, once. One that fails is reported on stderr; the others load."""
    for entry in metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # whatever the module does
            print(f"parapos: plug-in {entry.name} ({entry.value}): {type(error).__name__}: {error}", file=sys.stderr)
