"""Shows a record as tables on the terminal and keeps it as JSON (every round's value) and Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
from attrs import frozen
from rich.console import Console
from rich.table import Table

from .machine import Machine
from .record import Comparison, Record
from .statistics import Estimate

__all__ = ["Report"]

_KEY_COLUMNS = ("scenario", "subject", "metric", "median", "95 % interval")
_COMPARISON_COLUMNS = ("compared", "metric", "median", "95 % interval", "target", "verdict")


@frozen
class Report:
    """One benchmark's outcome."""

    title: str
    machine: Machine
    record: Record
    comparisons: Sequence[Comparison]
    notes: Sequence[str] = ()

    def show(self, console: Console) -> None:
        """Print the tables."""
        console.print(f"\n[bold]{self.title}[/bold]  {self.machine.started}\n{self.machine}")
        console.print(_table(_KEY_COLUMNS, self._key_rows()))
        if rows := self._comparison_rows():
            console.print(_table(_COMPARISON_COLUMNS, rows))
        for note in self._all_notes():
            console.print(note, markup=False)

    def write(self, folder: Path) -> list[Path]:
        """Write ``<title>.json`` and ``<title>.md``, for git to ignore; returns the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")
        json_path, markdown_path = folder / f"{self.title}.json", folder / f"{self.title}.md"
        json_path.write_text(json.dumps(self._plain(), indent=2) + "\n")
        markdown_path.write_text(self.markdown())
        return [json_path, markdown_path]

    def markdown(self) -> str:
        """The same tables in Markdown, under a heading that names machine, date and versions."""
        versions = ", ".join(f"{name} {version}" for name, version in self.machine.versions.items())
        lines = [f"### {self.title}", "", f"{self.machine.started}: {self.machine}; {versions}.", ""]
        lines += [*_markdown_table(_KEY_COLUMNS, self._key_rows()), ""]
        if rows := self._comparison_rows():
            lines += [*_markdown_table(_COMPARISON_COLUMNS, rows), ""]
        lines += [f"- {note}" for note in self._all_notes()]
        return "\n".join(lines).rstrip() + "\n"

    def _all_notes(self) -> list[str]:
        notes = list(self.notes)
        if not self.machine.is_quiet:
            notes.append(f"Noisy: the load average was {self.machine.load_average:.2f} at the start; do not quote.")
        return notes

    def _key_rows(self) -> list[tuple[str, ...]]:
        return [
            (key.scenario, key.subject, key.metric, _number(found.median), _interval(found))
            for key, found in self.record.estimates()
        ]

    def _comparison_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for comparison in self.comparisons:
            found = self.record.compare(comparison)
            sign = "<=" if comparison.target_is_upper else ">="
            target = "" if comparison.target is None else f"{sign} {comparison.target:g}"
            cells = (_number(found.median), _interval(found))
            rows.append((str(comparison), comparison.key.metric, *cells, target, comparison.verdict(found)))
        return rows

    def _plain(self) -> dict[str, object]:
        return {
            "benchmark": self.title,
            "machine": attrs.asdict(self.machine),
            "notes": self._all_notes(),
            "measured": [attrs.asdict(key) | {"rounds": values} for key, values in self.record.values.items()],
            "compared": [self._plain_comparison(comparison) for comparison in self.comparisons],
        }

    def _plain_comparison(self, comparison: Comparison) -> dict[str, object]:
        found = self.record.compare(comparison)
        facts = {"what": str(comparison), "metric": comparison.key.metric, "target": comparison.target}
        return facts | attrs.asdict(found) | {"verdict": comparison.verdict(found)}


def _number(value: float) -> str:
    """Three significant digits, or all digits before the point where these are more."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _interval(found: Estimate) -> str:
    return f"{_number(found.low)} to {_number(found.high)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    return table


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
