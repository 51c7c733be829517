"""API keys: who calls, what they may do, and a file that holds only hashes of keys.

A key is a long random string, so one round of a salted, fast hash is enough: there is nothing to guess that a slow hash
would have to protect, and a slow one would let anybody keep the server busy with wrong keys.
"""

from __future__ import annotations

from enginehouse.api.http.keys.editing import add_key, revoke_key
from enginehouse.api.http.keys.file import KeyOptions, KeyRecord, KeyRing, hash_key, key_line, new_key, read_key_file
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
