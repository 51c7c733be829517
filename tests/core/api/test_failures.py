"""What engines, plugins and libraries say of their failures stays in the log: no response quotes it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from attrs import evolve

from enginehouse.plugins import PluginRegistry
from enginehouse.settings.auth import KeySettings
from enginehouse.settings.config import AuthSettings, ModelSettings, PluginsSettings, RouterSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.server_thread import server_thread

SECRET = "/srv/secret/x.gguf"
SAID = f'cannot read {SECRET}, File "{SECRET}", line 1'
OF_LIBRARIES = ("RuntimeError", "fails on purpose")
MESSAGES = [{"role": "user", "content": "hi"}]
LONG = [{"role": "user", "content": "Many words stand here. " * 100}]
USER, ADMIN = "key-of-a-user", "key-of-the-admin"


class BrokenRouter:
    name = "broken"
    api_version = 1

    def route(self, question: Any) -> Any:
        raise OSError(SAID)


class Broken:
    """A compressor all of whose methods raise what names the file."""

    name = "broken"
    api_version = 1
    version = "1"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def fail(*_: Any, **__: Any) -> Any:
            raise OSError(SAID)

        return fail


def serve(folder: Any) -> Iterator[httpx.Client]:
    """One model for each way to fail, and plugins that fail whenever they are asked."""
    fake = {"source": "fake", "backend": "fake"}

    def faulty(**faults: Any) -> ModelSettings:
        return ModelSettings(**fake, options={"faults": faults}, isolation="thread")

    models = {
        "at once": ModelSettings(source=write_script(folder / "a.json", [{"error": SAID}]), backend="scripted"),
        "later": ModelSettings(source=write_script(folder / "b.json", ["a", {"error": SAID}]), backend="scripted"),
        "fine": ModelSettings(source=write_script(folder / "c.json", ["a", "b"]), backend="scripted"),
        "absent": ModelSettings(source=f"{SECRET}-absent", backend="scripted"),
        "unloadable": faulty(refuse_to_open=SAID),
        "fake": ModelSettings(**fake, isolation="thread"),
        "raises": faulty(raise_at_token=ord("~")),
        "stand in": ModelSettings(source=write_script(folder / "d.json", ["a"]), backend="scripted"),
    }
    template = folder / "refusing.jinja"
    template.write_text("{{ raise_exception('conversation roles must alternate') }}", encoding="utf-8")
    models["refusing"] = evolve(models["fine"], chat_template=str(template))
    settings = Settings(
        models=models,
        plugins=PluginsSettings(allow=("parsers", "compress")),
        auth=AuthSettings(
            keys=(KeySettings(name="user", key=USER), KeySettings(name="admin", key=ADMIN, scopes=("infer", "admin")))
        ),
        router=RouterSettings(strategy="broken", models=("at once",), fallbacks={"at once": ("stand in",)}),
    )
    registry = PluginRegistry.for_settings(settings)
    registry = evolve(registry, compressors={"broken": Broken()}, routers={"broken": BrokenRouter()})
    with (
        server_thread(settings, registry) as running,
        httpx.Client(base_url=running.url, timeout=30, headers={"authorization": f"Bearer {USER}"}) as client,
    ):
        while any(model["state"] == "loading" for model in client.get("/health").json()["models"].values()):
            pass
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    yield from serve(tmp_path_factory.mktemp("failures"))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


def chat(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, "max_tokens": 8, **fields}


FAILURES = [
    ("/v1/chat/completions", chat("at once"), "never"),
    ("/v1/chat/completions", chat("later"), "generation_failed"),
    ("/v1/completions", {"model": "later", "prompt": "a"}, "generation_failed"),
    ("/v1/completions", {"model": "later", "prompt": ["a", "b"]}, "generation_failed"),
    ("/v1/completions", {"model": "raises", "prompt": "a~", "max_tokens": 8}, "plugin_failed"),
    ("/v1/chat/completions", chat("absent"), "model_load_failed"),
    ("/v1/chat/completions", chat("unloadable"), "model_load_failed"),
    ("/v1/completions", {"model": "unloadable", "prompt": "a"}, "model_load_failed"),
    ("/tokenize", {"model": "unloadable", "content": "a"}, "model_load_failed"),
    ("/detokenize", {"model": "absent", "tokens": [1]}, "model_load_failed"),
    ("/apply-template", {"model": "absent", "messages": MESSAGES}, "model_load_failed"),
    ("/v1/chat/completions", chat("fake", messages=LONG, compression={"method": "broken", "ratio": 0.2}), "never"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_no_response_quotes_what_failed(
    client: httpx.Client, logged: pytest.LogCaptureFixture, failure: tuple[str, dict[str, Any], str], stream: bool
) -> None:
    path, body, code = failure
    if stream and path.endswith("completions"):
        body = {**body, "stream": True}
    logged.clear()
    response = client.post(path, json=body, headers={"x-request-id": "the-id"})

    assert not any(said in response.text for said in (SECRET, *OF_LIBRARIES)), response.text
    if code == "never":  # another model stands in, or the prompt stays as long as it is
        assert response.status_code == 200
        return
    error = next(json.loads(line)["error"] for line in error_lines(response.text))
    assert error["code"] == code
    assert "the-id" in error["message"]
    told = [record for record in logged.records if "the-id" in record.getMessage() and record.levelno >= logging.ERROR]
    if code == "plugin_failed":  # the guard logs the traceback, once a minute
        assert told
    else:
        assert any(
            said in (record.getMessage() + str(record.exc_info)) for record in told for said in (SECRET, *OF_LIBRARIES)
        )
    assert all("\n" not in record.getMessage() for record in told)


def error_lines(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if '"error"' in line and '"code"' in line]


def test_details_of_an_answer_do_not_quote_what_failed_before(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=chat("at once"), headers={"x-enginehouse-details": "1"})

    assert response.status_code == 200
    assert SECRET not in response.text + str(response.headers)


def test_a_router_that_fails_is_not_quoted(client: httpx.Client) -> None:
    for path in ("/v1/route", "/v1/chat/completions"):
        response = client.post(path, json=chat("auto"))
        assert response.status_code == 200, response.text
        assert SECRET not in response.text


def test_lists_tell_those_who_manage_the_server_why_a_model_failed(client: httpx.Client) -> None:
    for path in ("/v1/models", "/health", "/v1/models/unloadable", "/v1/models/absent"):
        assert SECRET not in client.get(path).text, path
    assert client.get("/v1/models/unloadable").json()["error"]
    admin = {"authorization": f"Bearer {ADMIN}"}
    for path in ("/v1/models", "/v1/models/unloadable", "/admin/models"):
        assert SECRET in client.get(path, headers=admin).text, path
    answer = client.post("/v1/chat/completions", json=chat("unloadable"), headers=admin)
    assert answer.status_code == 503
    assert SECRET in answer.json()["error"]["message"]


def test_what_a_template_says_to_its_callers_reaches_them(client: httpx.Client) -> None:
    """``raise_exception`` is how a model's author refuses messages."""
    response = client.post("/v1/chat/completions", json=chat("refusing"))

    assert response.status_code == 400
    assert "conversation roles must alternate" in response.json()["error"]["message"]
