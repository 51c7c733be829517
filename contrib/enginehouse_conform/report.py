"""Results as JSON and as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import attrs

from enginehouse.cli.target import Target
from enginehouse_conform.check import Result

__all__ = ["summary", "to_json", "to_markdown"]


def to_json(target: Target, results: Sequence[Result]) -> str:
    """Format all results as JSON."""
    data = {
        "url": target.url,
        "model": target.model,
        "counts": dict(Counter(result.outcome for result in results)),
        "results": [attrs.asdict(result) for result in results],
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def to_markdown(results: Sequence[Result]) -> str:
    """Format the results as a table."""
    lines = ["| | behaviour | result |", "|---|---|---|"]
    for result in results:
        shown = result.outcome if not result.detail else f"{result.outcome}: {_cell(result.detail)}"
        lines.append(f"| {result.behaviour} | {_cell(result.sentence)} | {shown} |")
    return "\n".join([*lines, "", summary(results), ""])


def summary(results: Sequence[Result]) -> str:
    """Return the counts in one line."""
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "refused", "skipped"))


def _cell(text: str) -> str:
    """Escape text for a table cell: bars, line breaks and markup."""
    shown = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return shown.replace("*", "\\*").replace("_", "\\_")
