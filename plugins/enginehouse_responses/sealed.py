"""The opaque ``encrypted_content`` of reasoning items: the text, packed and signed with a key of this server.

A client that keeps its own history sends it back, and the model gets its reasoning again. The text is not secret from
the client, which received it anyway; the signature shows what this server wrote. Without a configured secret the
key is drawn at start, so a blob of an earlier process is not readable.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import zlib

__all__ = ["Seal"]

_VERSION = b"\x01"
_MAC_BYTES = 16
_MAX_CHARS = 4 * 2**20
"""Maximum length of an unpacked text: a short blob could otherwise unpack to any size."""


class Seal:
    """Packs and unpacks reasoning; ``secret`` is the key."""

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.sha256(b"enginehouse responses reasoning" + secret).digest()

    def pack(self, text: str) -> str:
        """Return the blob of a text."""
        packed = _VERSION + zlib.compress(text.encode("utf-8", "surrogatepass"))
        return base64.urlsafe_b64encode(self._mac(packed) + packed).decode()

    def unpack(self, blob: str) -> str | None:
        """Return the text of a blob; None if this server, or a server with its secret, did not write it."""
        try:
            data = base64.b64decode(blob.encode("ascii"), b"-_", validate=True)
        except (UnicodeEncodeError, binascii.Error):
            return None
        mac, packed = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(packed)) or packed[:1] != _VERSION:
            return None
        text = zlib.decompressobj().decompress(packed[1:], _MAX_CHARS)
        return text.decode("utf-8", "surrogatepass")

    def _mac(self, packed: bytes) -> bytes:
        return hmac.digest(self._key, packed, "sha256")[:_MAC_BYTES]
