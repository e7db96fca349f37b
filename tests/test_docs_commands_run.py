"""Every command that README, docs, tutorials and recipes show is run, in the order of its page.

Each runs once, on the first page that shows it, in a folder of that page; `docs_world.py` puts there what the page
says is there. `docs_shrinkage.py` says what is made smaller, and why.
"""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path

import pytest

from parapos import plugins
from parapos.experiments.store import ReportError
from parapos.training import recipe
from tests.docs_shrinkage import ADDED, CANNOT_RUN, ELSEWHERE, FILLED, PROCESSES, SEEDS, SMALL
from tests.docs_world import FILES, World
from tests.shown_commands import PAGES, ROOT, shown

SAMPLE = ("docs/imagenet.md", "docs/official.md", "examples/new_encoding.py")  # `make test` runs these, too
PLUGINS = ("my_package", "my_package.greys", "my_window")


def first_shown() -> dict[str, list[str]]:
    """Commands by the first page that shows them."""
    known: set[str] = set()
    pages: dict[str, list[str]] = {}
    for page in PAGES:
        lines = [line for line in shown(page.read_text()) if line not in known]
        known.update(lines)
        pages[str(page.relative_to(ROOT))] = lines
    return {page: lines for page, lines in pages.items() if lines}


SHOWN = first_shown()
ALL = [line for lines in SHOWN.values() for line in lines]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def world(tmp_path, cache, monkeypatch, registries):
    yield World(tmp_path, cache, monkeypatch)
    plugins.given.clear()  # a command keeps those of its --plugin until the next one
    for name in PLUGINS:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", [p if p in SAMPLE else pytest.param(p, marks=pytest.mark.full) for p in SHOWN])
def test_commands_run(page, world):
    failed = []
    for line in SHOWN[page]:
        if line in CANNOT_RUN:
            continue
        try:
            world.run(line)
        except AssertionError as error:
            failed.append(f"{line}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.full
def test_the_study_of_forms_runs(world, monkeypatch, capsys):
    """`python docs/results/desk-forms/decay.py RUN ...` on the runs of the table before it."""
    page = (ROOT / "docs/results/desk-forms.md").read_text()
    (line,) = (line.strip() for line in page.splitlines() if line.startswith("    python "))
    _, script, *runs = shlex.split(line)
    world.call(["table", "desk-forms-choice"])
    monkeypatch.setattr(sys, "argv", [script, *runs])
    capsys.readouterr()
    runpy.run_path(script, run_name="__main__")
    out = capsys.readouterr().out
    for run in runs:
        assert Path(run).is_dir()
        assert f"\n{Path(run).name},limit,0.5," in out


def test_nothing_is_listed_that_no_page_shows():
    """What is made smaller, filled in or left out is still there."""
    assert set(CANNOT_RUN) <= set(ALL)
    assert set(FILLED) <= set(ALL)
    assert set(PROCESSES) <= set(ALL)
    assert set(SMALL) == set(recipe.shelf())
    assert all(any(path in line for line in ALL) for path in ELSEWHERE)
    assert all(any(line.startswith(f"parapos table {name} ") for line in ALL) for name in SEEDS)
    plain = [" ".join(word for word in line.split() if not word.startswith("OMP_")) for line in ALL]
    for start, _, reason in ADDED:
        assert any(f"{line} ".startswith(f"parapos {start} ") for line in plain), start
        assert reason
    values = " ".join(value for filled in FILLED.values() for value in filled.values())
    words = {word for line in ALL for word in shlex.split(line)} | set(values.split())
    assert set(FILES) <= words


def test_a_command_that_fails_is_noticed(world):
    for line in ("parapos train digits --optim.epochs 0", "parapos eval runs/none", "parapos table nothing"):
        with pytest.raises((AssertionError, ReportError)):
            world.run(line)


def test_placeholders_are_filled(world):
    for line in ALL:
        if line not in PROCESSES:
            words = world.words(line)
            assert not [word for word in words if word.isupper() or word.startswith("/")], line
