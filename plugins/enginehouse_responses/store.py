"""Stored responses: an SQLite database in memory or in a file, bounded by count, bytes and age.

Each response belongs to the namespace of the key that made it; to others it does not exist. A response that is deleted
while later ones continue it is hidden, and its items stay until the last of those is gone. All work is done on one
thread, in order: what was put can be read at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from attrs import frozen

from enginehouse.contract.errors import ConfigError, EnginehouseError
from enginehouse_responses.options import ResponsesOptions

__all__ = ["ResponseStore", "StoredResponse"]

_T = TypeVar("_T")
_log = logging.getLogger("enginehouse.responses")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    namespace TEXT NOT NULL,
    previous TEXT,
    used REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    is_deleted INTEGER NOT NULL DEFAULT 0,
    is_open INTEGER NOT NULL DEFAULT 0,
    input BLOB NOT NULL,
    response BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS items (id TEXT NOT NULL, response TEXT NOT NULL, PRIMARY KEY (id, response));
CREATE INDEX IF NOT EXISTS by_response ON items (response);
CREATE TRIGGER IF NOT EXISTS forget_items AFTER DELETE ON responses
    BEGIN DELETE FROM items WHERE response = OLD.id; END;
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
CREATE INDEX IF NOT EXISTS by_previous ON responses (previous);
"""
_VERSION = 1
_MAX_CHAIN = 10_000
_STOPPED = {"code": "server_error", "message": "The server was stopped before the response was complete."}


@frozen
class StoredResponse:
    """A response and the items that were sent for it."""

    response: dict[str, Any]
    input: list[dict[str, Any]]

    @property
    def output(self) -> list[dict[str, Any]]:
        """Its items."""
        items: list[dict[str, Any]] = self.response["output"]
        return items


