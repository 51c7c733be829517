"""API keys: the key file, which stores only hashes, changes of it, and the keys of the running server.

A key is a long random string, so one round of a salted, fast hash is enough: a slow hash would protect nothing that can
be guessed, and would let anyone keep the server busy with wrong keys. Keys are neither stored nor logged in plain text.
Lines of the file are added and removed under a lock and atomically: readers see the old file or the new one. The guard
reads :attr:`KeyStore.ring` for every request; the server runs :meth:`KeyStore.watch` in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from attrs import field, fields, frozen

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.identity import Identity, Scope, read_moment
from enginehouse.contract.regular_files import read_regular_text
from enginehouse.settings.auth import MAX_KEY_BYTES, AuthSettings, KeySettings
from enginehouse.settings.profiles import PROFILES
from enginehouse.settings.structuring import closest

SALT_BYTES = 16

_MIN_HASHED_CHARS = 20
"""A shorter key could be found by trying; a hash does not prevent that."""

_DIGEST_BYTES = 32
_HASH = re.compile(rf"blake2b:([0-9a-f]{{{2 * SALT_BYTES}}}):([0-9a-f]{{{2 * _DIGEST_BYTES}}})")


def new_key() -> str:
    """Return a new key with 256 random bits."""
    return f"eh-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """Return the hash that a key file stores for ``key``.

    Raises:
        ConfigError: the key is short enough to be guessed, or longer than the server accepts.
    """
    encoded = key.encode()
    if len(key) < _MIN_HASHED_CHARS or len(encoded) > MAX_KEY_BYTES:
        size = f"at least {_MIN_HASHED_CHARS} characters and at most {MAX_KEY_BYTES} bytes"
        raise ConfigError(f"a key needs {size}; leave it out to get a new one")
    salt = secrets.token_bytes(SALT_BYTES)
    return f"blake2b:{salt.hex()}:{digest_of(encoded, salt).hex()}"


def read_hash(text: str) -> tuple[bytes, bytes] | None:
    """Return salt and digest of a string written by :func:`hash_key`; None for any other string."""
    found = _HASH.fullmatch(text)
    return None if found is None else (bytes.fromhex(found[1]), bytes.fromhex(found[2]))


def digest_of(key: bytes, salt: bytes) -> bytes:
    """Return the hash of a key with that salt."""
    return hashlib.blake2b(key, salt=salt, digest_size=_DIGEST_BYTES).digest()


@frozen(kw_only=True)
class KeyRecord(Identity):
    """One key and its owner.

    Attributes:
        salt: 16 bytes.
        digest: of the key with that salt.
    """

    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)


class KeyRing:
    """All keys of a server.

    Args:
        records: with different names.
    """

    def __init__(self, records: Iterable[KeyRecord]) -> None:
        self._by_salt: dict[bytes, list[KeyRecord]] = {}
        for record in records:
            self._by_salt.setdefault(record.salt, []).append(record)

    @property
    def is_empty(self) -> bool:
        """True without any key."""
        return not self._by_salt

    def unknown_models(self, served: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield (key name, model) for each permitted model that is not in ``served``, which holds names and aliases."""
        for records in self._by_salt.values():
            for record in records:
                yield from ((record.name, model) for model in sorted(record.models or ()) if model not in served)

    def find(self, given: bytes) -> KeyRecord | None:
        """Return the record of a key, or None. All records are compared in constant time, so timing reveals nothing."""
        if len(given) > MAX_KEY_BYTES:
            return None
        found = None
        for salt, records in self._by_salt.items():
            digest = digest_of(given, salt)
            for record in records:
                if hmac.compare_digest(digest, record.digest):
                    found = record
        return found


@frozen(kw_only=True)
class KeyOptions:
    """Fields of a line other than name and hash, as text; None if absent. Attribute names equal those in the file."""

    scopes: str | None = None
    profile: str | None = None
    namespace: str | None = None
    models: str | None = None
    rpm: str | None = None
    tpm: str | None = None
    concurrent: str | None = None
    priority: str | None = None
    expires: str | None = None


_NAMES = tuple(attribute.name for attribute in fields(KeyOptions))


def key_line(
    name: str,
    hashed: str,
    scopes: Sequence[str] = ("infer",),
    profile: str | None = None,
    namespace: str | None = None,
    **options: str | None,
) -> str:
    """Return a line of a key file; ``options`` are further fields of :class:`KeyOptions`.

    Raises:
        ConfigError: a part is invalid, so that the server would refuse the file.
    """
    said = {"scopes": ",".join(scopes), "profile": profile, "namespace": namespace, **options}
    words = [name, hashed, *(f"{option}={value}" for option, value in said.items() if value)]
    if name.startswith("#") or any(len(word.split()) != 1 for word in words):
        raise ConfigError("names and namespaces are words without spaces, and a name does not begin with '#'")
    try:
        read_line(words)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return " ".join(words)


