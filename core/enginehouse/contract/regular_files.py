"""Files that others may have placed: opened only if they are regular, and read to a size.

Opening a named pipe waits for ever, and devices have no end. Used wherever files of models, caches and keys are read.
Knows nothing of what is in them.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

__all__ = ["check_regular", "open_regular", "read_regular", "read_regular_text"]

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def check_regular(path: Path) -> os.stat_result:
    """What the system says of a regular file; links are followed.

    Raises:
        OSError: there is none, or it is a folder, a pipe, a socket or a device.
    """
    found = path.stat()
    _check(found, path)
    return found


def open_regular(path: Path) -> BufferedReader:
    """The open file. Raises OSError as :func:`check_regular`."""
    check_regular(path)  # some devices do something when they are opened
    descriptor = os.open(path, _FLAGS)
    try:
        _check(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """All of the file. Raises OSError as :func:`check_regular`, and for a file of more than ``max_bytes``."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return data


def read_regular_text(path: Path, max_bytes: int) -> str:
    """All of the file as UTF-8. Raises OSError as :func:`read_regular`, and UnicodeDecodeError."""
    return read_regular(path, max_bytes).decode("utf-8")


def _check(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
