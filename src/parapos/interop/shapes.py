"""Names and shapes of weights, compared before memory is taken for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mismatch(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """The first weight whose name or shape is not the wanted one."""
    for name in dict.fromkeys([*wanted, *found]):
        a, b = ([*x[name].shape] if name in x else "none" for x in (wanted, found))
        if a != b:
            return f"weight {name}: expected {a}, got {b}"
    return None
