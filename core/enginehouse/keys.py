"""API keys: who calls, what they may do, and a file that holds only hashes of keys.

The server makes one :class:`KeyRing` when it starts; the guard asks it about every request. The command
``enginehouse keys`` writes the file's lines. Knows no HTTP.

A key is a long random string, so one round of a salted, fast hash is enough: there is nothing to guess that a slow hash
would have to protect, and a slow one would let anybody keep the server busy with wrong keys.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from attrs import field, frozen

from enginehouse.auth import MAX_KEY_BYTES, AuthSettings, KeySettings, Scope
from enginehouse.errors import ConfigError
from enginehouse.profiles import PROFILES
from enginehouse.structuring import closest

__all__ = ["KeyRecord", "KeyRing", "hash_key", "key_line", "load_keys", "new_key", "read_key_file"]

_MIN_HASHED_CHARS = 20
"""A shorter key could be guessed by trying, and its hash would not stop that."""

_SALT_BYTES = 16
_DIGEST_BYTES = 32
_HASH = re.compile(rf"blake2b:([0-9a-f]{{{2 * _SALT_BYTES}}}):([0-9a-f]{{{2 * _DIGEST_BYTES}}})")
_OPTIONS = ("scopes", "profile", "namespace")
_PATH = "auth.key_file"


@frozen(kw_only=True)
class KeyRecord:
    """One key and its owner.

    Attributes:
        name: who uses it; in the log.
        salt: 16 bytes.
        digest: of the key with that salt.
        scopes: what it may do.
        profile: the API profile of its requests; None is the server's.
        namespace: keys of one namespace share the prefix cache.
    """

    name: str
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    scopes: frozenset[Scope] = frozenset({"infer"})
    profile: str | None = None
    namespace: str


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
        """Whether there are no keys, so that none is needed."""
        return not self._by_salt

    def find(self, given: bytes) -> KeyRecord | None:
        """The record of a key. Every record is compared, on bytes of equal length, so that time tells nothing."""
        if len(given) > MAX_KEY_BYTES:
            return None
        found = None
        for salt, records in self._by_salt.items():
            digest = _digest(given, salt)
            for record in records:
                if hmac.compare_digest(digest, record.digest):
                    found = record
        return found


def load_keys(settings: AuthSettings) -> KeyRing:
    """The keys of the settings and of the key file.

    Raises:
        ConfigError: the file cannot be used, or a name or a key is there twice.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    records = [_record_of(key, index, salt) for index, key in enumerate(settings.keys)]
    if settings.key_file is not None:
        hashed = read_key_file(Path(settings.key_file).expanduser(), taken=[record.name for record in records])
        _check_same_keys(settings, KeyRing(hashed))
        records += hashed
    return KeyRing(records)


def read_key_file(path: Path, taken: Sequence[str] = ()) -> list[KeyRecord]:
    """The records of a key file: one line each, ``#`` begins a comment line.

    Args:
        path: the file.
        taken: names that the file may not use again.

    Raises:
        ConfigError: it cannot be read, holds no key, or a line is wrong; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_PATH}: cannot read {path}: {error}", _PATH) from error
    records: list[KeyRecord] = []
    names = set(taken)
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            record = _read_line(words)
            if record.name in names:
                raise ValueError(f"the name {record.name!r} is taken by another key")
        except ValueError as error:
            raise ConfigError(f"{_PATH}: {path}, line {number}: {error}", _PATH) from error
        names.add(record.name)
        records.append(record)
    if not records:
        # Without keys everyone may call; nobody who names a key file means that.
        raise ConfigError(f"{_PATH}: {path} holds no key", _PATH)
    return records


def new_key() -> str:
    """A new key with 256 random bits."""
    return f"eh-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """What a key file holds instead of ``key``.

    Raises:
        ConfigError: the key is so short that it could be guessed, or so long that the server would not look at it.
    """
    encoded = key.encode()
    if len(key) < _MIN_HASHED_CHARS or len(encoded) > MAX_KEY_BYTES:
        size = f"at least {_MIN_HASHED_CHARS} characters and at most {MAX_KEY_BYTES} bytes"
        raise ConfigError(f"a key needs {size}; leave it out to get a new one")
    salt = secrets.token_bytes(_SALT_BYTES)
    return f"blake2b:{salt.hex()}:{_digest(encoded, salt).hex()}"


def key_line(
    name: str, hashed: str, scopes: Sequence[str] = ("infer",), profile: str | None = None, namespace: str | None = None
) -> str:
    """A line of a key file.

    Raises:
        ConfigError: a part is wrong, so that the server would refuse the file.
    """
    options = {"scopes": ",".join(scopes), "profile": profile, "namespace": namespace}
    words = [name, hashed, *(f"{option}={value}" for option, value in options.items() if value)]
    if name.startswith("#") or any(len(word.split()) != 1 for word in words):
        raise ConfigError("a name and a namespace are words without spaces, and a name does not begin with '#'")
    try:
        _read_line(words)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return " ".join(words)


def _digest(key: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(key, salt=salt, digest_size=_DIGEST_BYTES).digest()


def _check_same_keys(settings: AuthSettings, hashed: KeyRing) -> None:
    """Refuse a key of the settings that the file has, too, perhaps with other scopes."""
    for index, key in enumerate(settings.keys):
        same = hashed.find((key if isinstance(key, str) else key.key).encode())
        if same is not None:
            raise ConfigError(f"{same.name!r} in the key file has the same key", f"auth.keys[{index}]")


def _record_of(key: str | KeySettings, index: int, salt: bytes) -> KeyRecord:
    """A key of the settings; a bare one is named by its place."""
    if isinstance(key, str):
        name = f"key-{index + 1}"
        return KeyRecord(name=name, salt=salt, digest=_digest(key.encode(), salt), namespace=name)
    return KeyRecord(
        name=key.name,
        salt=salt,
        digest=_digest(key.key.encode(), salt),
        scopes=frozenset(key.scopes),
        profile=key.profile,
        namespace=key.namespace or key.name,
    )


def _read_line(words: Sequence[str]) -> KeyRecord:
    """One line, split at spaces. Its hash is not quoted in messages: it may be a key that was left there by mistake."""
    if len(words) < 2:
        raise ValueError("must be a name, a hash and options, with spaces between them")
    name, hashed, *rest = words
    if not all(word.isprintable() for word in words):
        raise ValueError("holds characters that cannot be printed")
    found = _HASH.fullmatch(hashed)
    if found is None:
        raise ValueError("the second word must be a hash as 'enginehouse keys hash' writes it")
    options: dict[str, str] = {}
    for word in rest:
        option, equals, value = word.partition("=")
        if option not in _OPTIONS:
            raise ValueError(f"unknown option {option!r}{closest(option, _OPTIONS)}")
        if not equals or not value or option in options:
            raise ValueError(f"the option {option!r} needs one value")
        options[option] = value
    scopes = options.get("scopes", "infer").split(",")
    for given, known, noun in ((scopes, get_args(Scope), "scope"), ([options.get("profile")], PROFILES, "profile")):
        unknown = next((value for value in given if value is not None and value not in known), None)
        if unknown is not None:
            raise ValueError(f"unknown {noun} {unknown!r}; there are {', '.join(known)}")
    salt, digest = (bytes.fromhex(part) for part in found.groups())
    return KeyRecord(
        name=name,
        salt=salt,
        digest=digest,
        scopes=frozenset(scopes),  # type: ignore[arg-type]  # checked above
        profile=options.get("profile"),
        namespace=options.get("namespace", name),
    )
