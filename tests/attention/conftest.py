"""What tests of several kernels share."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from parapos.attention import KernelError, native

from .interpreted import start, with_tiles


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Grids of all kernels leave out what the compiled kernel says it does not serve: float64, terms of other kinds."""
    try:
        return (yield)
    except KernelError as error:
        if str(error).startswith("kernel 'native' cannot serve this call"):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., Any]]:
    """interpreter(function, *args): its result, from a process where Triton interprets."""
    environment = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start) as pool:
        with mock.patch.dict(os.environ, environment):
            pool.submit(start).result()
        yield lambda function, *args, **options: pool.submit(with_tiles, function, *args, **options).result()


@pytest.fixture
def no_compiler() -> Iterator[None]:
    """A machine without a C++ compiler: PyTorch's operators serve every call on the CPU."""
    with mock.patch.object(native, "library", return_value=native.Missing("there is no compiler in this test")):
        yield


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Path]:
    """An empty cache."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path)}):
        yield tmp_path
