"""`parapos train` and `parapos eval` on the command line: what they take, and what bad input gets."""

import signal

import pytest

from parapos import cli


def test_changes_may_stand_anywhere():
    words = ["train", "--optim.lr", "-1", "digits", "--model.encoding=rope", "--out", "x", "--run.wandb", "a b"]
    assert cli._changes(words) == {"optim.lr": "-1", "model.encoding": "rope", "run.wandb": "a b"}
    assert words == ["train", "digits", "--out", "x"]


def test_the_last_of_several_changes_counts():
    words = ["train", "digits", "--optim.lr=1", "--optim.epochs", "3", "--optim.lr", "2"]
    assert cli._changes(words) == {"optim.lr": "2", "optim.epochs": "3"}
    assert words == ["train", "digits"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train", "the following arguments are required: RECIPE"),
        ("train digits --optim.lr", "expected a value after --optim.lr"),
        ("train digits --fast", "unrecognized arguments: --fast"),
        ("train digit", "did you mean 'digits'"),
        ("train digits --optim.rl 1", "digits.toml: optim.rl: unknown key"),
        ("train digits --run.precision 16-mixed --run.accelerator cpu", "16-mixed needs a GPU"),
        ("train digits --out {here}/file", "expected a folder for the run, got a file"),
        ("train digits --out {here}/x --optim.part 5", "optim.part: expected a divisor of optim.batch = 64, got 5"),
        ("train digits --out {here}/x --run.wandb me", "run.wandb: "),
        ("train {here}", "expected a recipe or the folder of a run, got a folder without recipe.toml"),
        ("eval {here}", "not a run, it has no recipe.toml"),
        ("eval {here} --size 0", "whole number from 1 to 65536, got '0'"),
        ("eval {here} --position-scale", "expected one argument"),
    ],
)
def test_errors_are_one_line(command, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    assert cli.main(command.format(here=tmp_path).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("parapos")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_may_have_the_name_of_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits_smoke").mkdir()  # as `parapos demo` makes a folder demo
    assert cli.main(["train", "digits_smoke", "--optim.epochs", "1"]) == 0
    assert (tmp_path / "runs" / "digits_smoke-pape" / "weights.safetensors").is_file()
    assert list((tmp_path / "digits_smoke").iterdir()) == []
    run = ["train", "digits_smoke", "--out", "digits_smoke", "--optim.epochs", "1"]
    assert cli.main(run) == 0
    assert cli.main(run) == 0, "the same command resumes"
    capsys.readouterr()

    assert cli.main(["train", "digits_smoke", "--optim.epochs", "1"]) == 2
    message = "digits_smoke is a recipe and the folder of a run; write ./digits_smoke to resume the run, or give --out"
    assert message in capsys.readouterr().err
    for folder in ("./digits_smoke", "digits_smoke/"):
        assert cli.main(["train", folder]) == 0
        assert "digits_smoke is finished" in capsys.readouterr().out
    assert cli.main(["train", "./digits_smoke", "--out", "other"]) == 2
    assert "--out: ./digits_smoke is a run already" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits_smoke", "runs"]


@pytest.mark.parametrize("command", ["train", "eval"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"example: parapos {command}" in capsys.readouterr().out


def test_signals_do_afterwards_what_they_did_before(tmp_path):
    """A process that trained can still be ended."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert cli.main(["train", "digits_smoke", "--out", str(tmp_path / "run"), "--optim.epochs", "1"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
