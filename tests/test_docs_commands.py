"""Every command that README, docs and tutorials show is one that the command line takes, with the options it has.

`test_docs_commands_run.py` runs them.
"""

from __future__ import annotations

import ast
import re
import shlex

import pytest

from parapos import cli
from parapos.commands import overview
from parapos.commands.base import UserError
from parapos.experiments import hyperparameters, tables
from parapos.experiments.store import ReportError
from parapos.training import recipe
from tests.docs_shrinkage import OTHER_PROGRAMS
from tests.shown_commands import PAGES, ROOT, parser, shown

OUTSIDE = {"my_shift": "none", "window": "none"}  # names that only the plug-in of a page would register


def check(line: str) -> None:
    """Parses a line as a shell would hand it over."""
    for name, known in OUTSIDE.items() if "--plugin" in line else ():
        line = re.sub(rf"\b{name}\b", known, line)
    words = shlex.split(line)
    words = words[next(i for i, word in enumerate(words) if word in ("parapos", "parapos.cli")) + 1 :]
    words = [word for i, word in enumerate(words) if "--plugin" not in (word, words[i - 1] if i else "")]
    if words == ["--help"]:
        return
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
        try:
            check(line)
        except Exception as error:
            raise AssertionError(f"{line}: {error}") from error


FOUND = {
    "    parapos train digits \\\n        --out x   # why\n": ["parapos train digits --out x"],
    "A `parapos eval RUN\n--size 48`, not parapos.\n": ["parapos eval RUN --size 48"],
    "# Command:  parapos prepare gen1 --root d, once, then\n#           parapos train gen1 --data.root d\n": [
        "parapos prepare gen1 --root d",
        "parapos train gen1 --data.root d",
    ],
    "#   command   parapos train demo, or all of it: parapos demo\n": ["parapos train demo", "parapos demo"],
    "    OMP_NUM_THREADS=1 parapos bench points --quick\n": ["OMP_NUM_THREADS=1 parapos bench points --quick"],
    "    torchrun --nproc-per-node 8 -m parapos.cli train digits\n": [
        "torchrun --nproc-per-node 8 -m parapos.cli train digits"
    ],
    "#   then      parapos eval runs/x, and --data y\n": ["parapos eval runs/x"],
    "    parapos eval runs/x --split val        one point per cell\n": ["parapos eval runs/x --split val"],
    "    parapos predict runs/x 'more/*.png'\n": ["parapos predict runs/x 'more/*.png'"],
    "```bash\nparapos explore    # one page\n```\n": ["parapos explore"],
    "parapos is a library, and `parapos COMMAND --help` explains a command.\n": [],
    "parapos trains models.\n    import parapos\n": [],
}


@pytest.mark.parametrize(("text", "commands"), FOUND.items())
def test_commands_are_found(text, commands):
    assert shown(text) == commands


def test_no_line_that_calls_parapos_is_passed_over():
    """Counted in another way: wherever the name stands before that of a command, in code."""
    names = "|".join(name for group in overview.GROUPS.values() for name in group)
    missed = []
    for page in PAGES:
        text = page.read_text()
        lines = " ".join(shown(text))
        for line in re.findall(rf"^(?:    |#  )(.*\bparapos(?:\.cli)? (?:{names})\b.*)$", text, re.M):
            for call in re.findall(rf"\bparapos(?:\.cli)? (?:{names})\b(?: [\w./=-]+)?", line):
                if call.rstrip(".,") not in lines:
                    missed.append((page.name, call))
    assert not missed


def test_wrong_commands_are_refused():
    assert len({line for page in PAGES for line in shown(page.read_text())}) > 180
    for wrong in ("eval RUN --sizes 3", "train digits --optim.epoch 3", "table nothing"):
        with pytest.raises((UserError, recipe.RecipeError, ReportError)):
            check(f"parapos {wrong}")


def other_programs(text: str) -> list[str]:
    """Commands of other programs in code blocks and between backticks; those that take names begin alike."""
    python = r"python -m tools\.\w+|python [\w./-]+\.py|pytest [^`\n]*"
    pattern = rf"(?:^|(?<=`)|(?<=^    ))(make [a-z-]+|pip install|{python}|ovc|trtexec)(?=[ `\n]|$)"
    return re.findall(pattern, text, re.M)


def test_other_programs_are_run_by_a_test_or_have_a_reason():
    found = {command for page in PAGES for command in other_programs(page.read_text())}
    assert found == set(OTHER_PROGRAMS)
    for command, test in OTHER_PROGRAMS.items():
        if "::" in test:
            path, name = test.split("::")
            functions = {
                node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
            }
            assert name in functions, f"{command}: {test}"


def test_make_and_python_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for command in OTHER_PROGRAMS:
        program, _, rest = command.partition(" ")
        if program == "make":
            assert rest in targets
        if program == "python":
            path = f"{rest.removeprefix('-m ').replace('.', '/')}.py" if rest.startswith("-m ") else rest
            assert (ROOT / path).is_file(), command
