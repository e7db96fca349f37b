"""Commands as a user gives them, and what they leave."""

import csv
import os
import subprocess
import sys
import time

from parapos import cli


def words(changes):
    """Changes of a recipe as words of a command line."""
    return [word for key, value in changes.items() for word in (f"--{key}", str(value))]


def parapos(*argv):
    """A command in this process, which must do well."""
    assert cli.main([str(word) for word in argv]) == 0


def kill_when(path, *argv, seconds=600):
    """A command in a process of its own, ended by SIGKILL as soon as a file is there; its exit code."""
    command = [sys.executable, "-m", "parapos", *map(str, argv)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        until = time.monotonic() + seconds
        while not path.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        process.kill()
    return process.returncode


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
