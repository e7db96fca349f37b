"""The one store of prepared files: each item of work becomes one or more files, beside a manifest with their checksums.

A data set lists its `Item`s and has a function that turns one of them into an `Output`; `Store.prepare` runs it, in
several processes if asked. Files are whole or absent: they are written under another name and then renamed. The
manifest is manifest.jsonl: a line that says what the store holds and how it was made, then a line for every item, added
when all of its files are on disk. A killed run loses the items that it was working on, and no others.

Arrays are .npy files, which are memory-mapped. Not HDF5: an .npy file is replaced as a whole, it is read without a
library, and no open handle has to survive a fork.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .. import processes
from . import FormatError

FOLDER, MANIFEST, OLD_MANIFEST = "prepared", "manifest.jsonl", "manifest.json"
Array = np.ndarray[Any, Any]
Progress = Callable[[Sequence[int], str], Iterable[int]]


def no_progress(items: Sequence[int], name: str) -> Iterable[int]:
    """Shows nothing."""
    return items


class StaleError(FormatError):
    """Files were prepared by another version, or with other settings."""


@dataclass
class Check:
    """What is there: rows of what, found, expected ("" if nothing is expected), and what is wrong."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def count(self, what: str, found: int, expected: int | None = None) -> None:
        self.rows.append((what, f"{found:,}", "" if expected is None else f"{expected:,}"))
        if expected is not None and found != expected:
            self.problems.append(f"{what.strip()}: found {found:,}, expected {expected:,}")


@dataclass(frozen=True)
class Item:
    """A unit of work: a name of its own, and the files it is made from.

    A source in `sized` counts as unchanged while its size is the same, one in `hashed` while its SHA-256 is. Items may
    share sources: a process hashes a file once, and again when it was written to.
    """

    name: str
    sized: tuple[Path, ...] = ()
    hashed: tuple[Path, ...] = ()

    def sources(self) -> list[tuple[Path, Callable[[Path], int | str]]]:
        return [(path, file_size) for path in self.sized] + [(path, known_sha256) for path in self.hashed]

    def fingerprint(self) -> list[int | str]:
        return [measure(path) for path, measure in self.sources()]


