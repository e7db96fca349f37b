"""How the kernel for this CPU is compiled, kept and trusted, and why it may be missing."""

from __future__ import annotations

import mmap
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from parapos.attention import native, native_build

needed = pytest.mark.skipif(isinstance(native.library(), native.Missing), reason=str(native.library()))


@needed
def test_threads_that_ask_at_one_time_build_it_once(fresh: Path) -> None:
    native_build._built.cache_clear()
    with patch.object(native_build, "_compile", wraps=native_build._compile) as spy, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: native.library(), range(4)))
    assert spy.call_count == 1
    assert all(x is found[0] for x in found)


@needed
def test_it_is_compiled_once_and_again_if_the_file_is_broken(fresh: Path) -> None:
    native_build.build()
    (path,) = (fresh / "parapos/native").glob("*.so")
    with patch.object(native_build, "_compile", side_effect=AssertionError):
        native_build.build()
    broken = fresh / "other/parapos/native" / path.name  # not where this process has it loaded from
    broken.parent.mkdir(parents=True, mode=0o700)
    broken.write_bytes(path.read_bytes()[:1000])
    broken.with_suffix(".sha256").write_text(path.with_suffix(".sha256").read_text())
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(fresh / "other")}):
        native_build.build()
        assert broken.stat().st_size == path.stat().st_size
        broken.with_suffix(".sha256").write_bytes(b"\xff\xfe")
        native_build.build()
    assert native_build._is_whole(broken)


@needed
def test_files_with_any_name_may_be_in_memory(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xe9.bin"
    with open(name, "w+b") as file:
        file.write(b"x" * 4096)
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            assert native_build._threads_library()


@needed
def test_a_cache_named_by_no_whole_path_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert native_build._folder() == tmp_path / ".cache/parapos/native"


@needed
def test_why_it_is_missing(fresh: Path, tmp_path: Path) -> None:
    def why() -> str:
        with pytest.raises(native.Missing) as caught:
            native_build.build()
        return str(caught.value)

    with patch.dict(os.environ, {"PATH": str(tmp_path), "CXX": ""}):
        assert "needs a C++ compiler" in why()
    with patch.dict(os.environ, {"CXX": "no-such-compiler -x"}):
        assert "no no-such-compiler was found" in why()
    with patch.dict(os.environ, {"CXX": "false"}):
        assert "false could not compile it: exit code 1" in why()
    with patch.dict(os.environ, {"CXX": "env g++"}):
        native_build.build()
    with patch.dict(os.environ, {"CXX": "'"}):
        assert "could not be built" in why()
    with patch.dict(os.environ, {"PARAPOS_NATIVE": "0"}):
        assert "PARAPOS_NATIVE=0" in why()
    with patch.object(native_build, "FLAGS", ("--no-such-flag",)):
        assert "could not compile" in why()
    shutil.rmtree(tmp_path / "parapos")
    (tmp_path / "parapos").write_text("a file where the folder should be")
    assert "could not be built" in why()
    with patch.object(native_build.sys, "platform", "win32"):
        assert "Linux" in why()


@needed
def test_a_cache_that_others_may_write_to_is_not_trusted(fresh: Path) -> None:
    native_build.build()
    folder = fresh / "parapos/native"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(native.Missing, match="others may write to"):
        native_build.build()
    folder.chmod(0o755)
    native_build.build()
    with patch.object(os, "getuid", return_value=os.getuid() + 1), pytest.raises(native.Missing, match="others"):
        native_build.build()
