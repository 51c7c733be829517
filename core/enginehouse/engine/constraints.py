"""Constraints of a sequence in the engine: token bitmasks, the end of reasoning, and grammar matchers.

Called by admission, the sampler and the loop. Does not know decoder libraries: matchers come from
:mod:`enginehouse.contract.structured`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.errors import (
    EnginehouseError,
    GenerationFailed,
    InvalidRequest,
    PluginError,
    PluginFailed,
    UnsupportedParameter,
)
from enginehouse.contract.structured import BacktrackingMatcher, Grammar, GrammarCompiler, Matcher, StructuredDecoder
from enginehouse.contract.types import Constraint, ConstraintKind, ReasoningParams
from enginehouse.engine.text.text_stream import Detokenizer
from enginehouse.plugins import Guard, guard_of, guarded


@frozen(eq=False)
class TokenMask:
    """Allowed tokens.

    Attributes:
        bitmask: (ceil(vocab_size / 32),) int32, as :meth:`enginehouse.contract.structured.Matcher.fill_bitmask` writes
            it; None allows every token.
        banned: ids that are not allowed either, unless the bitmask allows no other token: a complete text can only end,
            even before ``min_tokens``.
    """

    bitmask: NDArray[np.int32] | None = None
    banned: frozenset[int] = frozenset()

    @classmethod
    def only(cls, token_id: int, vocab_size: int) -> TokenMask:
        """Return a mask that allows a single token."""
        bitmask = np.zeros((vocab_size + 31) // 32, np.uint32)
        bitmask[token_id >> 5] = 1 << (token_id & 31)
        return cls(bitmask.view(np.int32))

    def permits(self, token_id: int) -> bool:
        """Return True if the token is allowed."""
        if token_id in self.banned:
            return False
        return self.bitmask is None or bool((int(self.bitmask[token_id >> 5]) >> (token_id & 31)) & 1)

    def forces(self, vocab_size: int) -> bool:
        """Return True if it allows a single token."""
        if self.bitmask is None:
            return False
        bits = np.unpackbits(self.bitmask.view(np.uint8), bitorder="little", count=vocab_size)
        num_allowed = int(np.count_nonzero(bits))
        return 1 in (num_allowed, num_allowed - int(np.count_nonzero(bits[list(self.banned)])))

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Set the logits of forbidden tokens to -inf, in place.

        Args:
            logits: (vocab_size,) float32.

        Raises:
            GenerationFailed: no allowed token has a finite logit.
        """
        if self.bitmask is not None:
            bits = np.unpackbits(self.bitmask.view(np.uint8), bitorder="little", count=len(logits))
            np.copyto(logits, -np.inf, where=bits == 0)
        if self.banned:
            token_ids = list(self.banned)
            before = logits[token_ids]
            logits[token_ids] = -np.inf
            if self.bitmask is not None and logits.max() == -np.inf:
                logits[token_ids] = before
        if logits.max() == -np.inf:
            raise GenerationFailed("No allowed token can be sampled here.")


