"""Helpers for text that every room may use: tables, and hints for misspelt names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint for a misspelt name, or nothing."""
    matches = get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table in columns of equal width; the first `left` of them are flush left, the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        padded = [f"{c:{'<' if i < left else '>'}{widths[i]}}" for i, c in enumerate(cells)]
        return f"| {' | '.join(padded)} |"

    return "\n".join(line(cells) for cells in (header, rule, *rows))
