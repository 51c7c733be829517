"""Texts of any length that are slow to process for careless code; for tests of growth."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["HOSTILE_UNITS", "hostile_text"]

HOSTILE_UNITS: Mapping[str, str] = {
    "letters": "a",
    "capitals": "A",
    "spaces": " ",
    "spaced": "a ",
    "digits": "1",
    "marks": "a\u0301",
    "only marks": "\u0301",
    "brackets": "[",
    "braces": '{"a":',
    "closing": "]",
    "quotes": '"',
    "backslashes": "\\",
    "apostrophes": "'",
    "lines": "\n",
    "lined": "a\n",
    "windows lines": "\r\n",
    "tabs": "\t",
    "emoji": "🙂",
    "families": "👩\u200d",
    "cjk": "漢",
    "stops": ".",
    "tags": "<",
    "half a control token": "<|im_",
    "control tokens": "<|im_end|>",
    "control tokens and letters": "<|im_end|>a",
    "think": "<think>",
    "thought": "</think>",
    "calls": "<tool_call>",
    "fences": "```",
    "commas": ",",
    "underscores": "_",
    "NUL": "\0",
}
"""Repeated units, by name."""


def hostile_text(unit: str, size: int) -> str:
    """Return ``unit`` repeated up to ``size`` characters; the last one may be cut."""
    return (unit * (size // len(unit) + 1))[:size]
