"""Token ids to characters, one token at a time.

Used by :class:`enginehouse.engine.text.text_stream.TextStream`. Knows the bytes of each token and UTF-8;
knows nothing about stop strings or about which tokens have been reported.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["Detokenizer"]

_new_decoder = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Incremental UTF-8 over the bytes of tokens.

    A character whose bytes are spread over several tokens appears when its last byte has arrived. Bytes
    that can never become a character turn into U+FFFD, as ``bytes.decode("utf-8", "replace")`` would do
    with the whole. The text of control tokens is hidden: they count as tokens without bytes.
    """

    __slots__ = ("_control_token_ids", "_decoder", "_partial", "_token_bytes", "num_leading")

    def __init__(self, token_bytes: Sequence[bytes], control_token_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._control_token_ids = control_token_ids
        self._decoder = _new_decoder("replace")
        self._partial = b""  # the bytes that the decoder holds: a beginning of one character
        self.num_leading = 0
        """Characters of the last text that belong wholly to earlier tokens: 0, or 1 after a broken character."""

    def is_hidden(self, token_id: int) -> bool:
        """Whether a token adds no bytes: it is a control token, or its bytes are empty."""
        return token_id in self._control_token_ids or not self._token_bytes[token_id]

    def push(self, token_id: int) -> str:
        """The characters that are complete with this token; often its text, "" for part of a character."""
        self.num_leading = 0
        if token_id in self._control_token_ids:
            return ""
        data = self._token_bytes[token_id]
        if not self._partial and data.isascii():
            return data.decode("ascii")
        return self._decode(data)

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        if self._partial and text.startswith(_REPLACEMENT) and not _continues(self._partial, data):
            self.num_leading = 1
        self._partial = self._decoder.getstate()[0]
        return text


def _continues(partial: bytes, data: bytes) -> bool:
    """Whether ``data`` begins with a byte that may follow the incomplete character ``partial``."""
    try:
        _new_decoder("strict").decode(partial + data[:1])
    except UnicodeDecodeError:
        return False
    return True
