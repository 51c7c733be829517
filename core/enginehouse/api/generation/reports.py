"""Reports of preparers on the wire: response headers, members of the details, and metrics. Knows no preparer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from enginehouse.contract.preparer import Report
from enginehouse.pipeline.pipeline import RunningRequest
from enginehouse.settings.profiles import Profile


def report_headers(running: Sequence[RunningRequest], profile: Profile) -> list[tuple[str, str]]:
    """Return the profile's headers for changed prompts; known before generation starts."""
    changed = {name for one in running for name, report in one.reports.items() if report and report.has_changed}
    headers = profile.optimization_headers
    return [(headers[name], "true") for name in sorted(changed) if name in headers]


def shown_reports(running: Sequence[RunningRequest]) -> dict[str, Any]:
    """Return the details by name of preparer, over all prompts; None if no prompt was to be changed."""
    names = running[0].reports
    return {name: _merged(report for one in running if (report := one.reports[name])) for name in names}


def _merged(reports: Iterable[Report]) -> dict[str, Any] | None:
    merged: dict[str, Any] = {}
    for report in reports:
        for name, value in report.details.items():
            before = merged.get(name)
            is_number = isinstance(value, int | float) and isinstance(before, int | float)
            merged[name] = round(before + value, 3) if is_number else value if before is None else before
    return merged or None


def report_metrics(running: Sequence[RunningRequest]) -> Counter[tuple[str, str]]:
    """Return the metrics of preparers, by name and by the object that did the work."""
    metrics: Counter[tuple[str, str]] = Counter()
    for one in running:
        for report in filter(None, one.reports.values()):
            for name, number in report.metrics.items():
                metrics[name, report.done_by] += number
            for name, number in report.prompt_metrics.items():
                metrics[name, report.done_by] += one.generation.num_prompt_tokens + number
    return metrics


def num_read_tokens(running: Sequence[RunningRequest]) -> int:
    """Return the tokens that models have read for preparers."""
    return sum(report.num_read_tokens for one in running for report in one.reports.values() if report)
