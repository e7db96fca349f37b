"""Commands that README, docs, tutorials and recipes show."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

from parapos import cli

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES += [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "src/parapos/recipes").rglob("*.toml"))]
PLACEHOLDERS = {"COMMAND", "NAME", "RECIPE", "EXTRA"}  # a command that names one shows a form, not a call

CALL = re.compile(r"(?:^|(?<=[\s:]))(?:OMP_NUM_THREADS=\d+ |torchrun [^`\n]*?-m )?parapos(?:\.cli)? (?=[a-z-])")
BLOCK = re.compile(r"^(?:    |# {2,}|# Command: |\$ |(?=parapos |torchrun ))", re.M)  # of code or of a comment
REMARK = re.compile(r"\s{3,}|, (?:or|with|then|once|and|which)\b|;|,$| before | > |\s#|\.$", re.M)

parser = cache(cli.parser)


def is_call(words: list[str]) -> bool:
    """Whether words of a line are a command, and not a sentence that begins with the name of the package."""
    (action,) = (a for a in parser()._actions if hasattr(a, "choices") and isinstance(a.choices, dict))
    place = next(i for i, word in enumerate(words) if word in ("parapos", "parapos.cli")) + 1
    is_known = place < len(words) and (words[place] in action.choices or words[place] == "--help")
    return is_known and not PLACEHOLDERS & set(words) and "..." not in words


def shown(text: str) -> list[str]:
    """Commands in code blocks, in comments of recipes and scripts, and between backticks, without remarks behind them,
    in the order of the page."""
    text = re.sub(r"\\\n\s*#?\s*", "", text)  # a line that continues
    found: list[tuple[int, str]] = []
    for line in re.finditer(r"^.*$", text, re.M):
        if BLOCK.match(line[0]):
            starts = [match.start() for match in CALL.finditer(line[0])]
            for start, end in zip(starts, [*starts[1:], None], strict=False):
                found.append((line.start() + start, REMARK.split(line[0][start:end])[0]))
    for span in re.finditer(r"`((?:OMP_NUM_THREADS=\d+ )?parapos [a-z-][^`]*)`", text):
        found.append((span.start(1), REMARK.split(re.sub(r"\s*\n(?:# *)?\s*", " ", span[1]))[0]))
    lines = [shlex.join(shlex.split(line)) for _, line in sorted(found)]
    return [line for line in dict.fromkeys(lines) if is_call(line.split())]