class ResponseStore:
    """The stored responses.

    Args:
        now: the clock, in seconds.

    """

    def __init__(self, options: ResponsesOptions, now: Callable[[], float] = time.time) -> None:
        self._options = options
        self._now = now
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._opened: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open the database now; otherwise the first use does. Raises ConfigError."""
        self._thread.submit(lambda: self._database).result()

    def close(self) -> None:
        """Finish all writes and close the file; the next use opens it again."""
        self._thread.submit(self._close).result()

    # -- what the surface calls --------------------------------------------------------------------

    def put(self, namespace: str, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
        """Store a response, or its new state; returns at once. What does not fit is not stored, and logged."""
        self._thread.submit(self._put, namespace, msgspec.json.encode(response), msgspec.json.encode(items))

    async def get(self, namespace: str, response_id: str) -> StoredResponse | None:
        """Return a response; None if the namespace has none with this id."""
        return await self._do(lambda: self._get(namespace, response_id))

    async def delete(self, namespace: str, response_id: str) -> bool:
        """Delete a response; returns False if the namespace has none with this id."""
        return await self._do(lambda: self._delete(namespace, response_id))

    async def chain(self, namespace: str, response_id: str) -> list[StoredResponse] | None:
        """Return a response and all those that it continues, oldest first; None if one of them is not stored."""
        return await self._do(lambda: self._chain(namespace, response_id))

    async def items(self, namespace: str, item_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the stored items with these ids, of input and output, as far as the namespace has them."""
        return await self._do(lambda: self._items(namespace, item_ids))

    async def _do(self, work: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._thread.submit(work))

    # -- on the thread -----------------------------------------------------------------------------

    @property
    def _database(self) -> sqlite3.Connection:
        self._opened = self._opened or self._open()
        return self._opened

    def _close(self) -> None:
        if self._opened is not None and self._options.file is not None:
            self._opened.close()
            self._opened = None

    def _open(self) -> sqlite3.Connection:
        file = self._options.file
        if file is not None:
            _make_private(file)
        try:
            database = sqlite3.connect(":memory:" if file is None else file, isolation_level=None)
            database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA secure_delete = ON;")
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"it has the version {version}, not {_VERSION}")
            database.executescript(f"{_SCHEMA} PRAGMA user_version = {_VERSION};")
        except sqlite3.Error as error:
            path = "plugins.responses.file"
            raise ConfigError(f"{path}: cannot use {str(file)!r}: {error}", path) from error
        for row in database.execute("SELECT id, response FROM responses WHERE is_open").fetchall():
            state = {**msgspec.json.decode(row[1]), "status": "failed", "error": _STOPPED}
            database.execute(
                "UPDATE responses SET response = ?, is_open = 0 WHERE id = ?", (msgspec.json.encode(state), row[0])
            )
        return database

    def _put(self, namespace: str, response: bytes, items: bytes) -> None:
        try:
            head = msgspec.json.decode(response)
            num_bytes = len(response) + len(items)
            if num_bytes > self._options.max_bytes:
                _log.warning("the response %s is too large to be stored: %d bytes", head["id"], num_bytes)
                return
            self._database.execute(
                "INSERT INTO responses (id, namespace, previous, used, num_bytes, is_open, input, response) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
                "used = excluded.used, num_bytes = excluded.num_bytes, is_open = excluded.is_open, "
                "input = excluded.input, response = excluded.response",
                (
                    *(head["id"], namespace, head["previous_response_id"], self._now(), num_bytes),
                    *(head["status"] in ("queued", "in_progress"), items, response),
                ),
            )
            ids = [item["id"] for item in (*head["output"], *msgspec.json.decode(items))]
            self._database.executemany(
                "INSERT OR IGNORE INTO items (id, response) VALUES (?, ?)", [(one, head["id"]) for one in ids]
            )
            self._purge(head["id"])  # if it was deleted while it was made
            self._evict()
        except (EnginehouseError, sqlite3.Error):  # the response itself must not fail
            _log.exception("a response could not be stored")

    def _evict(self) -> None:
        """Remove what is too old, then the responses used longest ago until the rest fits."""
        options, database = self._options, self._database
        database.execute("DELETE FROM responses WHERE used < ?", (self._now() - options.max_age_s,))
        count, total = database.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM responses").fetchone()
        if count <= options.max_responses and total <= options.max_bytes:
            return
        for row_id, num_bytes in database.execute(
            "SELECT id, num_bytes FROM responses ORDER BY used, rowid"
        ).fetchall():
            database.execute("DELETE FROM responses WHERE id = ?", (row_id,))
            count, total = count - 1, total - num_bytes
            if count <= options.max_responses and total <= options.max_bytes:
                return

    def _get(self, namespace: str, response_id: str) -> StoredResponse | None:
        row = self._find(namespace, response_id)
        if row is None or row[3]:
            return None
        self._touch([response_id])
        return StoredResponse(msgspec.json.decode(row[1]), msgspec.json.decode(row[0]))

    def _find(self, namespace: str, response_id: str) -> tuple[bytes, bytes, str | None, int] | None:
        """Return input, response, previous id and whether it is deleted."""
        found: tuple[bytes, bytes, str | None, int] | None = self._database.execute(
            "SELECT input, response, previous, is_deleted FROM responses WHERE id = ? AND namespace = ? AND used >= ?",
            (response_id, namespace, self._now() - self._options.max_age_s),
        ).fetchone()
        return found

    def _touch(self, ids: Sequence[str]) -> None:
        now = self._now()
        self._database.executemany("UPDATE responses SET used = ? WHERE id = ?", [(now, one) for one in ids])

    def _chain(self, namespace: str, response_id: str) -> list[StoredResponse] | None:
        found: list[StoredResponse] = []
        ids: list[str] = []
        following: str | None = response_id
        while following is not None:
            row = self._find(namespace, following)
            if row is None or (row[3] and not ids) or len(ids) >= _MAX_CHAIN:
                return None
            ids.append(following)
            found.append(StoredResponse(msgspec.json.decode(row[1]), msgspec.json.decode(row[0])))
            following = row[2]
        self._touch(ids)
        return found[::-1]

    def _items(self, namespace: str, item_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for item_id in item_ids:
            row = self._database.execute(
                "SELECT items.response FROM items JOIN responses ON responses.id = items.response "
                "WHERE items.id = ? AND namespace = ? AND NOT is_deleted",
                (item_id, namespace),
            ).fetchone()
            if item_id not in found and row is not None and (stored := self._get(namespace, row[0])) is not None:
                found |= {item["id"]: item for item in (*stored.input, *stored.output)}
        return found

    def _delete(self, namespace: str, response_id: str) -> bool:
        row = self._find(namespace, response_id)
        if row is None or row[3]:
            return False
        self._database.execute("UPDATE responses SET is_deleted = 1 WHERE id = ?", (response_id,))
        self._purge(response_id)
        return True

    def _purge(self, response_id: str) -> None:
        """Remove a response that is deleted, complete, and continued by none; then the same of the one before it."""
        following: str | None = response_id
        while following is not None:
            removed = self._database.execute(
                "DELETE FROM responses WHERE id = ? AND is_deleted AND NOT is_open "
                "AND NOT EXISTS (SELECT 1 FROM responses AS later WHERE later.previous = responses.id) "
                "RETURNING previous",
                (following,),
            ).fetchone()
            following = removed[0] if removed is not None else None


def _make_private(file: Path) -> None:
    """Create the file, or check it: only its owner may read it. Raises ConfigError."""
    path = "plugins.responses.file"
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        with contextlib.closing(os.fdopen(descriptor, "rb")):
            os.chmod(file, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot use {str(file)!r}: {error.strerror or error}", path) from error
