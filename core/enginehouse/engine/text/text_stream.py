"""Token ids to visible text: whole characters, stop strings, and text that is held back.

Called by the loop, once per token and sequence. Does not know requests or tool calls.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from enginehouse.contract.stop_patterns import PatternSearch, stop_patterns

_new_decoder = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Incremental UTF-8 decoder over the bytes of tokens.

    A character whose bytes are spread over several tokens appears with its last byte. Bytes that cannot become a
    character turn into U+FFFD, as in ``bytes.decode("utf-8", "replace")`` of the whole text. The text of control tokens
    is hidden: they count as tokens without bytes.
    """

    __slots__ = ("_control_token_ids", "_decoder", "_partial", "_token_bytes", "num_leading")

    def __init__(self, token_bytes: Sequence[bytes], control_token_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._control_token_ids = control_token_ids
        self._decoder = _new_decoder("replace")
        self._partial = b""  # bytes held by the decoder: the beginning of one character
        self.num_leading = 0
        """Characters of the last text that belong entirely to earlier tokens: 0, or 1 after a broken character."""

    def is_hidden(self, token_id: int) -> bool:
        """Return True if a token adds no bytes: it is a control token, or its bytes are empty."""
        return token_id in self._control_token_ids or not self._token_bytes[token_id]

    def push(self, token_id: int) -> str:
        """Return the characters completed by this token; often its text, "" for part of a character."""
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
    """Return True if ``data`` begins with a byte that may follow the incomplete character ``partial``."""
    try:
        _new_decoder("strict").decode(partial + data[:1])
    except UnicodeDecodeError:
        return False
    return True


class StopAutomaton:
    """All stop strings of a request as one Aho-Corasick automaton; immutable, shared by its choices.

    A state is the longest suffix of the text so far that is a prefix of a stop string. Its length, ``depth[state]``, is
    therefore exactly the number of characters to hold back: one less could show the first character of a stop string,
    one more would delay text that cannot belong to a stop string. State 0 is the empty suffix. Scanning takes time
    linear in the length of the text, for any stop strings.

    Source: A. Aho, M. Corasick, "Efficient string matching" (1975); the search ends at the first match.
    """

    __slots__ = ("_fail", "_first", "_goto", "_match", "depth")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not stops or not all(stops):
            raise ValueError("stop strings must not be empty")
        self._goto: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._match: list[str | None] = [None]  # the longest stop string that ends in this state
        self.depth = [0]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._first = frozenset(self._goto[0])

    def scan(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read ``text`` from ``state`` up to the end of the first stop string in it.

        The stop string that is complete first wins, since generation ends there; of several that end with the same
        character the longest, so that no prefix of another one is shown.

        Returns:
            The new state; the number of characters read; the stop string, or None after all of ``text``.
        """
        if not state and self._first.isdisjoint(text):
            return 0, len(text), None
        goto, fail, match = self._goto, self._fail, self._match
        for num_read, char in enumerate(text, 1):
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            if match[state] is not None:
                return state, num_read, match[state]
        return state, len(text), None

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._goto[state].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[state][char] = following
                self._goto.append({})
                self._fail.append(0)
                self._match.append(None)
                self.depth.append(self.depth[state] + 1)
            state = following
        self._match[state] = stop

    def _link(self) -> None:
        """Set each state's fail state, shortest states first, and propagate matches along them."""
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._goto[state].items():
                fail = self._fail[state]
                while fail and char not in self._goto[fail]:
                    fail = self._fail[fail]
                self._fail[following] = self._goto[fail].get(char, 0)
                if self._match[following] is None:
                    self._match[following] = self._match[self._fail[following]]
                queue.append(following)


@lru_cache(maxsize=64)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of ``stops``, shared by the choices of a request and by requests with equal stops."""
    return StopAutomaton(stops)


class StopSearch:
    """The search for stop strings and expressions in one text, which comes in parts.

    Args:
        stop: stop strings.
        patterns: regular expressions (:mod:`enginehouse.contract.stop_patterns`).

    Attributes:
        num_held: characters at the end of the text that may be part of a stop string or match.
    """

    __slots__ = ("_automaton", "_search", "_state", "num_held")

    def __init__(self, stop: tuple[str, ...], patterns: tuple[str, ...] = ()) -> None:
        self._automaton = stop_automaton(stop) if stop else None
        self._search = PatternSearch(stop_patterns(patterns)) if patterns else None
        self._state = self.num_held = 0

    def reset(self) -> None:
        """Begin a new text."""
        self._state = self.num_held = 0
        if self._search is not None:
            self._search.reset()

    def scan(self, text: str) -> tuple[int, int]:
        """Read ``text`` up to the end of the first stop string or match in it.

        Returns:
            The number of characters read, and the length of what ended the text, or 0 after all of ``text``.
        """
        num_read, length = len(text), 0
        if self._automaton is not None:
            self._state, num_read, found = self._automaton.scan(self._state, text)
            length, self.num_held = len(found or ""), self._automaton.depth[self._state]
        if self._search is not None:
            num_before, matched = self._search.scan(text[:num_read])
            if matched:
                length = max(matched, length) if num_before == num_read else matched
                num_read = num_before
            self.num_held = max(self.num_held if self._automaton is not None else 0, self._search.num_held)
        return num_read, length


class TextPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Text and tokens that became visible.

    Attributes:
        text: whole characters; never any part of a stop string, never the text of a control token.
        token_ids: tokens whose first visible character is in ``text``. A token without text of its own (a control token
            under ``ignore_eos``) is listed as soon as everything before it is visible; an incomplete character at the
            end adds its tokens without text.
        stop: the stop string, or the match of a regular expression, that ended the text; else None.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    stop: str | None = None


class TextStream:
    """Turns pushed tokens into pieces of text, holding back as little as possible.

    Only the bytes of an incomplete character and the longest suffix of the text that is a prefix of a stop string, or
    may become a match, are held back. A token of which one character is visible is visible; a token entirely inside
    the stop string is not.

    Args:
        token_bytes: bytes of each token id, indexed by id.
        control_token_ids: ids whose text is hidden; stop strings are not searched for in them.
        stop: strings before which the text ends, each non-empty. The one that is complete first wins; of several that
            end with the same character, the longest.
        stop_regex: regular expressions before whose match the text ends; chosen among in the same way.

    Attributes:
        hidden_token_ids: tokens entirely inside the stop string that ended the text.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_is_before_answer",
        "_num_decoded",
        "_num_shown",
        "_pending",
        "_search",
        "_stop",
        "hidden_token_ids",
    )

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        control_token_ids: frozenset[int],
        stop: tuple[str, ...] = (),
        stop_regex: tuple[str, ...] = (),
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes, control_token_ids)
        self._search = StopSearch(stop, stop_regex) if stop or stop_regex else None
        self._held = ""  # decoded but not shown; may become a stop string or match
        self._num_decoded = 0  # characters
        self._num_shown = 0  # characters
        # (token id, number of shown characters from which it is visible), in push order
        self._pending: deque[tuple[int, int]] = deque()
        self._stop: str | None = None
        self.hidden_token_ids: tuple[int, ...] = ()
        self._is_before_answer = False  # in reasoning, or in the white space between reasoning and answer

    @property
    def may_stop(self) -> bool:
        """True if stop strings or expressions may end the text."""
        return self._search is not None

    @property
    def num_pending(self) -> int:
        """Number of tokens pushed but not yet visible."""
        return len(self._pending)

    @property
    def pending_token_ids(self) -> tuple[int, ...]:
        """Tokens pushed but not yet visible."""
        return tuple(token_id for token_id, _ in self._pending)

    def push(self, token_id: int, *, is_reasoning: bool = False) -> TextPiece:
        """Process the next token; after a stop string nothing more becomes visible.

        Stop strings are searched for in the answer only: not in reasoning, nor in the white space after it, which
        clients do not see and which a forced closing may have added.
        """
        if self._stop is not None:
            return TextPiece("", (), self._stop)
        detokenizer = self._detokenizer
        text = detokenizer.push(token_id)
        # By far the most common case. Text without a character of this token completed an earlier, broken character.
        if self._search is None and len(text) > detokenizer.num_leading and not self._pending:
            self._num_decoded += len(text)
            self._num_shown = self._num_decoded
            return TextPiece(text, (token_id,))
        visible_at = self._num_decoded + detokenizer.num_leading
        if not detokenizer.is_hidden(token_id):
            visible_at += 1
        self._pending.append((token_id, visible_at))
        self._num_decoded += len(text)
        if is_reasoning or self._is_before_answer:
            self._is_before_answer = is_reasoning or not text or text.isspace()
            if self._is_before_answer:
                text, self._held = self._held + text, ""
                if self._search is not None:
                    self._search.reset()
                return self._show(text)
        return self._advance(text)

    def flush(self) -> TextPiece:
        """Return the text held back for stop strings and all pending tokens; call when the sequence ended without one.

        An incomplete character at the end (a token limit may cut an emoji in two) is dropped from the text, which
        consists of whole characters only; its tokens are listed.
        """
        if self._stop is not None:
            return TextPiece("", (), self._stop)
        piece = TextPiece(self._held, self.pending_token_ids)
        self._num_shown += len(self._held)
        self._held = ""
        if self._search is not None:
            self._search.reset()
        self._pending.clear()
        return piece

    def _advance(self, text: str) -> TextPiece:
        search = self._search
        if search is None:
            return self._show(text)
        num_held = len(self._held)
        num_read, length = search.scan(text)
        held = self._held + text if num_held else text
        if not length:
            cut = len(held) - search.num_held
            self._held = held[cut:]
            return self._show(held[:cut])
        end = num_held + num_read
        self._stop = held[end - length : end]
        piece = self._show(held[: end - length])
        self._held = ""
        self.hidden_token_ids = self.pending_token_ids
        self._pending.clear()
        return piece

    def _show(self, text: str) -> TextPiece:
        self._num_shown += len(text)
        pending, token_ids = self._pending, []
        while pending and pending[0][1] <= self._num_shown:
            token_ids.append(pending.popleft()[0])
        return TextPiece(text, tuple(token_ids), self._stop)
