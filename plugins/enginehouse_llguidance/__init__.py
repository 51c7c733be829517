"""Structured decoder plugin: JSON Schema, regular expressions, choices and grammars. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.structured import StructuredDecoder
from enginehouse_llguidance.decoder import LlguidanceDecoder
from enginehouse_llguidance.options import LlguidanceOptions as options

__all__ = ["options", "register_structured_decoders"]


@hookimpl
def register_structured_decoders(register: Callable[[StructuredDecoder], None], options: options) -> None:
    """Register the decoder; the library is imported when it is bound to a model."""
    register(LlguidanceDecoder(options))
