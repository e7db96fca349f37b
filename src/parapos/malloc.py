"""Two words to glibc's allocator: keep freed memory, or give all of it back.

By default large blocks return to the system as soon as they are freed, so every step of a model faults the same pages
in anew and the system clears them each time. On the CPU that is up to half of the time of a small model.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # as malloc.h numbers them
NEVER = 2**31 - 1


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such handle
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None


def keep_memory() -> bool:
    """From now on this process reuses what it frees, and stays as large as it once was. False without glibc."""
    libc = _glibc()
    return libc is not None and bool(libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, NEVER))


def release_memory() -> bool:
    """Give freed memory back to the system now. False without glibc, or if there was none to give."""
    libc = _glibc()
    return libc is not None and bool(libc.malloc_trim(0))
