"""Signatures of thinking blocks, with a key of this process.

A signature of reasoning that is not shown carries it, so that a client can send it back; only signatures of this server
are opened. A client may send visible reasoning back with any signature or with none.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import zlib

__all__ = ["Signatures"]

_MAC_BYTES = 32
_SIGNED, _SEALED = b"\x01", b"\x02"


class Signatures:
    """Writes signatures and opens its own ones."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(_MAC_BYTES)

    def sign(self, thinking: str) -> str:
        """Return the signature of reasoning that the client sees."""
        return _text(_SIGNED + self._mac(_SIGNED, thinking.encode("utf-8", "replace")))

    def seal(self, thinking: str) -> str:
        """Return a signature that carries reasoning which the client does not see."""
        packed = zlib.compress(thinking.encode("utf-8", "replace"))
        return _text(_SEALED + self._mac(_SEALED, packed) + packed)

    def open(self, signature: str) -> str | None:
        """Return the reasoning in a signature of :meth:`seal`; None if it is another one, or another server's."""
        try:
            data = base64.urlsafe_b64decode(signature.encode())
        except (binascii.Error, ValueError):
            return None
        kind, mac, packed = data[:1], data[1 : 1 + _MAC_BYTES], data[1 + _MAC_BYTES :]
        if kind != _SEALED or not hmac.compare_digest(mac, self._mac(_SEALED, packed)):
            return None
        return zlib.decompress(packed).decode()

    def _mac(self, kind: bytes, data: bytes) -> bytes:
        return hmac.digest(self._key, kind + data, hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()
