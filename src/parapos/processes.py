"""The one way to start worker processes, for every room."""

from __future__ import annotations

import multiprocessing
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