@dataclass(frozen=True)
class Output:
    """What became of an item: files by their path in the store, what else is known of it (JSON), and a note if
    something was odd. The files may be an iterator; one at a time is in memory then."""

    files: Iterable[tuple[str, Array | bytes]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """An item in the manifest. files: by path, (bytes, SHA-256, shape), where shape is empty for what is no array."""

    sources: list[int | str]
    files: dict[str, tuple[int, str, list[int]]]
    facts: dict[str, Any]
    note: str

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Entry:
        """From a line of the manifest; any of KeyError, TypeError, ValueError, OverflowError if it is none."""
        files = {str(k): (int(size), str(digest), [*map(int, s)]) for k, (size, digest, s) in value["files"].items()}
        return cls(list(value["sources"]), files, dict(value["facts"]), str(value["note"]))


@dataclass
class Prepared:
    """What `prepare` did: the number of items done now and before, why some failed, and notes on others."""

    now: int = 0
    before: int = 0
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Store:
    """The prepared files of a data set in a folder.

    version and settings are those of the files: if either differs from what the manifest says, reading is refused and
    preparing starts over. Settings are options of `parapos prepare`, under the same names.
    """

    def __init__(
        self, root: str | Path, folder: str | Path | None, kind: str, version: int, items: str, **settings: Any
    ) -> None:
        """folder: without one, it is `prepared` in the root. items: what they are called, in the plural."""
        self.folder, self.items = Path(folder) if folder else Path(root) / FOLDER, items
        self.header: dict[str, Any] = {"kind": kind, "version": version, "settings": settings}
        flags = "".join(f" --{key} {value}" for key, value in settings.items())
        self.again = f"run `parapos prepare {kind}{flags}` again"

    # Reading

    def entries(self) -> dict[str, Entry]:
        """What was prepared, by item; nothing if there is no manifest."""
        path = self.folder / MANIFEST
        try:
            lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line end was being written
        except (FileNotFoundError, NotADirectoryError):
            if (old := self.folder / OLD_MANIFEST).is_file():
                raise StaleError(f"{old}: written by an earlier version of parapos; {self.again}") from None
            return {}
        entries: dict[str, Entry] = {}
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
                if number > 1:
                    entries[str(value["name"])] = Entry.of(value)
                    continue
                header = {key: value[key] for key in self.header}
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                raise FormatError(f"{path}: line {number} is damaged; remove the file and {self.again}") from None
            if header["kind"] != self.header["kind"]:
                kinds = f"{header['kind']!r:.100}, expected {self.header['kind']!r}"
                raise FormatError(f"{path}: files prepared for {kinds}; choose another folder")
            if header != self.header:
                given, expected = (f"version {h['version']}, settings {h['settings']}" for h in (header, self.header))
                raise StaleError(f"{path}: prepared with {given:.300}, expected {expected}; {self.again}")
        return entries

    def array(self, file: str, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
        """A prepared array, memory-mapped, which must have this dtype and shape."""
        want, path = (dtype, tuple(shape)), self.folder / file
        return map_array(path, f"{dtype} {tuple(shape)}", lambda x: (x.dtype, x.shape) == want, self.again)

    def is_current(self, item: Item, entry: Entry | None) -> bool:
        """Whether an item is prepared from its sources as they are, and its files are there with their sizes."""
        try:
            return entry is not None and entry.sources == item.fingerprint() and not any(self.wrong_sizes(entry))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def changed(self, item: Item, entry: Entry) -> Path | None:
        """The first source that is there and not as it was when the item was prepared."""
        for (path, measure), known in zip(item.sources(), entry.sources, strict=True):
            if path.is_file() and measure(path) != known:
                return path
        return None

    def wrong_sizes(self, entry: Entry) -> Iterator[str]:
        """What is wrong with the files of an entry, by their sizes."""
        for file, (size, _, _) in entry.files.items():
            found = file_size(path) if (path := self.folder / file).is_file() else None
            if found != size:
                problem = "not there" if found is None else f"{found} bytes, expected {size} as in the manifest"
                yield f"{path}: {problem}; {self.again}"

    # Writing

    def prepare(
        self,
        items: Sequence[Item],
        make: Callable[[Item], Output],
        *,
        workers: int = 1,
        progress: Progress = no_progress,
        redo: Callable[[Entry], bool] = lambda entry: False,
    ) -> Prepared:
        """Makes the files of all items. Those that are done stay, unless `redo` says otherwise of their entry.

        An item whose make raises FormatError is told in the result, and the others go on. workers: processes; with more
        than one, `make` must be picklable.
        """
        result = Prepared()
        with self._locked():
            try:
                entries = self.entries()
            except StaleError:
                entries = {}
            good = {key for key, entry in entries.items() if not redo(entry)}
            todo = [i for i in items if i.name not in good or not self.is_current(i, entries[i.name])]
            result.before = len(items) - len(todo)
            with whole_file(self.folder / MANIFEST) as file:
                lines = [self.header, *({"name": key, **asdict(entry)} for key, entry in entries.items())]
                file.writelines(f"{json.dumps(line)}\n".encode() for line in lines)
            (self.folder / OLD_MANIFEST).unlink(missing_ok=True)
            outputs = _run(partial(self._make, make), todo, workers)
            with open(self.folder / MANIFEST, "ab") as file, closing(outputs) as done:
                for _ in progress(range(len(todo)), self.items):
                    item, made = next(done)
                    if isinstance(made, FormatError):
                        result.failed.append(str(made))
                        continue
                    old = entries.get(item.name)
                    for left in set(old.files if old else ()) - set(made.files):
                        (self.folder / left).unlink(missing_ok=True)
                    file.write(f"{json.dumps({'name': item.name, **asdict(made)})}\n".encode())
                    file.flush()
                    result.now += 1
                    result.notes += [f"{item.name}: {made.note}"] if made.note else []
        return result

    def _make(self, make: Callable[[Item], Output], item: Item) -> Entry | FormatError:
        try:
            sources, output = item.fingerprint(), make(item)
            files = {file: self._save(file, content) for file, content in output.files}
        except FormatError as error:
            return error
        return Entry(sources, files, dict(output.facts), output.note)

    def _save(self, file: str, content: Array | bytes) -> tuple[int, str, list[int]]:
        if not (path := self.folder / file).resolve().is_relative_to(self.folder.resolve()):
            raise FormatError(f"{file}: outside of {self.folder}, expected a path in it")
        with whole_file(path) as target:
            if isinstance(content, bytes):
                target.write(content)
            else:
                np.lib.format.write_array(target, content, allow_pickle=False)
        return file_size(path), sha256(path), [] if isinstance(content, bytes) else list(content.shape)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process prepares a store at a time; what a killed one left half-written is removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FormatError(f"{self.folder}: another `parapos prepare` is writing here; wait for it") from None
            for part in self.folder.rglob(".*.part"):
                part.unlink(missing_ok=True)
            yield

    # Checking

    def check(
        self, items: Sequence[Item], result: Check, *, quick: bool = False, progress: Progress = no_progress
    ) -> dict[str, Entry]:
        """Adds to a check what is prepared of these items, and returns the entries.

        It names files that are missing, cut or damaged, and sources that changed; quick=True counts alone.
        """
        try:
            entries = self.entries()
        except FormatError as error:
            result.problems.append(str(error))
            return {}
        result.count(f"prepared {self.items}", sum(self.is_current(item, entries.get(item.name)) for item in items))
        if quick:
            return entries
        wrong: list[str] = []
        listed = list(entries.values())
        for i in progress(range(len(listed)), f"prepared {self.items}"):
            wrong += list(self.wrong_sizes(listed[i])) or [
                f"{self.folder / file}: damaged, its SHA-256 differs; remove it and {self.again}"
                for file, (_, digest, _) in listed[i].files.items()
                if sha256(self.folder / file) != digest
            ]
        result.rows.append(("  prepared files missing, cut or damaged", f"{len(wrong):,}", "0"))
        result.problems += wrong
        for item in items:
            if item.name in entries and (path := self.changed(item, entries[item.name])):
                result.problems.append(f"{path}: changed since it was prepared; {self.again}")
        return entries


def _run(
    make: Callable[[Item], Entry | FormatError], items: Sequence[Item], workers: int
) -> Generator[tuple[Item, Entry | FormatError], None, None]:
    """Every item with what was made of it, in the order in which they are done."""
    if workers <= 1:
        yield from ((item, make(item)) for item in items)
        return
    deaf = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which lets workers finish their items
    pool = processes.pool(workers, __name__, signal.signal, *deaf)
    waiting: dict[Future[Entry | FormatError], Item] = {}
    left = iter(items)
    try:
        while True:
            for item in islice(left, 2 * workers - len(waiting)):
                waiting[pool.submit(make, item)] = item
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()
    except BrokenProcessPool:
        raise ChildProcessError(
            "a worker process was killed, perhaps for lack of memory; use fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name when all of it is on disk; a failure leaves what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def map_array(path: Path, expected: str, is_good: Callable[[Array], bool], again: str) -> Array:
    """A .npy file, memory-mapped. FormatError with what was expected, and how to get it `again`, if it is not there or
    not good, of which dtype and shape alone are looked at."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # which believes no shape that the file is too small for
        if is_good(array):
            return array
        given = f"{array.dtype} {array.shape}"
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(f"{path}: not there, expected {expected}; {again}") from None
    except OSError:
        raise
    except Exception as error:  # NumPy reads the header as Python, and raises what that raises
        given = f"{type(error).__name__}: {error}"
    raise FormatError(f"{path}: expected {expected}, got {given[:200]}; remove it and {again}")


def sha256(path: Path) -> str:
    """Of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_sha256(path: Path) -> str:
    """As `sha256`, which reads the file again only if it was written to since."""
    return _sha256_of(path, file_state(path))


@lru_cache(maxsize=64)
def _sha256_of(path: Path, state: tuple[int, ...]) -> str:
    return sha256(path)


def file_state(path: Path) -> tuple[int, ...]:
    """What differs after a file was written to: its inode, size and times."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def file_size(path: Path) -> int:
    return path.stat().st_size
