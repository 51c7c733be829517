"""Reads a key file: one line per key, ``#`` begins a comment line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from enginehouse.api.http.keys.lines import read_line
from enginehouse.api.http.keys.ring import KeyRecord
from enginehouse.contract.errors import ConfigError
from enginehouse.contract.regular_files import read_regular_text

__all__ = ["KEY_FILE_PATH", "MAX_KEY_FILE_BYTES", "read_key_file", "records_in"]

MAX_KEY_FILE_BYTES = 16 * 2**20
KEY_FILE_PATH = "auth.key_file"
"""Dotted path of the setting, for messages."""


def read_key_file(path: Path, taken: Sequence[str] = (), *, may_be_empty: bool = False) -> list[KeyRecord]:
    """The records of a key file.

    Args:
        path: the file.
        taken: names that the file may not use again.
        may_be_empty: whether a file without keys is fine.

    Raises:
        ConfigError: it cannot be read, holds no key, or a line is wrong; the message names the line.
    """
    try:
        text = read_regular_text(path, MAX_KEY_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY_FILE_PATH}: cannot read {path}: {error}", KEY_FILE_PATH) from error
    records = records_in(text, path, taken)
    if not records and not may_be_empty:
        # Nobody could call; nobody who names a key file means that.
        raise ConfigError(f"{KEY_FILE_PATH}: {path} holds no key", KEY_FILE_PATH)
    return records


def records_in(text: str, path: Path, taken: Sequence[str] = ()) -> list[KeyRecord]:
    """The records of a key file's text; ``path`` is for messages. Raises ConfigError as :func:`read_key_file`."""
    records: list[KeyRecord] = []
    names = set(taken)
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            record = read_line(words)
            if record.name in names:
                raise ValueError(f"the name {record.name!r} is taken by another key")
        except ValueError as error:
            raise ConfigError(f"{KEY_FILE_PATH}: {path}, line {number}: {error}", KEY_FILE_PATH) from error
        names.add(record.name)
        records.append(record)
    return records
