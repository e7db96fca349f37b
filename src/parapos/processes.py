"""The one way to start worker processes, for every room."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor


def pool(workers: int, module: str, initializer: Callable[..., object], *given: object) -> ProcessPoolExecutor:
    """Processes that inherit no threads and no memory of this one. Where the system can, they are forked from a server
    that imported `module`, and with it torch, once. initializer: called with what is given in each new process."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload([module])
    return ProcessPoolExecutor(workers, context, initializer=initializer, initargs=given)


def end_with_parent(seconds: float) -> None:
    """Called in a new process: when its parent is gone it is asked to end, and `seconds` later it is made to."""

    def watch() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # training saves, and the process may then wait for work for ever
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
