"""Keys of the running server: those of the settings and of the key file, which is read again when it changes.

The guard reads :attr:`KeyStore.ring` for every request; the server runs :meth:`KeyStore.watch` in the background.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from pathlib import Path

from enginehouse.api.http.keys.file import SALT_BYTES, KeyRecord, KeyRing, digest_of, read_key_file
from enginehouse.contract.errors import ConfigError
from enginehouse.contract.identity import read_moment
from enginehouse.settings.auth import AuthSettings, KeySettings

_log = logging.getLogger("enginehouse.server")

_WATCH_S = 1.0
"""Seconds between two checks of the file: the longest time that a revoked key stays valid."""


class KeyStore:
    """Owns the key ring; all methods except :meth:`watch` may be called from any thread.

    Raises:
        ConfigError: the key file cannot be used.
    """

    def __init__(self, settings: AuthSettings) -> None:
        self._settings = settings
        self._seen = _look(settings)
        self.ring = load_keys(settings)
        self._reading = threading.RLock()  # a read with old settings must not overwrite one with new settings

    @property
    def needs_key(self) -> bool:
        """True if only authenticated callers are served."""
        return self._settings.needs_key

    def reload(self, settings: AuthSettings | None = None) -> None:
        """Read the file again, with new settings if given; blocking. On failure nothing changes.

        A file whose last key was revoked is valid: none of its callers is served then.

        Raises:
            ConfigError: the file cannot be used.
        """
        with self._reading:
            settings = settings if settings is not None else self._settings
            seen = _look(settings)
            self.ring = load_keys(settings, may_be_empty=True)
            self._settings, self._seen = settings, seen

    async def watch(self) -> None:
        """Follow changes of the file until cancelled; an invalid file is reported once, and the old keys stay."""
        while True:
            await asyncio.sleep(_WATCH_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> bool:
        """Read the file again if it has changed since the last check. Returns True if new keys are in effect."""
        with self._reading:
            seen = _look(self._settings)
            if seen == self._seen:
                return False
            self._seen = seen
            try:
                self.reload()
            except ConfigError as error:
                _log.error("the key file has changed and cannot be used, the old keys stay: %s", error.message)
                return False
        _log.info("the key file has changed; its keys hold now")
        return True


def load_keys(settings: AuthSettings, *, may_be_empty: bool = False) -> KeyRing:
    """Return the keys of the settings and of the key file.

    Raises:
        ConfigError: the file cannot be used, or a name or a key occurs twice.
    """
    salt = secrets.token_bytes(SALT_BYTES)
    records = [_record_of(key, index, salt) for index, key in enumerate(settings.keys)]
    if settings.key_file is not None:
        taken = [record.name for record in records]
        hashed = read_key_file(Path(settings.key_file).expanduser(), taken, may_be_empty=may_be_empty)
        _check_same_keys(settings, KeyRing(hashed))
        records += hashed
    return KeyRing(records)


def _look(settings: AuthSettings) -> tuple[int, int, int] | None:
    """Return a signature of the file that changes with it; None without a file."""
    if settings.key_file is None:
        return None
    try:
        found = Path(settings.key_file).expanduser().stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _check_same_keys(settings: AuthSettings, hashed: KeyRing) -> None:
    """Refuse a key of the settings that is also in the file, possibly with other scopes."""
    for index, key in enumerate(settings.keys):
        same = hashed.find((key if isinstance(key, str) else key.key).encode())
        if same is not None:
            raise ConfigError(f"{same.name!r} in the key file has the same key", f"auth.keys[{index}]")


def _record_of(key: str | KeySettings, index: int, salt: bytes) -> KeyRecord:
    """Return the record of a key from the settings; one without a name is named by its position."""
    if isinstance(key, str):
        key = KeySettings(name=f"key-{index + 1}", key=key)
    return KeyRecord(
        name=key.name,
        salt=salt,
        digest=digest_of(key.key.encode(), salt),
        scopes=frozenset(key.scopes),
        models=None if key.models is None else frozenset(key.models),
        profile=key.profile,
        namespace=key.namespace or key.name,
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        max_concurrent=key.max_concurrent,
        priority=key.priority,
        expires=None if key.expires is None else read_moment(key.expires),
    )
