"""An installed plugin of rare kinds: its suites pass, its engine serves, its command runs, its new version is noticed.

Surfaces are tested in ``api/test_surfaces``, workers of other environments in ``faults/test_environments``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from enginehouse_testkit.server import ServerProcess, started_server

METADATA = "Metadata-Version: 2.1\nName: kit\nVersion: {version}\n"
MORE = """
from enginehouse import hookimpl
from enginehouse.contract.commands import Command

@hookimpl
def register_commands(register):
    register(Command("kit broken", "kit_command:missing", "Is not there."))
"""
COMMAND = "import click\n\n@click.command()\ndef greet():\n    click.echo('hello from the kit')\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the plugin is installed, and a model for it."""
    site = tmp_path_factory.mktemp("site")
    shutil.copy(Path(__file__).parent / "kit.py", site)
    (site / "kit_command.py").write_text(COMMAND)
    (site / "small.kit").write_bytes(b"kit")
    info = site / "kit-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format(version="1.0"))
    (site / "kit_more.py").write_text(MORE)
    (info / "entry_points.txt").write_text("[enginehouse]\nkit = kit\nkit_more = kit_more\n")
    return site


@pytest.fixture(scope="module")
def env(site: Path) -> Mapping[str, str]:
    """The environment of processes that find the plugin."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "80"}


def run(env: Mapping[str, str], *arguments: str | Path) -> str:
    command = [sys.executable, "-m", "enginehouse", *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def until_logged(server: ServerProcess, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in server.output:
        assert time.monotonic() < deadline, server.output
        time.sleep(0.02)


def test_every_kind_of_the_kit_passes_its_suite(env: Mapping[str, str], site: Path) -> None:
    output = run(env, "plugins", "check", "kit", "--model", site / "small.kit")
    skipped = re.findall(r"^SKIPPED .*?: (.*)$", output, re.MULTILINE)

    assert " passed" in output
    assert all(reason.startswith("optional: ") or "engine" in reason for reason in skipped), skipped


def test_a_target_that_does_not_exist_is_found_by_check(env: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "enginehouse", "plugins", "check", "kit_more"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "the command 'kit broken' has the target kit_command:missing, which is not a click command" in done.stdout


def test_a_model_that_is_missing_is_named_at_once(env: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "enginehouse", "plugins", "check", "kit", "--model", "missing"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "file or folder not found: 'missing'" in done.stderr
    assert "passed" not in done.stdout


def test_its_command_runs(env: Mapping[str, str]) -> None:
    assert run(env, "kit", "greet") == "hello from the kit\n"


def test_its_command_that_cannot_be_imported_is_named_and_hides_no_other(env: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "enginehouse", "kit", "broken"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "Error: The command 'kit broken' of the plugin 'kit_more' failed in its import." in done.stderr
    assert "module 'kit_command' has no attribute 'missing'" in done.stderr
    assert all(line in run(env, "kit", "--help") for line in ("broken  Is not there.", "greet   Say hello."))


@pytest.mark.skipif(os.name != "posix", reason="there is no SIGHUP")
def test_its_engine_serves_and_a_new_version_needs_a_restart(env: Mapping[str, str], site: Path) -> None:
    """The server continues with the code that it has imported, and says so at each reload."""
    config = site / "enginehouse.toml"
    config.write_text(f'[models.small]\nsource = "{site / "small.kit"}"\n')
    body = {"model": "small", "prompt": "Once", "max_tokens": 8, "seed": 1}
    with (
        started_server("--config", config, env=env) as server,
        httpx.Client(base_url=str(server.url), timeout=20) as client,
    ):
        before = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        (site / "kit.py").write_text("raise RuntimeError('a new version that is broken')\n")
        (site / "kit-1.0.dist-info" / "METADATA").write_text(METADATA.format(version="1.1"))
        os.kill(server.process.pid, signal.SIGHUP)
        until_logged(server, "needing a restart: the plugin kit (kit 1.0, now 1.1)")

        assert before
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == before
