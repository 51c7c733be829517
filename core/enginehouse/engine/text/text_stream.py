"""The text of one sequence as its tokens arrive: what may be shown now, and with which tokens.

Created by the engine, one per choice, and used on the engine thread. Knows token bytes and stop
strings; knows no logits, no log-probabilities and no end tokens: the engine does not push the token
that ends a generation.

How the engine keeps its own data (for example log-probabilities) in step: append one entry to a FIFO
per ``push``; each piece takes ``len(piece.token_ids)`` entries from its front. Tokens become visible in
the order in which they were pushed, none twice. After a stop string or ``flush`` whatever is left in
the FIFO was dropped: those tokens will never be visible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from enginehouse.engine.text.detokenizer import Detokenizer
from enginehouse.engine.text.stops import stop_automaton

__all__ = ["Piece", "TextStream"]


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became visible.

    Attributes:
        text: whole characters; never any part of a stop string, never the text of a control token.
        token_ids: the tokens whose first visible character is in ``text``. A token without text of its
            own (a control token under ``ignore_eos``) is listed as soon as everything before it is visible.
        stop: the stop string that ended the text, else None.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    stop: str | None = None


_NOTHING = Piece("")


class TextStream:
    """Turns pushed tokens into pieces of text, holding back as little as possible.

    Held back are only: bytes of a character that is not complete, and the longest suffix of the text that
    is a beginning of a stop string. A token of which one character is visible is visible; a token wholly
    inside the stop string is not.

    Args:
        token_bytes: bytes of each token id, indexed by id.
        control_token_ids: ids whose text is hidden; stop strings are not looked for in them.
        stop: strings before which the text ends, each non-empty. The one that is complete first wins, of
            several ending with the same character the longest.
    """

    __slots__ = (
        "_automaton",
        "_detokenizer",
        "_held",
        "_is_before_answer",
        "_num_decoded",
        "_num_shown",
        "_pending",
        "_state",
        "_stop",
    )

    def __init__(
        self, token_bytes: Sequence[bytes], control_token_ids: frozenset[int], stop: tuple[str, ...] = ()
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes, control_token_ids)
        self._automaton = stop_automaton(stop) if stop else None
        self._state = 0
        self._held = ""  # decoded and not shown; always a beginning of a stop string
        self._num_decoded = 0  # characters
        self._num_shown = 0  # characters
        # (token id, number of shown characters from which on it is visible), in push order
        self._pending: deque[tuple[int, int]] = deque()
        self._stop: str | None = None
        self._is_before_answer = False  # in reasoning, or in the white space between it and the answer

    @property
    def num_pending(self) -> int:
        """Tokens pushed and not yet visible."""
        return len(self._pending)

    @property
    def pending_token_ids(self) -> tuple[int, ...]:
        """The tokens pushed and not yet visible."""
        return tuple(token_id for token_id, _ in self._pending)

    def push(self, token_id: int, *, is_reasoning: bool = False) -> Piece:
        """Take the next token; after a stop string nothing becomes visible any more.

        Stop strings are looked for in the answer only: not in reasoning, nor in the white space behind it, which
        clients are not shown and which a budget may have put there.
        """
        if self._stop is not None:
            return Piece("", (), self._stop)
        detokenizer = self._detokenizer
        text = detokenizer.push(token_id)
        # By far the most common case. Text that holds no character of this token ended an earlier, broken character.
        if self._automaton is None and len(text) > detokenizer.num_leading and not self._pending:
            self._num_decoded += len(text)
            self._num_shown = self._num_decoded
            return Piece(text, (token_id,))
        visible_at = self._num_decoded + detokenizer.num_leading
        if not detokenizer.is_hidden(token_id):
            visible_at += 1
        self._pending.append((token_id, visible_at))
        self._num_decoded += len(text)
        if is_reasoning or self._is_before_answer:
            self._is_before_answer = is_reasoning or not text or text.isspace()
            if self._is_before_answer:
                text, self._held, self._state = self._held + text, "", 0
                return self._show(text)
        return self._advance(text)

    def flush(self) -> Piece:
        """Show what was held back for stop strings; call once, when the sequence has ended without one.

        The beginning of a character that was never completed (a token limit may cut an emoji in two) is
        dropped together with the tokens that hold nothing else: text consists of whole characters only.
        """
        if self._stop is not None:
            return Piece("", (), self._stop)
        text, self._held, self._state = self._held, "", 0
        piece = self._show(text) if text or self._pending else _NOTHING
        self._pending.clear()
        return piece

    def _advance(self, text: str) -> Piece:
        automaton = self._automaton
        if automaton is None:
            return self._show(text)
        num_held = len(self._held)
        self._state, num_read, self._stop = automaton.scan(self._state, text)
        held = self._held + text if num_held else text
        if self._stop is None:
            cut = len(held) - automaton.depth[self._state]
            self._held = held[cut:]
            return self._show(held[:cut])
        piece = self._show(held[: num_held + num_read - len(self._stop)])
        self._held = ""
        self._pending.clear()
        return piece

    def _show(self, text: str) -> Piece:
        self._num_shown += len(text)
        pending, token_ids = self._pending, []
        while pending and pending[0][1] <= self._num_shown:
            token_ids.append(pending.popleft()[0])
        return Piece(text, tuple(token_ids), self._stop)
