"""Compiles native.cpp for this machine's CPU, once, and keeps it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast",
)  # fmt: skip
LOCK = threading.Lock()


class Missing(RuntimeError):
    """Why there is no compiled kernel on this machine."""


def _folder() -> Path:
    """Where compiled kernels are kept. Whoever can write there decides what this process runs."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (base if base.is_absolute() else Path.home() / ".cache") / "parapos" / "native"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise Missing(f"others may write to {folder}: make it your own (chmod 700), or let XDG_CACHE_HOME name another")
    return folder


def _threads_library() -> list[str]:
    """The OpenMP library that PyTorch has loaded: its threads serve the kernel too."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return sorted(path for path in paths if re.fullmatch(r".*/lib(g|i)?omp\d*([-.][^/]*)?\.so[.\d]*", path))


def _compiler() -> list[str]:
    """The command of the C++ compiler."""
    command = shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, ("g++", "c++")), "g++")]
    if shutil.which(command[0]) is None:
        raise Missing(f"it needs a C++ compiler, and no {command[0]} was found")
    return command


def _compile(compiler: list[str], target: Path) -> None:
    if sys.stderr.isatty():
        print("parapos: compiling attention for this CPU, once; it takes a few seconds", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects, library = Path(folder) / "native.o", Path(folder) / target.name
        # Linked without OpenMP, so that its functions are those of the library that PyTorch has loaded.
        for command in ([*FLAGS, "-c", str(SOURCE), "-o", str(objects)], ["-shared", str(objects), "-o", str(library)]):
            done = subprocess.run([*compiler, *command], capture_output=True, errors="replace", timeout=120)
            if done.returncode:
                said = done.stderr.strip()[-300:] or f"exit code {done.returncode}"
                raise Missing(f"{shlex.join(compiler)} could not compile it: {said}")
        digest = Path(folder) / "digest"
        digest.write_text(_digest(library))
        os.replace(library, target)
        os.replace(digest, target.with_suffix(".sha256"))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(target: Path) -> bool:
    """Whether a compiled kernel is there as it was written: to load one that is cut off would end the process."""
    digest = target.with_suffix(".sha256")
    return target.exists() and digest.exists() and digest.read_bytes() == _digest(target).encode()


def build() -> ctypes.CDLL:
    """The compiled kernel, from the cache where it is there. Raises Missing."""
    if sys.platform != "linux":
        raise Missing(f"it is compiled on Linux only, not on {sys.platform}")
    if os.environ.get("PARAPOS_NATIVE") == "0":
        raise Missing("PARAPOS_NATIVE=0 turns it off")
    try:
        compiler = _compiler()
        version = subprocess.run([*compiler, "--version"], capture_output=True, errors="replace", timeout=20).stdout
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        cpu = next((x for x in lines if x.startswith(("flags", "Features"))), "")
        key = hashlib.sha256("\n".join([version, cpu, platform.machine(), *FLAGS]).encode() + SOURCE.read_bytes())
        target = _folder() / f"native-{key.hexdigest()[:24]}.so"
        if not (libraries := _threads_library()):
            raise Missing("PyTorch has loaded no OpenMP library here")
        for path in libraries:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        if not _is_whole(target):
            _compile(compiler, target)
        return ctypes.CDLL(str(target))
    except Missing:
        raise
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        raise Missing(f"it could not be built: {error}") from error


@cache
def _built() -> ctypes.CDLL | Missing:
    try:
        return build()
    except Missing as error:
        return error


def library() -> ctypes.CDLL | Missing:
    """The compiled kernel, or why there is none; built once, by one of the threads that ask for it."""
    with LOCK:
        return _built()
