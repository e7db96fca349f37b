"""A run that nothing disturbed. `parapos` runs commands in forked processes: see tests/conftest.py."""

import pytest


@pytest.fixture(scope="session")
def parapos(forked):
    """parapos("train", ..., log=path, **death): runs a command, gives its exit code and what it said."""
    return forked


@pytest.fixture(scope="session")
def straight(parapos, tmp_path_factory):
    """The folder of a short run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    code, told = parapos("train", "digits_smoke", "--out", folder, log=folder.parent / "log")
    assert code == 0, told
    assert "is finished" in told
    return folder
