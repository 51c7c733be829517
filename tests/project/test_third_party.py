"""What authors of plugins start from: the example, which the command writes, and the lowest versions that we allow."""

from __future__ import annotations

import re
from pathlib import Path

from enginehouse_testkit.plugin_skeleton import write_plugin

from .repository import ROOT, pyproject

EXAMPLE = ROOT / "examples" / "minimal_plugin"
COMMAND = "enginehouse plugins new minimal --folder examples/minimal_plugin"


def test_minimal_plugin_is_what_plugins_new_writes(tmp_path: Path) -> None:
    """The example is the skeleton, so one of them cannot rot."""
    write_plugin("minimal", tmp_path)
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}

    for name in written:
        kept = (EXAMPLE / name).read_text(encoding="utf-8")
        assert kept == (tmp_path / name).read_text(encoding="utf-8"), f"{name} differs; remove it and run: {COMMAND}"
    tracked = {path.relative_to(EXAMPLE) for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".md", ".toml")}
    assert {name for name in tracked if "build" not in name.parts} == written


def test_backend_of_the_example_is_about_a_hundred_lines() -> None:
    """Lines that say something: no blank ones."""
    lines = (EXAMPLE / "enginehouse_minimal" / "backend.py").read_text(encoding="utf-8").splitlines()

    assert len([line for line in lines if line.strip()]) <= 110


def test_lowest_versions_are_those_that_are_declared() -> None:
    declared = {re.sub(r"[><=;].*", "", line): line for line in pyproject()["project"]["dependencies"]}
    lines = (ROOT / "tests" / "min-versions.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0]: line for line in lines if not line.startswith("#")}

    assert set(pinned) == set(declared)
    for name, line in pinned.items():
        lowest = re.search(r">=([\d.]+)", declared[name])
        assert lowest is not None
        assert re.fullmatch(rf"{re.escape(lowest[1])}(\.0)*", line.split("==")[1].split(";")[0])
