"""Servers for the pages: the example configurations with the real model, and one whose model says a known text."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from enginehouse.settings.config import AuthSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server import started_server
from enginehouse_testkit.server_thread import server_thread

from .page import Page

CONFIGS = Path(__file__).parents[3] / "examples" / "profiles"
# The examples draw; so that a run is like the one before, the model gets a seed where a request has none.
SEED = {"ENGINEHOUSE_MODELS__STARTER__DEFAULTS__SEED": "6"}
KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page of the module's ``PROFILE``, with its example configuration and the real model."""
    profile: str = request.module.PROFILE
    with started_server("--config", CONFIGS / f"{profile}.toml", env=os.environ | SEED) as server:
        yield Page(profile, server.url or "")


@pytest.fixture(scope="module")
def scripted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page with a model that says "Code flows.", and one that fails behind its first word."""
    folder = tmp_path_factory.mktemp("scripts")
    texts = {
        "plain": (["Code", " flows", "."], {}),
        "failing": (["Code", {"delay_s": 0.05}, {"error": "boom"}], {}),
        "endless": ([" on"], {"loop": True, "tokens_per_step": 64}),
        "slow": ([" tick", {"delay_s": 0.02}], {"loop": True}),
    }
    models = {
        name: ModelSettings(
            source=write_script(folder / f"{name}.json", tokens, **options),
            backend="scripted",
            context=50_000,
            slots=1 if name == "slow" else 8,
            options={"max_queue": 0} if name == "slow" else {},
            aliases=("an-alias",) if name == "plain" else (),
        )
        for name, (tokens, options) in texts.items()
    }
    settings = Settings(
        server=ServerSettings(profile=request.module.PROFILE),
        auth=AuthSettings(keys=(KEY,)),
        models=models,
        plugins=PluginsSettings(allow=()),
    )
    with server_thread(settings) as running:
        yield Page(request.module.PROFILE, running.url)


@pytest.fixture(scope="module")
def client(scripted: Page) -> Iterator[httpx.Client]:
    """A client of the scripted server, with its key."""
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=scripted.url, headers=headers, timeout=20) as client:
        wait_ready(client)
        yield client


@pytest.fixture(scope="module")
def post(client: httpx.Client) -> Callable[..., httpx.Response]:
    """Post a chat; fields are keyword arguments."""

    def send(**fields) -> httpx.Response:
        body = {"model": "an-alias", "messages": [{"role": "user", "content": "hi"}], **fields}
        return client.post("/v1/chat/completions", json=body)

    return send
