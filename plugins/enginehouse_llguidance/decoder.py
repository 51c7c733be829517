"""The registered decoder: supported constraint kinds, and binding to a model."""

from __future__ import annotations

from typing import get_args

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import ConstraintKind
from enginehouse_llguidance.options import LlguidanceOptions

__all__ = ["LlguidanceDecoder"]


class LlguidanceDecoder:
    """Implements :class:`enginehouse.contract.structured.StructuredDecoder`. Cheap to create; independent of models."""

    name = "llguidance"
    api_version = 1
    kinds: frozenset[ConstraintKind] = frozenset(get_args(ConstraintKind))

    def __init__(self, options: LlguidanceOptions) -> None:
        self._options = options

    def bind(self, tokenizer: Tokenizer) -> GrammarCompiler:
        """Build the library's vocabulary: 0.1 to 1 s, depending on its size."""
        # The first of these imports reports a missing library.
        from enginehouse_llguidance.vocabulary import build_vocabulary  # noqa: PLC0415, I001
        from enginehouse_llguidance.compiler import LlguidanceCompiler  # noqa: PLC0415

        return LlguidanceCompiler(build_vocabulary(tokenizer), tokenizer, self._options)
