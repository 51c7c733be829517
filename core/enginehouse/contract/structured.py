"""The contract of structured decoder plugins, which restrict the next token to those a constraint allows.

A decoder is bound to a model's tokenizer while it loads, compiles constraints into grammars (off the engine thread,
cached by the decoder), and creates one matcher per sequence. Matchers compute the allowed tokens; core applies the
masks, so constraints work on every backend and together with every sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.types import Constraint, ConstraintKind

__all__ = ["BacktrackingMatcher", "Grammar", "GrammarCompiler", "Matcher", "StructuredDecoder"]


class Matcher(Protocol):
    """Matching state of one sequence. Used by one thread at a time; ``fill_bitmask`` should release the GIL.

    Calls:
        fill_bitmask: for each token; worker, mask thread, during the forward pass; under a millisecond.
        accept: for each token; worker, engine thread; microseconds.
        forced_token_ids: for each token; worker, engine thread; microseconds.
        is_finished: for each token; worker, engine thread; microseconds.
    """

    def fill_bitmask(self, bitmask: NDArray[np.int32]) -> None:
        """Write the allowed next tokens: bit ``i % 32`` of word ``i // 32`` is set if id ``i`` is allowed.

        End tokens are allowed exactly where the text may end.

        Args:
            bitmask: (ceil(vocab_size / 32),) int32, overwritten.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance by an allowed token that was appended to the sequence.

        Raises:
            GenerationFailed: the token is not allowed here, or the matcher exceeded its time or memory limit.
        """
        ...

    def forced_token_ids(self) -> Sequence[int]:
        """Return the tokens that must come next regardless of the logits; often none. Changes nothing."""
        ...

    def is_finished(self) -> bool:
        """Return True if the text is complete and only an end token may follow."""
        ...


@runtime_checkable
class BacktrackingMatcher(Matcher, Protocol):
    """A matcher of a constraint that masks alone do not enforce: a value may turn out to be wrong when it is complete.

    Core then takes the last tokens back, and draws again. Text that may still be taken back is not sent. End tokens are
    accepted as well, since they may complete a value. On a runner whose ``truncate`` is ``none``, requests with such
    matchers are refused.

    Calls:
        backtrack: after each accepted token; worker, engine thread; microseconds, milliseconds if it goes back.
        num_held: for each token that becomes final; worker, engine thread; microseconds.
    """

    def backtrack(self) -> int:
        """Undo the last tokens if they lead to wrong values only; return their number, usually 0.

        Another token may follow then: masks leave out what was tried, in any tokenization.

        Raises:
            GenerationFailed: no token is left that could be drawn instead.
        """
        ...

    def num_held(self) -> int:
        """Return how many tokens at the end ``backtrack`` may still undo; those before them are final."""
        ...


class Grammar(Protocol):
    """A compiled constraint.

    Calls:
        start: for each choice; worker, engine thread; microseconds.
    """

    def start(self) -> Matcher:
        """Create a matcher at the beginning of the text."""
        ...


class GrammarCompiler(Protocol):
    """A decoder bound to one tokenizer. Thread-safe; compiling the same constraint again is cheap.

    Calls:
        compile: for each request with a constraint; worker, threads of the plugin; limited by the decoder,
            ``plugin_timeout_s`` at most.
    """

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint, within limits of size, depth and time.

        Raises:
            InvalidRequest: the constraint is malformed, too large, or uses a feature that cannot be enforced; the
                message names the keyword and its location (for schemas the JSON pointer).
        """
        ...


@runtime_checkable
class StructuredDecoder(Protocol):
    """A structured decoder for ``register_structured_decoders``.

    Attributes:
        name: unique.
        kinds: the constraint kinds that this decoder can enforce.

    Calls:
        bind: once per load; worker, engine thread; a second.
    """

    name: str
    api_version: int
    kinds: frozenset[ConstraintKind]

    def bind(self, tokenizer: Tokenizer) -> GrammarCompiler:
        """Create a compiler for this vocabulary; called once per model while it loads, may take a second.

        Raises:
            MissingDependency: the library is not installed.
        """
        ...
