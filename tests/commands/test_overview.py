"""Help by what people want to do, shell completion, and what commands say at their end."""

import io
import shutil
import subprocess

import pytest

from parapos import cli
from parapos.commands import doctor, overview
from parapos.experiments import demo
from parapos.training import recipe
from parapos.training.command import _next_steps


def test_every_command_is_in_one_group_with_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    (action,) = (a for a in cli.parser()._actions if hasattr(a, "choices") and isinstance(a.choices, dict))
    for name, parser in action.choices.items():
        assert sum(name in group for group in overview.GROUPS.values()) == 1, f"{name} belongs to no group"
        example = parser.epilog.removeprefix("example: ")
        assert example.startswith(f"parapos {name}")
        assert out.count(example) == 1
    assert overview.OTHER not in out.splitlines()


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_scripts(shell, capsys):
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "explore" in script
    assert "--position-scale" in script or shell == "tcsh"
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_doctor_says_what_to_do_next():
    there = {"train": {"lightning": "2.6"}, "report": {"matplotlib": "3"}}
    steps = doctor.next_steps(there)
    assert steps[0].startswith("parapos demo ")
    missing = doctor.next_steps({**there, "report": {"matplotlib": None}})
    assert missing[0].startswith("pip install 'parapos[report]'")
    assert not any(line.startswith("parapos demo") for line in missing)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_evaluation_has_a_bar_in_a_terminal(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(demo.shipped_folder() / "pape", run)
    assert cli.main(["eval", str(run), "--split", "val"]) == 0
    assert "evaluating" not in capsys.readouterr().err
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert cli.main(["eval", str(run), "--split", "val"]) == 0
    assert "evaluating" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


@pytest.mark.parametrize("columns", [60, 200])
def test_help_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    commands = cli.parser().format_help().partition("explains a command")[0]
    lines = [line for line in commands.splitlines() if "parapos " not in line]
    assert max(map(len, lines)) <= min(columns, overview.WIDEST)


def test_training_says_where_its_results_are(tmp_path):
    wanted = recipe.load("digits_smoke")
    lines = _next_steps(wanted, tmp_path / "a run")
    assert "metrics.csv" in lines[0]
    assert f"parapos eval '{tmp_path}/a run'" in lines[1]
