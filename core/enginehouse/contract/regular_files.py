"""Safe reading of untrusted paths: only regular files are opened, and sizes are limited.

Opening a named pipe blocks forever, and devices have no end. Used for all files of models, caches and keys. Knows
nothing of their contents.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path

__all__ = ["check_regular", "open_regular", "read_regular", "read_regular_text"]

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def check_regular(path: Path) -> os.stat_result:
    """Return the stat result of a regular file; links are followed.

    Raises:
        OSError: the path does not exist, or it is a folder, a pipe, a socket or a device.
    """
    found = path.stat()
    _check(found, path)
    return found


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError as :func:`check_regular`."""
    check_regular(path)  # opening some devices has side effects
    descriptor = os.open(path, _FLAGS)
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        _check(os.fstat(descriptor), path)
        file = os.fdopen(descriptor, "rb")
        undo.pop_all()
    return file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read the whole file. Raises OSError as :func:`check_regular`, and for more than ``max_bytes``."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return data


def read_regular_text(path: Path, max_bytes: int) -> str:
    """Read the whole file as UTF-8. Raises OSError as :func:`read_regular`, and UnicodeDecodeError."""
    return read_regular(path, max_bytes).decode("utf-8")


def _check(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
