"""The first words of a worker: who it is, and whether this server can talk to it.

A worker may run in another virtual environment, with another Python and another installation of enginehouse. Both
sides must speak the same language, so they say who they are before anything else, and a mismatch names the setting.
"""

from __future__ import annotations

import asyncio
import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from enginehouse.contract.errors import ModelLoadError
from enginehouse.workers.messages import Hello

__all__ = ["PROTOCOL", "check_hello", "explain", "own_hello"]

# One more whenever the messages change.
PROTOCOL = 5

# How long to look for the reason why an interpreter does not become a worker.
_EXPLAIN_S = 20.0

# Understood by Pythons that are too old for enginehouse; the current folder may hold files named like modules.
_QUESTION = """
import json, sys
sys.path[:] = [path for path in sys.path if path]
try:
    import enginehouse.workers
    problem = ""
except BaseException as error:
    problem = "%s: %s" % (type(error).__name__, error)
print(json.dumps([sys.version.split()[0], problem]))
"""


def own_hello() -> Hello:
    """Who this process is."""
    try:
        own_version = version("enginehouse")
    except PackageNotFoundError:  # run from its sources
        own_version = "unknown"
    return Hello(PROTOCOL, own_version, platform.python_version(), sys.prefix)


def check_hello(theirs: Hello, path: str) -> None:
    """Refuse a worker that speaks another language.

    Args:
        path: dotted path of the setting that chose the worker's Python.

    Raises:
        ModelLoadError: says what to install where.
    """
    ours = own_hello()
    if theirs.protocol == ours.protocol and theirs.version == ours.version:
        return
    raise ModelLoadError(
        f"{path}: the environment {theirs.prefix} (Python {theirs.python}) has enginehouse {theirs.version} (protocol "
        f"{theirs.protocol}), but this server is enginehouse {ours.version} (protocol {ours.protocol}); run: "
        f"{theirs.prefix}/bin/python -m pip install 'enginehouse=={ours.version}'"
    )


async def explain(python: str, path: str, reason: str) -> ModelLoadError:
    """Why an interpreter ended before it said hello.

    Args:
        python: the interpreter.
        path: dotted path of the setting that chose it.
        reason: how its process ended.
    """
    try:
        asked = await asyncio.to_thread(_ask, python)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ModelLoadError(f"{path}: {python} did not become a worker: {reason}")
    its_version, problem = asked
    if problem:
        said = f"Python {its_version} cannot import enginehouse ({problem})"
        hint = f"; run: {python} -m pip install 'enginehouse=={own_hello().version}'"
        return ModelLoadError(f"{path}: {python} did not become a worker: {said}{hint}")
    return ModelLoadError(f"{path}: {python} (Python {its_version}) did not become a worker: {reason}")


def _ask(python: str) -> tuple[str, str]:
    """The interpreter's version, and why it cannot import enginehouse; ValueError when it answers something else."""
    answer = subprocess.run([python, "-c", _QUESTION], capture_output=True, timeout=_EXPLAIN_S, check=True, text=True)
    its_version, problem = json.loads(answer.stdout)
    return str(its_version), str(problem)
