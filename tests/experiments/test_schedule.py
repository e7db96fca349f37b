"""Worker processes: they end with their parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

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
