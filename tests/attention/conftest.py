"""What tests of several kernels share."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest

from .interpreted import start, with_tiles


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., Any]]:
    """interpreter(function, *args): its result, from a process where Triton interprets."""
    environment = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start) as pool:
        with mock.patch.dict(os.environ, environment):
            pool.submit(start).result()
        yield lambda function, *args, **options: pool.submit(with_tiles, function, *args, **options).result()
