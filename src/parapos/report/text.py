"""Tables as text: aligned for a terminal, and valid markdown at the same time."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Cells in columns of equal width; the first `left` columns are flush left, the others flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        padded = [f"{c:{'<' if i < left else '>'}{widths[i]}}" for i, c in enumerate(cells)]
        return f"| {' | '.join(padded)} |"

    return "\n".join(line(cells) for cells in (header, rule, *rows))
