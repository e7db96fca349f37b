"""Fills marked blocks of README and docs from files, so that no figure is typed by hand: python -m tools.blocks.

A block begins with a comment that names a file of this repository, and ends with the same comment and a slash. What
stands between is the file: Markdown as it is, text as code. `tests/test_docs.py` holds the pages to it.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"<!-- (benchmarks/[\w./-]+) -->\n(.*?)<!-- /\1 -->\n", re.S)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with its blocks as the files are now."""

    def block(match: re.Match[str]) -> str:
        path = ROOT / match[1]
        content = path.read_text().rstrip("\n")
        content = content if path.suffix == ".md" else f"```text\n{content}\n```"
        return f"<!-- {match[1]} -->\n{content}\n<!-- /{match[1]} -->\n"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text()))
