"""A server with the plugin ``flaky_kit``, which breaks where and as a test says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from enginehouse_testkit.server import started_server

from .harness import MODELS, FlakyServer


@pytest.fixture(scope="module")
def start_flaky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], FlakyServer]]:
    """Starts a server with these settings, a model ``calm``, and the plugin installed."""
    folder = tmp_path_factory.mktemp("flaky")
    shutil.copy(Path(__file__).with_name("flaky.py"), folder)
    info = folder / "flaky_kit-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flaky-kit\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[enginehouse]\nflaky_kit = flaky\n")
    deed = folder / "deed"
    deed.write_text("")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "FLAKY_DEED": str(deed)}
    with ExitStack() as stack:

        def start(config: str) -> FlakyServer:
            (folder / "config.toml").write_text(config + MODELS)
            server = stack.enter_context(started_server("--config", folder / "config.toml", env=env))
            headers = {"Authorization": "Bearer ours"}  # where the settings have this key
            client = httpx.Client(base_url=str(server.url), timeout=60, trust_env=False, headers=headers)
            stack.enter_context(client)
            flaky = FlakyServer(server, client, deed)
            flaky.text = flaky.text_of("calm")
            return flaky

        yield start
        deed.write_text("")  # what hangs goes on, so that the server ends at once
