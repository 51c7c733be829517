"""New keys, and what is kept of a key instead of it: a salted hash."""

from __future__ import annotations

import hashlib
import re
import secrets

from enginehouse.contract.errors import ConfigError
from enginehouse.settings.auth import MAX_KEY_BYTES

__all__ = ["SALT_BYTES", "digest_of", "hash_key", "new_key", "read_hash"]

SALT_BYTES = 16

_MIN_HASHED_CHARS = 20
"""A shorter key could be guessed by trying, and its hash would not stop that."""

_DIGEST_BYTES = 32
_HASH = re.compile(rf"blake2b:([0-9a-f]{{{2 * SALT_BYTES}}}):([0-9a-f]{{{2 * _DIGEST_BYTES}}})")


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
    salt = secrets.token_bytes(SALT_BYTES)
    return f"blake2b:{salt.hex()}:{digest_of(encoded, salt).hex()}"


def read_hash(text: str) -> tuple[bytes, bytes] | None:
    """Salt and digest of what :func:`hash_key` wrote; None when it is something else."""
    found = _HASH.fullmatch(text)
    return None if found is None else (bytes.fromhex(found[1]), bytes.fromhex(found[2]))


def digest_of(key: bytes, salt: bytes) -> bytes:
    """The hash of a key with that salt."""
    return hashlib.blake2b(key, salt=salt, digest_size=_DIGEST_BYTES).digest()
