"""Tool formats, derived from chat templates or named, and reasoning tags. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.parsers import ReasoningParser, ToolParser

__all__ = ["register_reasoning_parsers", "register_tool_parsers"]


@hookimpl
def register_tool_parsers(register: Callable[[ToolParser], None]) -> None:
    """Register one parser per format; ``default`` serves models whose templates do not know tools."""
    from enginehouse_parsers.tool_format import tool_parsers

    for parser in tool_parsers():
        register(parser)


@hookimpl
def register_reasoning_parsers(register: Callable[[ReasoningParser], None]) -> None:
    """Register the parsers of think tags, of channels and of recipients."""
    from enginehouse_parsers.harmony import HarmonyReasoningParser, RecipientsReasoningParser
    from enginehouse_parsers.think import ThinkParser

    register(ThinkParser())
    register(HarmonyReasoningParser())
    register(RecipientsReasoningParser())
