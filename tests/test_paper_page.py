"""docs/paper.md: every item has a command that works with --dry-run, and every option that it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from parapos import cli, recipes
from parapos.experiments import tables
from parapos.training import recipe

PAGE = (Path(__file__).parent.parent / "docs" / "paper.md").read_text(encoding="utf-8")
ITEMS = re.search(r"<!-- items -->\n(.*?)\n<!-- /items -->", PAGE, re.S)[1]
COMMANDS = re.findall(r"^\|[^|]*\| `parapos ((?:figure|table) [^`]*)` \|", ITEMS, re.M)


def test_every_item_has_a_command() -> None:
    assert len(ITEMS.splitlines()) - 2 == len(COMMANDS) + 1  # polynomials have no figure
    named = {command.split()[1] for command in COMMANDS}
    desk = {name for name in recipes.shelf("tables") if tables.load(name).seeds}
    assert named >= {"1a", "1b", "1c", "2", "heads", "hyperparameters"} | set(recipes.shelf("tables")) - desk


@pytest.mark.parametrize("command", COMMANDS)
def test_dry_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*shlex.split(command), "--dry-run"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("imagenet", {"optim.schedule": "onecycle"}),
        ("imagenet", {"model.encoding": "lookhere", "model.options.schedule": "linear"}),
        ("imagenet", {"data.options.split_seed": "3"}),
        ("imagenet", {"model.name": "vit_official_small_patch16"}),
        ("imagenet", {"data.options.normalize": "true"}),
        ("imagenet", {"model.encoding": "pape_ri", "model.options.learn_wp": "true"}),
        (
            "imagenet",
            {"model.encoding": "rope_mixed", "model.options.param": "frequency", "model.options.init": "rotated"},
        ),
        ("imagenet", {"model.encoding": "rope_mixed", "model.options.param": "frequency"}),
        ("imagenet", {"model.encoding": "polynomial", "model.options.key_dependent": "true"}),
        ("imagenet", {"run.precision": "bf16-mixed"}),
        ("ucf101", {"data.options.spacing": "gaps"}),
        ("ucf101", {"data.options.pixel_scale": "unit"}),
    ],
)
def test_alternatives_are_options(name: str, change: dict[str, str]) -> None:
    key, value = list(change.items())[-1]
    assert f"--{key} {value if key != 'data.options.split_seed' else 'N'}" in PAGE
    assert recipe.load(name, change) != recipe.load(name)
