"""Every command that README, docs and tutorials show is one that the command line takes, with the options it has."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from parapos import cli
from parapos.commands.base import UserError
from parapos.experiments import hyperparameters, tables
from parapos.experiments.store import ReportError
from parapos.training import recipe

ROOT = Path(__file__).parent.parent
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *(ROOT / "docs").rglob("*.md")]
PAGES += [*(ROOT / "examples").glob("*.py"), *(ROOT / "src/parapos/recipes").rglob("*.toml")]
OUTSIDE = {"my_shift": "none", "window": "none"}  # names that only the plug-in of a page would register
PLACEHOLDERS = {"COMMAND", "NAME", "RECIPE", "EXTRA"}  # a command that names one shows a form, not a call


def shown(text: str) -> list[str]:
    """Commands in code blocks, in comments of recipes and scripts, and between backticks."""
    text = re.sub(r"\\\n\s*#?\s*", "", text)  # a line that goes on
    blocks = re.findall(r"^(?:#?\s{2,}|\$ )?(?:command\s+)?(parapos [a-z].*)$", text, re.M)
    inline = re.findall(r"`(parapos [a-z][^`]*)`", re.sub(r"\n(?:# )?", " ", text))
    return [re.sub(r"\s+", " ", line) if line in inline else line for line in (*blocks, *inline)]


parser = cache(cli.parser)


def is_call(words: list[str]) -> bool:
    """Whether words of a line are a command, and not a sentence that begins with the name of the package."""
    (action,) = (a for a in parser()._actions if hasattr(a, "choices") and isinstance(a.choices, dict))
    return len(words) > 1 and words[1] in action.choices and not PLACEHOLDERS & set(words) and "..." not in words


def check(line: str) -> None:
    """Parses a line as a shell would hand it over, without the remark behind it."""
    for name, known in OUTSIDE.items() if "--plugin" in line else ():
        line = re.sub(rf"\b{name}\b", known, line)
    words = shlex.split(re.split(r"\s{3,}|, or |, with |;| before | > ", line)[0], comments=True)[1:]
    words = [word for i, word in enumerate(words) if "--plugin" not in (word, words[i - 1] if i else "")]
    if words[0] == "train":
        cli._unalias(words)
    changes = cli._changes(words) if words[0] in ("train", "eval", "table", "sweep") else {}
    try:
        args = parser().parse_args(words)
    except UserError as error:
        if "arguments are required" in str(error):  # named in a sentence, without what it works on
            return
        raise
    if words[0] == "train" and (ROOT / "src/parapos/recipes" / f"{args.recipe}.toml").is_file():
        recipe.load(args.recipe, changes)
    if words[0] == "table" and not args.name.endswith(".toml") and args.name != hyperparameters.NAME:
        tables.check_changes(tables.load(args.name), changes)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_taken(page):
    for line in shown(page.read_text()):
        if is_call(line.split()):
            try:
                check(line)
            except Exception as error:
                raise AssertionError(f"{line}: {error}") from error


def test_commands_are_found():
    text = "    parapos train digits \\\n        --out x   # why\n\nA `parapos eval RUN\n--size 48`, not parapos.\n"
    assert [line.split() for line in shown(text)] == [
        ["parapos", "train", "digits", "--out", "x", "#", "why"],
        ["parapos", "eval", "RUN", "--size", "48"],
    ]
    assert sum(is_call(line.split()) for page in PAGES for line in shown(page.read_text())) > 150
    for wrong in ("parapos eval RUN --sizes 3", "parapos train digits --optim.epoch 3", "parapos table nothing"):
        with pytest.raises((UserError, recipe.RecipeError, ReportError)):
            check(wrong)


def test_make_and_python_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M):
            assert target in targets, f"{page}: make {target}"
        for module in re.findall(r"python -m (tools\.\w+)", text):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), f"{page}: {module}"
        for script in re.findall(r"python ([\w./-]+\.py)", text):
            assert (ROOT / script).is_file(), f"{page}: {script}"
