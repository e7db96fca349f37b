"""Broken files for readers: what comes out must be data or a FormatError, in memory that the file justifies."""

import random
import tracemalloc
import warnings
from contextlib import contextmanager

import pytest

from parapos.data import FormatError

EXTREMES = [0, 1, 2, 7, 8, 9, 27, 28, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 8]


def mutations(seeds, count, seed=0):
    """`count` damaged copies: flipped bits, bytes and words that were replaced, moved, cut off, doubled or invented."""
    rng = random.Random(seed)
    for i in range(count):
        data = bytearray(seeds[i % len(seeds)])
        for _ in range(rng.randint(1, 4)):
            if not data:
                break
            at, near = rng.randrange(len(data)), rng.randrange(min(len(data), 256))  # what matters is at the front
            word = rng.choice(EXTREMES).to_bytes(4, "little")
            match rng.randrange(8):
                case 0:
                    data[at] ^= 1 << rng.randrange(8)
                case 1:
                    data[near] = rng.randrange(256)
                case 2:
                    data[near & ~1 : (near & ~1) + 4] = word
                case 3:
                    data[at : at + 4] = word
                case 4:
                    del data[at:]
                case 5:
                    del data[at : at + rng.randint(1, 39)]
                case 6:
                    data[at:at] = data[near : near + rng.randint(1, 39)]
                case _:
                    data[near:near] = rng.randbytes(rng.randint(1, 11))
        yield bytes(data)


def overwrite(path, data):
    """Like write_bytes, without cutting the file to nothing first, after which some file systems write to the disk."""
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.write(data)
        file.truncate()


def _resident(key):
    """KiB of memory that this process holds (VmRSS), or held at most since the mark was set back (VmHWM)."""
    with open("/proc/self/status") as file:
        return int(file.read().split(key + ":")[1].split()[0])


@contextmanager
def peak_below(kib):
    """What runs inside may never hold more than so much beyond what is held now. Earlier peaks do not hide it."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pytest.skip("peak memory cannot be set back here")
    before = _resident("VmRSS")
    yield
    assert _resident("VmHWM") - before < kib


@contextmanager
def address_space(spare):
    """A limit for the memory of this process: whoever asks for `spare` bytes more gets a MemoryError."""
    resource = pytest.importorskip("resource")
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def survive(read, files, path, *, per_byte, least, place="at byte "):
    """Reads each file; (read, refused). Peak memory of a file may be `per_byte` times its size and `least` bytes, which
    is measured for every tenth; none of them may ask for more than 64 MB. Refusals name file and place."""
    good, told = 0, []
    with warnings.catch_warnings(), address_space(64 * 1024**2):
        warnings.simplefilter("ignore", UserWarning)
        for i, data in enumerate(files):
            overwrite(path, data)
            if i % 10 == 0:
                tracemalloc.start()
            try:
                read(path)
                good += 1
            except FormatError as error:
                told.append(str(error))
            if i % 10 == 0:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak <= per_byte * len(data) + least, f"{peak} bytes for a file of {len(data)}"
    assert all(text.startswith(f"{path}: {place}") and len(text) < len(str(path)) + 600 for text in told)
    return good, len(told)