class ReasoningGate:
    """Tracks the text of one sequence up to the end of its reasoning.

    Args:
        params: markers and budget.
        closing_token_ids: the closing marker as tokens, for a forced closing.
        detokenizer: used by this sequence only; shows the markers even if they are control tokens.

    Attributes:
        num_tokens: number of reasoning tokens so far, without markers.
    """

    def __init__(self, params: ReasoningParams, closing_token_ids: tuple[int, ...], detokenizer: Detokenizer) -> None:
        self._params = params
        self._budget = params.budget
        self._detokenizer = detokenizer
        self._closing_token_ids = closing_token_ids
        self._phase: Literal["opening", "inside", "after"] = "inside" if params.is_open else "opening"
        self._tail = ""  # text that may be part of a marker
        self._num_closing = 0  # forced tokens of the closing marker so far
        self.num_tokens = 0

    @property
    def is_over(self) -> bool:
        """True if the reasoning has ended, or the text began without it."""
        return self._phase == "after"

    @property
    def is_inside(self) -> bool:
        """True if the next token is reasoning, or part of its closing marker."""
        return self._phase == "inside"

    def accept(self, token_id: int, is_forced: bool = False) -> None:
        """Process an appended token; with ``is_forced`` it belongs to a forced closing and is not reasoning."""
        text = self._detokenizer.push(token_id)
        self._num_closing += is_forced
        if self._phase == "opening":
            self._open(text)
        elif self._phase == "inside":
            self._tail += text
            if self._params.end in self._tail:
                self._phase = "after"
            else:
                self._tail = self._tail[-len(self._params.end) + 1 :] if len(self._params.end) > 1 else ""
                self.num_tokens += not is_forced

    def _open(self, text: str) -> None:
        self._tail = (self._tail + text).lstrip()
        start = self._params.start
        if self._tail.startswith(start):
            self._phase, self._tail = "inside", self._tail[len(start) :]
        elif not start.startswith(self._tail):
            self._phase = "after"  # an answer without reasoning

    def forced_token_ids(self) -> tuple[int, ...]:
        """Return the rest of the closing marker if the budget is used up, else nothing."""
        if self._phase != "inside" or self._budget is None or self.num_tokens < self._budget:
            return ()
        return self._closing_token_ids[self._num_closing :]

    def is_closed_by(self, token_ids: Sequence[int]) -> bool:
        """Return True if the next tokens are the closing marker, or a prefix of it if there are fewer."""
        closing = self._closing_token_ids[: len(token_ids)]
        return self._phase == "inside" and bool(closing) and tuple(token_ids[: len(closing)]) == closing

    def close_now(self) -> bool:
        """Set the remaining budget to 0; returns False if no reasoning is open or it is already being closed."""
        if self._phase != "inside" or self.forced_token_ids():
            return False
        self._budget = 0
        return True


_NO_DECODER = "no plugin in the model's worker enforces this; run: pip install 'enginehouse[llguidance]'"


