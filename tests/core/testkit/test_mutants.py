"""The suites on wrong plugins: each mistake is found by the tests that are about it, with a message that names it.

``mutants`` holds the plugins; all of them run in one process of pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
QUICK = ("Good", "RowsOfDoubles", "NeverAdvancesSilently", "SpiceOnCoresPlace", "ParserShowsItsMarker")

Found = Mapping[str, Mapping[str, str]]


def _run(folder: Path, chosen: str) -> Found:
    """Run the suites of the chosen mutants; returns the messages of failures by mutant and test."""
    report = folder / "report.xml"
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", str(HERE / "mutants.py"), "-q", "-c", os.devnull, "--rootdir", str(HERE)]
    command += ["-p", "no:cacheprovider", "-k", chosen, f"--junitxml={report}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        mutant = case.attrib["classname"].rpartition(".")[2].removeprefix("Test")
        failed = found.setdefault(mutant, {})
        for problem in (*case.findall("failure"), *case.findall("error")):
            failed.setdefault(case.attrib["name"].partition("[")[0], f"{problem.get('message')}\n{problem.text}")
    return found


def _check(mutant: str, failed: Mapping[str, str], expected: Mapping[str, str]) -> None:
    assert set(failed) == set(expected), f"{mutant}: {failed}"
    for test, phrase in expected.items():
        assert phrase in failed[test], f"{mutant}, {test}: {failed[test]}"
