"""Training in processes of its own: one that stays and forks, so that each test need not import everything again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def environment():
    """One thread per process: tests share the cores, and bits must not depend on how many there are. The plug-in of the
    tests can be imported."""
    toy = str(Path(__file__).parents[1] / "plugins" / "toy_boxes")
    paths = os.pathsep.join(filter(None, [toy, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}


@pytest.fixture(scope="session")
def parapos(environment):
    """parapos("train", ..., log=path, **death): runs a command, gives its exit code and what it said."""
    script = Path(__file__).with_name("zygote.py")
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    with subprocess.Popen([sys.executable, str(script)], **pipes) as process:
        assert process.stdout.readline() == "ready\n"

        def run(*argv, log, **death):
            start = log.stat().st_size if log.exists() else 0
            process.stdin.write(json.dumps({"argv": [str(a) for a in argv], "log": str(log), **death}) + "\n")
            process.stdin.flush()
            code = int(process.stdout.readline())
            return code, log.read_text()[start:] if log.exists() else ""

        yield run
        process.stdin.close()


@pytest.fixture(scope="session")
def straight(parapos, tmp_path_factory):
    """The folder of a short run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    code, told = parapos("train", "digits_smoke", "--out", folder, log=folder.parent / "log")
    assert code == 0, told
    assert "is finished" in told
    return folder
