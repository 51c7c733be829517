"""Metrics as JSON and as a Markdown table."""

from __future__ import annotations

import json
from typing import Any

import attrs

from enginehouse_bench.figures import Figures, Spread

__all__ = ["milliseconds", "rows", "spreads", "to_json", "to_markdown"]


def rows(figures: Figures) -> list[tuple[str, str]]:
    """Return the metrics shown to users: name and value."""
    shown = [
        ("requests answered", f"{figures.num_answered} of {figures.num_requests}"),
        ("time", f"{figures.wall_s:.1f} s"),
        ("prompt tokens", f"{figures.num_prompt_tokens}"),
        ("output tokens", f"{figures.num_output_tokens}"),
        ("output tokens per second", f"{figures.output_tokens_per_s:.1f}"),
        ("all tokens per second", f"{figures.total_tokens_per_s:.1f}"),
        ("requests per second", f"{figures.requests_per_s:.2f}"),
    ]
    if figures.goodput is not None and figures.good_requests_per_s is not None:
        shown.append(("goodput", f"{figures.goodput:.0%} ({figures.good_requests_per_s:.2f} requests per second)"))
    if figures.num_cut:
        shown.append(("cut off or not sent", f"{figures.num_cut} requests"))
    return shown + [(f"failed: {reason}", f"{count} requests") for reason, count in figures.errors.items()]


def to_json(setting: dict[str, Any], figures: Figures) -> str:
    """Format all metrics, with the benchmark's settings."""
    return json.dumps({"setting": setting, "figures": attrs.asdict(figures)}, indent=2) + "\n"


def to_markdown(setting: dict[str, Any], figures: Figures) -> str:
    """Format two tables: counts and rates, then times in milliseconds."""
    lines = [f"{name}: {value}" for name, value in setting.items() if value not in (None, "")]
    counts = [f"| {name} | {value} |" for name, value in rows(figures)]
    columns = [attribute.name for attribute in attrs.fields(Spread)]
    times = [
        f"| {name} | " + " | ".join(milliseconds(getattr(spread, column)) for column in columns) + " |"
        for name, spread in spreads(figures)
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


def spreads(figures: Figures) -> list[tuple[str, Spread]]:
    """Return the times, with their names."""
    return [
        ("time to first token", figures.ttft_ms),
        ("between two pieces", figures.itl_ms),
        ("per output token", figures.tpot_ms),
        ("whole answer", figures.latency_ms),
    ]


def milliseconds(value: float | None) -> str:
    """Format a time for the tables."""
    return "" if value is None else f"{value:.1f}"
