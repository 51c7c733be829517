"""The contract of structured decoder plugins: from a constraint to the tokens that may come next.

A decoder is bound to a model's tokenizer while it loads, compiles constraints into grammars (off the engine
thread, cached by the decoder), and starts one matcher per sequence. Matchers say which tokens are allowed; core
applies that, so constraints work on every backend and together with every sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.types import Constraint, ConstraintKind

__all__ = ["Grammar", "GrammarCompiler", "Matcher", "StructuredDecoder"]


class Matcher(Protocol):
    """Follows one sequence. Used by one thread at a time; ``fill_bitmask`` should release the GIL."""

    def fill_bitmask(self, bitmask: NDArray[np.int32]) -> None:
        """Write which tokens may come next: bit ``i % 32`` of word ``i // 32`` is set when id ``i`` may.

        End tokens are allowed exactly where the text may end.

        Args:
            bitmask: (ceil(vocab_size / 32),) int32, overwritten.
        """
        ...

    def accept(self, token_id: int) -> None:
        """The sequence grew by an allowed token.

        Raises:
            GenerationFailed: the token is not allowed here, or the matcher ran out of its time or memory bound.
        """
        ...

    def forced_token_ids(self) -> Sequence[int]:
        """Tokens that must come next whatever the model thinks, often none. Changes nothing."""
        ...

    def is_finished(self) -> bool:
        """Whether the text is complete and nothing but an end token may follow."""
        ...


class Grammar(Protocol):
    """A compiled constraint."""

    def start(self) -> Matcher:
        """A matcher at the beginning of the text."""
        ...


class GrammarCompiler(Protocol):
    """A decoder bound to one tokenizer. Thread-safe; compiling the same constraint again is cheap."""

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile, within bounds of size, depth and time.

        Raises:
            InvalidRequest: the constraint is malformed, too large, or uses what cannot be enforced; the
                message names the keyword and its place (for schemas the JSON pointer).
        """
        ...


@runtime_checkable
class StructuredDecoder(Protocol):
    """What ``register_structured_decoders`` hands over.

    Attributes:
        name: unique.
        kinds: the constraints that this decoder can enforce.
    """

    name: str
    api_version: int
    kinds: frozenset[ConstraintKind]

    def bind(self, tokenizer: Tokenizer) -> GrammarCompiler:
        """A compiler for this vocabulary; may take a second, called once per model while it loads.

        Raises:
            MissingDependency: the library is not installed.
        """
        ...
