"""Fills marked blocks of README and docs, so that no figure is typed by hand: python -m tools.blocks.

A block begins with a comment that names a file of this repository or a function of tools/figures.py (as `made: cost`),
and ends with the same comment and a slash. What stands between is the file, Markdown as it is and text as code, or what
the function returns. `tests/test_docs.py` holds the pages to it.
"""

from __future__ import annotations

import re
from pathlib import Path

from tools import figures

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"<!-- (benchmarks/[\w./-]+|made: \w+) -->\n(.*?)<!-- /\1 -->\n", re.S)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with its blocks as the files are now."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{_content(match[1])}\n<!-- /{match[1]} -->\n"

    return BLOCK.sub(block, text)


def _content(source: str) -> str:
    if source.startswith("made: "):
        return figures.MADE[source.removeprefix("made: ")]()
    path = ROOT / source
    content = path.read_text().rstrip("\n")
    return content if path.suffix == ".md" else f"```text\n{content}\n```"


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text()))
