"""Metrics as JSON and as a Markdown table."""

from __future__ import annotations

import json
from typing import Any

import attrs

from enginehouse_bench.results import Results, Spread

__all__ = ["milliseconds", "rows", "spreads", "to_json", "to_markdown"]


def rows(results: Results) -> list[tuple[str, str]]:
    """Return the metrics shown to users: name and value."""
    shown = [
        ("requests answered", f"{results.num_answered} of {results.num_requests}"),
        ("time", f"{results.wall_s:.1f} s"),
        ("prompt tokens", f"{results.num_prompt_tokens}"),
        ("output tokens", f"{results.num_output_tokens}"),
        ("output tokens per second", f"{results.output_tokens_per_s:.1f}"),
        ("all tokens per second", f"{results.total_tokens_per_s:.1f}"),
        ("requests per second", f"{results.requests_per_s:.2f}"),
    ]
    if results.goodput is not None and results.good_requests_per_s is not None:
        shown.append(("goodput", f"{results.goodput:.0%} ({results.good_requests_per_s:.2f} requests per second)"))
    if results.num_cut:
        shown.append(("cut off or not sent", f"{results.num_cut} requests"))
    return shown + [(f"failed: {reason}", f"{count} requests") for reason, count in results.errors.items()]


def to_json(setting: dict[str, Any], results: Results) -> str:
    """Format all metrics, with the benchmark's settings."""
    return json.dumps({"setting": setting, "figures": attrs.asdict(results)}, indent=2) + "\n"


def to_markdown(setting: dict[str, Any], results: Results) -> str:
    """Format two tables: counts and rates, then times in milliseconds."""
    lines = [f"{name}: {value}" for name, value in setting.items() if value not in (None, "")]
    counts = [f"| {name} | {value} |" for name, value in rows(results)]
    columns = [attribute.name for attribute in attrs.fields(Spread)]
    times = [
        f"| {name} | " + " | ".join(milliseconds(getattr(spread, column)) for column in columns) + " |"
        for name, spread in spreads(results)
    ]
    return "\n".join(
        [
            ", ".join(lines),
            "",
            "| what | value |",
            "|---|---:|",
            *counts,
            "",
            f"| ms | {' | '.join(columns)} |",
            f"|---|{'---:|' * len(columns)}",
            *times,
            "",
        ]
    )


def spreads(results: Results) -> list[tuple[str, Spread]]:
    """Return the times, with their names."""
    return [
        ("time to first token", results.ttft_ms),
        ("between two pieces", results.itl_ms),
        ("per output token", results.tpot_ms),
        ("whole answer", results.latency_ms),
    ]


def milliseconds(value: float | None) -> str:
    """Format a time for the tables."""
    return "" if value is None else f"{value:.1f}"
