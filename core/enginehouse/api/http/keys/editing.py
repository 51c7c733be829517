"""Adds lines to a key file and takes them out: under a lock, and so that a reader sees the old file or the new one."""

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
    """Append a line; a file that does not exist is made.

    Args:
        path: the key file.
        line: as :func:`enginehouse.api.http.keys.key_line` makes it.

    Raises:
        ConfigError: the file cannot be changed, is wrong, or has a key of that name.
    """
    with _exclusive(path) as text:
        separator = "" if not text or text.endswith("\n") else "\n"
        _replace(path, f"{text}{separator}{line}\n")


def revoke_key(path: Path, name: str) -> bool:
    """Take the key ``name`` out; comments and the other lines stay. False when there is none of that name.

    Raises:
        ConfigError: the file cannot be changed or is wrong.
    """
    with _exclusive(path) as text:
        lines = text.splitlines(keepends=True)
        kept = [line for line in lines if line.split()[:1] != [name]]
        if len(kept) < len(lines):
            _replace(path, "".join(kept))
        return len(kept) < len(lines)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[str]:
    """The file's text, "" when there is none yet; nobody else changes the file meanwhile."""
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
    """Wait for the lock; it ends when the file is closed."""
    if sys.platform == "win32":
        msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _replace(path: Path, text: str) -> None:
    """Write a new file beside the old one, for its owner's eyes only, and put it in the old one's place."""
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
    """Let the new file belong to whom the old one did: an administrator must not lock the server's user out."""
    if sys.platform != "win32" and path.exists():
        old = path.stat()
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
