"""Adds and removes lines of a key file, under a lock and atomically: readers see the old file or the new one."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from enginehouse.api.http.keys.file import KEY_FILE_PATH, MAX_KEY_FILE_BYTES, records_in
from enginehouse.contract.errors import ConfigError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl
from enginehouse.contract.regular_files import read_regular_text

__all__ = ["add_key", "revoke_key"]

_MODE = 0o600


def add_key(path: Path, line: str) -> None:
    """Append a line; the file is created if it does not exist.

    Args:
        path: the key file.
        line: as returned by :func:`enginehouse.api.http.keys.key_line`.

    Raises:
        ConfigError: the file cannot be changed, is invalid, or already has a key of that name.
    """
    with _exclusive(path) as text:
        separator = "" if not text or text.endswith("\n") else "\n"
        _replace(path, f"{text}{separator}{line}\n")


def revoke_key(path: Path, name: str) -> bool:
    """Remove the key ``name``; comments and other lines stay. Returns False if there is no such key.

    Raises:
        ConfigError: the file cannot be changed or is invalid.
    """
    with _exclusive(path) as text:
        lines = text.splitlines(keepends=True)
        kept = [line for line in lines if line.split()[:1] != [name]]
        if len(kept) < len(lines):
            _replace(path, "".join(kept))
        return len(kept) < len(lines)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[str]:
    """Lock the file and yield its text, "" if it does not exist."""
    path = path.resolve()
    try:
        with path.with_name(f"{path.name}.lock").open("a+b") as lock:
            _lock(lock.fileno())
            text = read_regular_text(path, MAX_KEY_FILE_BYTES) if path.exists() else ""
            records_in(text, path)
            yield text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY_FILE_PATH}: cannot change {path}: {error}", KEY_FILE_PATH) from error


def _lock(descriptor: int) -> None:
    """Wait for the lock; closing the file releases it."""
    if sys.platform == "win32":
        msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _replace(path: Path, text: str) -> None:
    """Write a new file next to the old one, readable only by its owner, and replace the old one with it."""
    path = path.resolve()
    records_in(text, path)
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            _keep_owner(path, descriptor)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _keep_owner(path: Path, descriptor: int) -> None:
    """Give the new file the old one's owner, so that an administrator does not lock out the server's user."""
    if sys.platform != "win32" and path.exists():
        old = path.stat()
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