class Constraints:
    """Compiles constraints with the first decoder that supports their kind.

    Decoders are bound when this is created, while the model loads: building their index of a vocabulary may block every
    thread for a second, which would delay running streams. A decoder that cannot be bound has no effect until a request
    needs it. ``compile`` may be called from any thread.

    Args:
        decoders: in order of preference.
        tokenizer: tokenizer of the model.
    """

    def __init__(self, decoders: Iterable[StructuredDecoder], tokenizer: Tokenizer) -> None:
        self._bound = [(decoder, _bind(decoder, tokenizer)) for decoder in decoders]

    @property
    def kinds(self) -> tuple[ConstraintKind, ...]:
        """Constraint kinds that can be enforced."""
        able = [decoder.kinds for decoder, compiler in self._bound if not isinstance(compiler, PluginError)]
        return tuple(sorted(frozenset().union(*able)))

    @property
    def problem(self) -> str:
        """Reason why other kinds cannot be enforced."""
        broken = [compiler.message for _, compiler in self._bound if isinstance(compiler, PluginError)]
        return broken[0] if broken else _NO_DECODER

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint to a grammar.

        Raises:
            UnsupportedParameter: no decoder supports this kind, or it could not be bound.
            InvalidRequest: the constraint cannot be enforced.
        """
        for decoder, compiler in self._bound:
            if constraint.kind in decoder.kinds:
                if isinstance(compiler, PluginError):
                    raise UnsupportedParameter(compiler.message, constraint.param)
                return _compile(decoder, compiler, constraint)
        raise UnsupportedParameter(f"{constraint.param}: {_NO_DECODER} ({constraint.kind})", constraint.param)


def _bind(decoder: StructuredDecoder, tokenizer: Tokenizer) -> GrammarCompiler | PluginError:
    """Bind the decoder to this vocabulary; returns an error on failure, since the model works without it."""
    try:
        return guarded(decoder, StructuredDecoder, guard_of(decoder, "structured decoder")).bind(tokenizer)
    except PluginError as error:
        return error
    except EnginehouseError as error:
        return PluginError(error.message, decoder.name)


def _compile(decoder: StructuredDecoder, compiler: GrammarCompiler, constraint: Constraint) -> Grammar:
    try:
        return guarded(compiler, GrammarCompiler, guard_of(decoder, "structured decoder")).compile(constraint)
    except PluginFailed as error:  # rejected, instead of generating without the constraint
        message = f"{constraint.param}: {error.message} The server's log says how."
        raise InvalidRequest(message, constraint.param) from error


_MAX_BACKTRACKS = 1000
"""Maximum number of times that one answer goes back; each costs a forward pass."""


class ConstraintState:
    """Grammar state of one sequence, and the mask of its next token.

    Attributes:
        may_backtrack: True if tokens may have to be taken back.
    """

    def __init__(self, matcher: Matcher, vocab_size: int, guard: Guard | None = None) -> None:
        self._matcher = matcher
        self._guard = guard if guard is not None else guard_of(matcher, "structured decoder")
        self._bitmask = np.empty((vocab_size + 31) // 32, np.int32)
        self._is_filled = False
        self._error: EnginehouseError | None = None
        self._backtracking = matcher if isinstance(matcher, BacktrackingMatcher) else None
        self.may_backtrack = self._backtracking is not None
        self._num_backtracks = 0

    def fill(self) -> None:
        """Compute the mask ahead of time. Any thread, one at a time; never raises."""
        if self._is_filled:
            return
        self._is_filled = True
        try:
            self._guard.call("fill_bitmask", self._matcher.fill_bitmask, self._bitmask)
        except EnginehouseError as error:  # raised where the bitmask is read
            self._error = error

    def bitmask(self) -> NDArray[np.int32]:
        """Return the mask of the next token, (ceil(vocab_size / 32),) int32; raises an error from computing it."""
        self.fill()  # not filled ahead if the sequence joined the step late, or after its first token in a step
        if self._error is not None:
            raise self._error
        return self._bitmask

    def accept(self, token_id: int) -> None:
        """Advance the grammar by an appended token."""
        self._is_filled = False
        self._guard.call("accept", self._matcher.accept, token_id)

    def backtrack(self, num_held: int) -> int:
        """Return the number of tokens at the end to take back, which the grammar has undone; usually 0.

        Args:
            num_held: number of tokens that may be taken back.

        Raises:
            GenerationFailed: no other token is left, or the answer went back too often.
        """
        if self._backtracking is None:
            return 0
        method = self._backtracking.backtrack
        num_wrong = self._count("backtrack", method)
        if num_wrong > num_held:
            what = f"gave {num_wrong}, the number of held tokens is {num_held}"
            raise self._guard.mistake("backtrack", what, method)
        if num_wrong:
            self._is_filled = False
            self._num_backtracks += 1
            if self._num_backtracks > _MAX_BACKTRACKS:
                message = f"no valid value was found: the answer was taken back {_MAX_BACKTRACKS} times"
                raise GenerationFailed(f"The constraint cannot be followed any further: {message}.")
        return num_wrong

    def num_held(self) -> int:
        """Return the number of tokens at the end that may still be taken back."""
        return 0 if self._backtracking is None else self._count("num_held", self._backtracking.num_held)

    def _count(self, place: str, method: Callable[[], int]) -> int:
        found: object = self._guard.call(place, method)
        if not isinstance(found, int | np.integer) or isinstance(found, bool) or found < 0:
            raise self._guard.mistake(place, f"gave {found!r}, a number of tokens was expected", method)
        return int(found)

    def forced_token_ids(self) -> Sequence[int]:
        """Return the tokens that must follow."""
        forced = self._guard.call("forced_token_ids", self._matcher.forced_token_ids)
        if not isinstance(forced, Sequence) or not all(map(self._is_token_id, forced)):
            what = f"gave {type(forced).__name__}, a sequence of token ids was expected"
            raise self._guard.mistake("forced_token_ids", what, self._matcher.forced_token_ids)
        return forced

    def is_finished(self) -> bool:
        """Return True if the text is complete."""
        found: object = self._guard.call("is_finished", self._matcher.is_finished)
        if not isinstance(found, bool | np.bool_):
            what = f"gave {type(found).__name__}, bool was expected"
            raise self._guard.mistake("is_finished", what, self._matcher.is_finished)
        return bool(found)

    def _is_token_id(self, found: object) -> bool:
        return isinstance(found, int | np.integer) and 0 <= int(found) < 32 * len(self._bitmask)


class Masks:
    """Fills bitmasks during the forward pass, on a separate thread."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "masks")

    def begin(self, states: Sequence[ConstraintState]) -> Future[None] | None:
        """Start to fill; wait for the returned future before reading a bitmask."""
        return self._executor.submit(_fill_all, states) if states else None

    def close(self) -> None:
        """Stop the thread."""
        self._executor.shutdown()


def _fill_all(states: Sequence[ConstraintState]) -> None:
    for state in states:
        state.fill()
