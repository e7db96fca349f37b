"""Worker processes: they end with their parent, and their death is reported."""

import os
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest

from parapos.experiments import schedule
from parapos.experiments.store import ReportError
from parapos.tasks.base import Metric

SCRIPT = """
import os, signal, sys
from parapos import processes
from parapos.experiments import schedule

if __name__ == "__main__":
    pool = processes.pool(1, schedule.__name__, schedule.begin, sys.argv[1])
    print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def alive(pid):
    """Whether a process runs; one that ended and waits to be noticed does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_parent_takes_its_workers_along(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "log.txt")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    pid = int(done.stdout)
    until = time.monotonic() + 60
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive(pid)


def test_a_process_that_dies_is_told_in_one_line(tmp_path):
    """As happens when a script without a guard is imported by the process that it starts."""
    dead: Future = Future()
    dead.set_exception(BrokenProcessPool("terminated abruptly"))
    run = SimpleNamespace(folder=tmp_path / "run", given=True, metric=lambda: Metric("score", "score"))
    run.wanted = SimpleNamespace(optim=SimpleNamespace(epochs=1))
    job = SimpleNamespace(run=run, evaluations=[])
    with pytest.raises(ReportError, match=r'run: its process died; .* `if __name__ == "__main__":`.*log.txt'):
        schedule._follow({dead: job}, tmp_path / "log.txt", lambda line: None, lambda job: None)
