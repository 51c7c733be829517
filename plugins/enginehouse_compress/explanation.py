"""Explanation of a compression for dry runs: which parts of each text stay, and why."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from enginehouse.contract.compressor import CompressibleText, Range, joined
from enginehouse_compress.tools import Note

__all__ = ["explain_text"]


def explain_text(text: CompressibleText, kept: Sequence[Range], notes: Sequence[Note]) -> dict[str, Any]:
    """Return the ranges of a text that stay, and its parts with the compressor's reasons; in characters."""
    stays = joined([*kept, *text.protected])
    parts = [_part(note.part, stays, note.reason, note.score) for note in notes]
    parts += [_part(range_, stays, "protected", None) for range_ in text.protected]
    return {
        "kept": [list(range_) for range_ in stays],
        "parts": sorted(parts, key=lambda part: (part["start"], part["end"])),
    }


def _part(part: Range, stays: Sequence[Range], reason: str, score: float | None) -> dict[str, Any]:
    start, end = part
    place = bisect.bisect_right(stays, (start, float("inf"))) - 1
    return {
        "start": start,
        "end": end,
        "kept": place >= 0 and stays[place][1] >= end,
        "score": None if score is None else round(score, 4),
        "reason": reason,
    }
