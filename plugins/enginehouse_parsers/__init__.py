"""Tool formats (Hermes and Qwen, Llama 3, Mistral, pythonic, a default) and think tags. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.parsers import ReasoningParser, ToolParser
from enginehouse_parsers.llama import LlamaToolParser
from enginehouse_parsers.mistral import MistralToolParser
from enginehouse_parsers.pythonic import PythonicToolParser
from enginehouse_parsers.tagged_json import DefaultToolParser, HermesToolParser
from enginehouse_parsers.think import ThinkParser

__all__ = ["register_reasoning_parsers", "register_tool_parsers"]


@hookimpl
def register_tool_parsers(register: Callable[[ToolParser], None]) -> None:
    """Register one parser per format; the default serves every model that no other parser supports."""
    register(HermesToolParser())
    register(LlamaToolParser())
    register(MistralToolParser())
    register(PythonicToolParser())
    register(DefaultToolParser())


@hookimpl
def register_reasoning_parsers(register: Callable[[ReasoningParser], None]) -> None:
    """Register the parser of think tags."""
    register(ThinkParser())
