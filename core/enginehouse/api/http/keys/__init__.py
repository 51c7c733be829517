"""API keys: identity and permissions of callers, and a key file that stores only hashes.

A key is a long random string, so one round of a salted, fast hash is enough: a slow hash would protect nothing that can
be guessed, and would let anyone keep the server busy with wrong keys.
"""

from __future__ import annotations

from enginehouse.api.http.keys.file import (
    KeyOptions,
    KeyRecord,
    KeyRing,
    add_key,
    hash_key,
    key_line,
    new_key,
    read_key_file,
    revoke_key,
)
from enginehouse.api.http.keys.store import KeyStore, load_keys

__all__ = [
    "KeyOptions",
    "KeyRecord",
    "KeyRing",
    "KeyStore",
    "add_key",
    "hash_key",
    "key_line",
    "load_keys",
    "new_key",
    "read_key_file",
    "revoke_key",
]
