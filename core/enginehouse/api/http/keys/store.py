"""The keys of the running server: those of the settings and of the key file, which is read again when it changes.

The guard asks :attr:`KeyStore.ring` about every request; the server runs :meth:`KeyStore.watch` beside its work.
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

__all__ = ["KeyStore", "load_keys"]

_log = logging.getLogger("enginehouse.server")

_WATCH_S = 1.0
"""Seconds between two looks at the file: so long may a key work that was revoked."""


class KeyStore:
    """Owns the ring of keys; everything but :meth:`watch` may be called from any thread.

    Raises:
        ConfigError: the key file cannot be used.
    """

    def __init__(self, settings: AuthSettings) -> None:
        self._settings = settings
        self._seen = _look(settings)
        self.ring = load_keys(settings)
        self._reading = threading.RLock()  # a look at the file for old settings must not outlast new ones

    @property
    def needs_key(self) -> bool:
        """Whether only known callers are served."""
        return self._settings.needs_key

    def reload(self, settings: AuthSettings | None = None) -> None:
        """Read the file again, perhaps for new settings; blocking. When that fails, all stays as it is.

        A file whose last key was revoked is fine: then nobody of it may call.

        Raises:
            ConfigError: the file cannot be used.
        """
        with self._reading:
            settings = settings if settings is not None else self._settings
            seen = _look(settings)
            self.ring = load_keys(settings, may_be_empty=True)
            self._settings, self._seen = settings, seen

    async def watch(self) -> None:
        """Follow the changes of the file until cancelled; a broken file is reported once, and the old keys stay."""
        while True:
            await asyncio.sleep(_WATCH_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> bool:
        """Read the file again if it has changed since it was last looked at; whether new keys hold now."""
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
    """The keys of the settings and of the key file.

    Raises:
        ConfigError: the file cannot be used, or a name or a key is there twice.
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
    """What tells whether the file is another one than before; None when there is none."""
    if settings.key_file is None:
        return None
    try:
        found = Path(settings.key_file).expanduser().stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _check_same_keys(settings: AuthSettings, hashed: KeyRing) -> None:
    """Refuse a key of the settings that the file has, too, perhaps with other scopes."""
    for index, key in enumerate(settings.keys):
        same = hashed.find((key if isinstance(key, str) else key.key).encode())
        if same is not None:
            raise ConfigError(f"{same.name!r} in the key file has the same key", f"auth.keys[{index}]")


def _record_of(key: str | KeySettings, index: int, salt: bytes) -> KeyRecord:
    """A key of the settings; a bare one is named by its place."""
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
