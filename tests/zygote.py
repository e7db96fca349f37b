"""Runs `parapos` commands in forked processes that die where they are told to. Imports are paid for once.

Reads a command per line as JSON: argv, log (a file for stdout and stderr), and one of
  kill_after  seconds until SIGKILL comes from outside
  kill_in     "step", "write", "fsync", "replace" or "append": the process kills itself in the n-th call of it
  term_in     "part" or "validation": the process sends itself SIGTERM in the n-th call of it
with n in `nth`. processes: how many run the command together, with the variables that torchrun sets; only that of
number `rank` dies. Answers with the exit code of each, negative for a signal.
"""

import builtins
import contextlib
import json
import os
import signal
import socket
import sys
import time

import sklearn.datasets  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import torchvision.transforms.v2  # noqa: F401
from lightning.fabric.utilities.rank_zero import rank_zero_only

from parapos import cli
from parapos.training import callbacks, checkpoint, command, module  # noqa: F401


def strike(owner, name, nth, number):
    """Makes the n-th call of a function send a signal to this process first."""
    real, calls = getattr(owner, name), [0]

    def wrapper(*args, **options):
        calls[0] += 1
        if calls[0] == nth:
            os.kill(os.getpid(), number)
        return real(*args, **options)

    setattr(owner, name, wrapper)


class HalfFile:
    """An open file; the n-th that is closed keeps half of what was written, and the process is killed."""

    calls = 0

    def __init__(self, file, nth):
        self.file, self.nth, self.start = file, nth, os.path.getsize(file.name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        HalfFile.calls += 1
        if HalfFile.calls == self.nth:
            self.file.flush()
            os.truncate(self.file.name, (self.start + os.path.getsize(self.file.name)) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


def half(file, nth):
    return HalfFile(file, nth) if file.writable() else file


def arrange(order):
    nth = order.get("nth", 1)
    where = order.get("kill_in") or order.get("term_in")
    number = signal.SIGKILL if "kill_in" in order else signal.SIGTERM
    if where == "step":
        strike(module.TrainingModule, "finish_step", nth, number)
    elif where == "part":
        strike(module.TrainingModule, "training_step", nth, number)
    elif where == "validation":
        strike(module.TrainingModule, "validation_step", nth, number)
    elif where in ("fsync", "replace"):
        strike(os, where, nth, number)
    elif where in ("write", "append"):
        owner = checkpoint if where == "write" else callbacks
        owner.open = lambda *args, **options: half(builtins.open(*args, **options), nth)  # noqa: SIM115


def child(order, rank, port):
    count = order.get("processes", 1)
    if count > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
        places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
        os.environ.update({name: str(value) for name, value in places.items()})
        rank_zero_only.rank = rank  # was read from the variables when Lightning was imported
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if rank == order.get("rank", 0):
        arrange(order)
    try:
        code = cli.main(order["argv"])
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main():
    cli.parser()  # imports what it needs
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(order.get("processes", 1)):
            children.append(os.fork())
            if children[-1] == 0:
                child(order, rank, port)
        if "kill_after" in order:
            time.sleep(order["kill_after"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(children[0], signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