def read_line(words: Sequence[str]) -> KeyRecord:
    """Parse one line, split at spaces. Messages do not quote its hash, which may be a plain key entered by mistake.

    Raises:
        ValueError: says what is wrong.
    """
    if len(words) < 2:
        raise ValueError("must be a name, a hash and options, with spaces between them")
    name, hashed, *rest = words
    if not all(word.isprintable() for word in words):
        raise ValueError("holds characters that cannot be printed")
    found = read_hash(hashed)
    if found is None:
        raise ValueError("the second word must be a hash as 'enginehouse keys hash' writes it")
    said = _read_options(rest)
    return KeyRecord(
        name=name,
        salt=found[0],
        digest=found[1],
        scopes=frozenset(_known("scope", (said.scopes or "infer").split(","), get_args(Scope))),
        models=_read_models(said.models),
        profile=None if said.profile is None else _known("profile", [said.profile], tuple(PROFILES))[0],
        namespace=said.namespace or name,
        requests_per_minute=_read_count("rpm", said.rpm),
        tokens_per_minute=_read_count("tpm", said.tpm),
        max_concurrent=_read_count("concurrent", said.concurrent),
        priority=_read_priority(said.priority),
        expires=_read_expiry(said.expires),
    )


def _read_options(words: Sequence[str]) -> KeyOptions:
    options: dict[str, str] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if option not in _NAMES:
            raise ValueError(f"unknown option {option!r}{closest(option, _NAMES)}")
        if not equals or not value or option in options:
            raise ValueError(f"the option {option!r} needs one value")
        options[option] = value
    return KeyOptions(**options)


def _known(noun: str, given: Sequence[str], known: Sequence[str]) -> Sequence[Any]:
    """Return ``given`` after checking that all its values are known."""
    unknown = next((value for value in given if value not in known), None)
    if unknown is not None:
        raise ValueError(f"unknown {noun} {unknown!r}; there are {', '.join(known)}")
    return given


def _read_models(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    names = text.split(",")
    if not all(names):
        raise ValueError("the option 'models' needs names of models with commas between them")
    return frozenset(names)


def _read_count(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ValueError(f"the option {option!r} must be a whole number of at least 1, not {text!r}")
    return int(text)


def _read_priority(text: str | None) -> int:
    digits = (text or "0").removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or int(digits) >= 2**31:
        raise ValueError(f"the option 'priority' must be a whole number, not {text!r}")
    return int(text or "0")


def _read_expiry(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return read_moment(text)
    except ValueError as error:
        raise ValueError(f"the option 'expires' {error}") from None


MAX_KEY_FILE_BYTES = 16 * 2**20
KEY_FILE_PATH = "auth.key_file"
"""Dotted path of the setting, for messages."""


def read_key_file(path: Path, taken: Sequence[str] = (), *, may_be_empty: bool = False) -> list[KeyRecord]:
    """Return the records of a key file.

    Args:
        path: the file.
        taken: names that the file must not use again.
        may_be_empty: allow a file without keys.

    Raises:
        ConfigError: it cannot be read, has no keys, or a line is invalid; the message names the line.
    """
    try:
        text = read_regular_text(path, MAX_KEY_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY_FILE_PATH}: cannot read {path}: {error}", KEY_FILE_PATH) from error
    records = records_in(text, path, taken)
    if not records and not may_be_empty:
        # Without keys all callers would be refused, which no configuration with a key file intends.
        raise ConfigError(f"{KEY_FILE_PATH}: {path} holds no key", KEY_FILE_PATH)
    return records


def records_in(text: str, path: Path, taken: Sequence[str] = ()) -> list[KeyRecord]:
    """Parse the text of a key file; ``path`` is for messages. Raises ConfigError as :func:`read_key_file`."""
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


if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


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
    """Remove the key ``name``; comments and other lines stay. Returns False if it does not exist.

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
    finally:
        new.unlink(missing_ok=True)  # it exists no longer if it has replaced the old one


def _keep_owner(path: Path, descriptor: int) -> None:
    """Give the new file the old one's owner, so that an administrator does not lock out the server's user."""
    if sys.platform != "win32" and path.exists():
        old = path.stat()
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)


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
