"""Constrained sequences: masks computed while the model runs, and tokens that need no sampling.

The loop tells :class:`Masks` which sequences will be sampled next; their bitmasks are filled on another
thread during the forward pass. A sequence's :class:`ConstraintState` follows its tokens and knows which
ones are forced (jump-forward). Which constraint language is used, and by which plugin, is not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.errors import (
    EnginehouseError,
    GenerationFailed,
    InvalidRequest,
    PluginError,
    UnsupportedParameter,
)
from enginehouse.contract.structured import Grammar, GrammarCompiler, Matcher, StructuredDecoder
from enginehouse.contract.types import Constraint, ConstraintKind

__all__ = ["ConstraintState", "Constraints", "Masks"]

_log = logging.getLogger(__name__)

_NO_DECODER = "no installed plugin enforces this; run: pip install 'enginehouse[llguidance]'"


class Constraints:
    """Compiles constraints with whichever decoder enforces their kind.

    Decoders are bound when this is created, while the model loads: building their view of a vocabulary may hold
    up every thread for a second, which running streams would feel. One that cannot be bound costs nothing until
    a request asks for it. ``compile`` may be called from any thread.

    Args:
        decoders: in order of preference.
        tokenizer: the model's.
    """

    def __init__(self, decoders: Iterable[StructuredDecoder], tokenizer: Tokenizer) -> None:
        self._bound = [(decoder, _bind(decoder, tokenizer)) for decoder in decoders]

    @property
    def kinds(self) -> tuple[ConstraintKind, ...]:
        """The kinds that can be enforced."""
        able = [decoder.kinds for decoder, compiler in self._bound if not isinstance(compiler, PluginError)]
        return tuple(sorted(frozenset().union(*able)))

    @property
    def problem(self) -> str:
        """Why other kinds cannot be enforced."""
        broken = [compiler.message for _, compiler in self._bound if isinstance(compiler, PluginError)]
        return broken[0] if broken else _NO_DECODER

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint.

        Raises:
            UnsupportedParameter: no decoder enforces this kind, or it could not be bound.
            InvalidRequest: the constraint cannot be enforced.
        """
        for decoder, compiler in self._bound:
            if constraint.kind in decoder.kinds:
                if isinstance(compiler, PluginError):
                    raise UnsupportedParameter(compiler.message, constraint.param)
                return _compile(decoder, compiler, constraint)
        raise UnsupportedParameter(f"{constraint.param}: {_NO_DECODER} ({constraint.kind})", constraint.param)


def _bind(decoder: StructuredDecoder, tokenizer: Tokenizer) -> GrammarCompiler | PluginError:
    """The decoder for this vocabulary, or why there is none: the model is of use without it."""
    try:
        return decoder.bind(tokenizer)
    except PluginError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a decoder's mistake costs constrained requests only
        _log.warning("the structured decoder %s cannot be used", decoder.name, exc_info=error)
        return PluginError(f"The structured decoder {decoder.name!r} cannot be used; the log says why.", decoder.name)


def _compile(decoder: StructuredDecoder, compiler: GrammarCompiler, constraint: Constraint) -> Grammar:
    try:
        return compiler.compile(constraint)
    except EnginehouseError:
        raise
    except Exception as error:  # refused rather than unconstrained
        _log.warning("the structured decoder %s failed to compile", decoder.name, exc_info=error)
        message = f"{constraint.param}: the structured decoder {decoder.name!r} failed; the server's log says why"
        raise InvalidRequest(message, constraint.param) from error


class ConstraintState:
    """One sequence's place in its grammar, and the mask of the next token there."""

    def __init__(self, matcher: Matcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._bitmask = np.empty((vocab_size + 31) // 32, np.int32)
        self._is_filled = False
        self._error: EnginehouseError | None = None

    def fill(self) -> None:
        """Compute the mask ahead of time. Any thread, one at a time; never raises."""
        if self._is_filled:
            return
        self._is_filled = True
        try:
            self._matcher.fill_bitmask(self._bitmask)
        except EnginehouseError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - a decoder's mistake costs its own request only
            self._error = GenerationFailed(f"The structured decoder failed: {error!r}")

    def bitmask(self) -> NDArray[np.int32]:
        """(ceil(vocab_size / 32),) int32, of the next token; raises what went wrong with it."""
        self.fill()  # nobody has where the sequence came into its step late, or this is not its first token in it
        if self._error is not None:
            raise self._error
        return self._bitmask

    def accept(self, token_id: int) -> None:
        """The sequence grew."""
        self._is_filled = False
        self._matcher.accept(token_id)

    def forced_token_ids(self) -> Sequence[int]:
        """Tokens that must follow."""
        return self._matcher.forced_token_ids()

    def is_finished(self) -> bool:
        """Whether the text is complete."""
        return self._matcher.is_finished()


class Masks:
    """Fills bitmasks during the forward pass, on one thread of its own."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "masks")

    def begin(self, states: Sequence[ConstraintState]) -> Future[None] | None:
        """Start to fill; wait for the returned future before reading a bitmask."""
        return self._executor.submit(_fill_all, states) if states else None

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown()


def _fill_all(states: Sequence[ConstraintState]) -> None:
    for state in states:
        state.fill()
