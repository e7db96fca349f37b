"""The allocator does what it is told: freed pages come back without new faults, or leave the process."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from parapos import malloc

CODE = """
import resource, torch
from parapos.malloc import keep_memory, release_memory
torch.set_num_threads(1)
kept = keep_memory() if {keep} else None
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MiB: 16384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
found = [faults() for _ in range(24)][12:]  # it takes a few blocks until one fits where another was
print(kept, sorted(found)[6], release_memory() if {keep} else None, faults())
"""
glibc = pytest.mark.skipif(malloc._glibc() is None, reason="needs glibc")


def observe(keep: bool) -> list[str]:
    code = CODE.format(keep=keep)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@glibc
def test_kept_memory_is_not_faulted_in_again() -> None:
    _, default, _, _ = observe(keep=False)
    kept, again, released, anew = observe(keep=True)
    assert (kept, released) == ("True", "True")
    assert int(again) < int(default) / 4
    assert int(anew) > 4 * int(again)


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not malloc.keep_memory()
    assert not malloc.release_memory()

    def windows(name: object) -> None:
        raise TypeError("expected a string")

    monkeypatch.setattr(ctypes, "CDLL", windows)
    assert not malloc.keep_memory()
