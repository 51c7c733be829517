"""Parses the text of one choice into pieces, if that text may contain reasoning or tool calls.

Used by :class:`~enginehouse.api.generation.assembly.Assembly`. Log-probabilities are kept for visible text only: those
of tokens that turned out to be reasoning, a call or a tag are left out. A token without text of its own, such as part
of a character, belongs to the text beside it. Counts the part of a predicted output that was generated, too.
"""

from __future__ import annotations

import codecs
import uuid
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from enginehouse.contract.parsers import AnswerPart, AnswerText, CallArguments, CallStarted, ReasoningText
from enginehouse.contract.surface import CallPiece, Piece
from enginehouse.contract.types import CallDelta, FinishReason, TokenLogprob
from enginehouse.pipeline.answer_parser import AnswerParser


class ChoiceParser:
    """Parses one choice."""

    def __init__(self, index: int, parser: AnswerParser) -> None:
        self._index = index
        self._parser = parser
        self._num_calls = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: list[tuple[str, TokenLogprob]] = []  # tokens whose text is not yet in any piece
        self._is_in_text = True  # the last piece with tokens was visible text, or there was none

    def push(self, text: str, logprobs: Sequence[TokenLogprob] | None) -> list[Piece]:
        """Return the pieces that new text adds, often none."""
        if logprobs is None:
            return self._pieces(self._parser.push(text))
        pieces: list[Piece] = []
        for part, entry in self._by_token(text, logprobs):
            pieces += self._with_logprobs(self._pieces(self._parser.push(part)), part, entry)
        return pieces

    def finish(self, reason: FinishReason) -> list[Piece]:
        """Return the remaining pieces and the end."""
        pieces = self._pieces(self._parser.flush(is_cut=reason == "length"))
        if self._waiting:
            pieces = self._with_logprobs(pieces, "", None)
        if self._waiting and self._is_in_text and not any(part for part, _ in self._waiting):
            pieces.append(Piece(self._index, logprobs=tuple(entry for _, entry in self._waiting)))
        final = "tool_calls" if self._num_calls and reason == "stop" else reason
        return [*pieces, Piece(self._index, finish_reason=final)]

    def _by_token(self, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[tuple[str, TokenLogprob | None]]:
        """Yield ``text`` token by token, so that the result does not depend on the number of tokens per event."""
        if not logprobs:
            yield text, None
            return
        done = 0
        for entry in logprobs[:-1]:
            num_chars = len(self._decoder.decode(entry.token))
            yield text[done : done + num_chars], entry
            done += num_chars
        self._decoder.decode(logprobs[-1].token)
        yield text[done:], logprobs[-1]

    def _with_logprobs(self, pieces: list[Piece], text: str, entry: TokenLogprob | None) -> list[Piece]:
        """Attach the waiting tokens to the first piece of visible text that they form; drop those of other pieces."""
        if entry is not None:
            self._waiting.append((text, entry))
        if not pieces:
            return pieces
        waiting, self._waiting = self._waiting, []
        self._is_in_text = bool(pieces[-1].text)
        for piece in pieces:
            if piece.text:
                num_chars, shown = 0, list[TokenLogprob]()
                while waiting and (num_chars < len(piece.text) or not waiting[-1][0]):
                    part, shown_entry = waiting.pop()
                    num_chars += len(part)
                    shown.append(shown_entry)
                piece.logprobs = tuple(reversed(shown))
                break
        return pieces

    def _pieces(self, parts: Sequence[AnswerPart]) -> list[Piece]:
        """Merge adjacent parts of one kind into one piece."""
        pieces: list[Piece] = []
        previous: type[AnswerPart] | None = None
        for part in parts:
            joins = bool(pieces) and type(part) is previous
            previous = type(part)
            match part:
                case AnswerText(text):
                    if joins:
                        pieces[-1].text += text
                    else:
                        pieces.append(Piece(self._index, text))
                case ReasoningText(text):
                    if joins:
                        pieces[-1].reasoning += text
                    else:
                        pieces.append(Piece(self._index, reasoning=text))
                case CallStarted(name):
                    pieces.append(Piece(self._index, call=self._new_call(name)))
                case CallArguments(text):
                    call = pieces[-1].call if joins else None
                    if call is not None:
                        call.arguments += text
                    else:
                        pieces.append(Piece(self._index, call=CallPiece(self._num_calls - 1, text)))
        return pieces

    def _new_call(self, name: str) -> CallPiece:
        self._num_calls += 1
        return CallPiece(self._num_calls - 1, id=_new_id(), name=name)


def call_piece(event: CallDelta) -> CallPiece:
    """Return a piece of a call that was reported by the engine itself."""
    return CallPiece(event.call, event.arguments, _new_id() if event.name is not None else None, event.name)


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


MIN_RUN = 4
"""Number of tokens that must match before the prediction is followed again; fewer may match by chance."""


class PredictionCount:
    """Compares one completion with its prediction, in time linear in the completion.

    The completion follows the prediction from its beginning until they diverge. The prediction is followed again from
    the next position that has the completion's last :data:`MIN_RUN` tokens, and so on: tokens in such runs are
    accepted, skipped ones are rejected.

    Args:
        token_ids: of the prediction.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)
        self._num_accepted = 0
        self._next = 0  # position in the prediction after all accepted tokens
        self._is_following = bool(token_ids)
        self._recent: deque[int] = deque(maxlen=MIN_RUN)  # tokens of the completion since they diverged
        self._places: dict[tuple[int, ...], list[int]] | None = None  # positions of each run, built when they diverge

    @property
    def num_accepted(self) -> int:
        """Tokens of the prediction that are in the completion."""
        return self._num_accepted

    @property
    def num_rejected(self) -> int:
        """The other tokens of the prediction."""
        return len(self._token_ids) - self._num_accepted

    def push(self, token_ids: Iterable[int]) -> None:
        """Add the next tokens of the completion."""
        for token_id in token_ids:
            if self._is_following and self._next < len(self._token_ids):
                if self._token_ids[self._next] == token_id:
                    self._next += 1
                    self._num_accepted += 1
                    continue
                self._is_following = False
                self._recent.clear()
            self._search(token_id)

    def _search(self, token_id: int) -> None:
        """Search the rest of the prediction for the completion's last tokens."""
        self._recent.append(token_id)
        if len(self._recent) < MIN_RUN:
            return
        if self._places is None:
            self._places = _places_of_runs(self._token_ids)
        places = self._places.get(tuple(self._recent), ())
        at = bisect_left(places, self._next)
        if at < len(places):
            self._next = places[at] + MIN_RUN
            self._num_accepted += MIN_RUN
            self._is_following = True


def _places_of_runs(token_ids: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(token_ids) - MIN_RUN + 1):
        places.setdefault(token_ids[start : start + MIN_RUN], []).append(start)
    return places
