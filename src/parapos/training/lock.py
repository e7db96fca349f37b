"""One process at a time trains in a folder. The system releases the lock of a process that dies, however it dies.

It is a POSIX record lock, not flock: data workers that are forked do not inherit it, so a run can be taken up at once
after its main process was killed, and it works on NFS.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path


class FolderLock:
    """The file .lock in a folder, while it is held; the file is removed when the lock is released."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        self._file: int | None = None

    def acquire(self) -> bool:
        """Takes the lock, or says that another process has it. A file system without locks is reported and accepted."""
        while self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(file)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                message = f"cannot be locked ({error.strerror}); see to it that nothing else trains there"
                print(f"{self.path.parent}: {message}", file=sys.stderr)
                return True
            if self._is_at_its_path(file):
                self._file = file
            else:  # its owner removed it between the two calls
                os.close(file)
        return True

    def _is_at_its_path(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None
