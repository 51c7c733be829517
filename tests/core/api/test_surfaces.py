"""Surfaces: the example plugin on a real server, where core does everything but translate."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import evolve, frozen

from enginehouse.api.generation.decoding import BodyDecoder
from enginehouse.api.generation.server_access import ServerAccess
from enginehouse.api.http.app import build_app
from enginehouse.api.http.callers import Caller
from enginehouse.api.http.errors import http_error
from enginehouse.api.http.frames import write_chunks
from enginehouse.api.http.security import error_at_once
from enginehouse.api.http.surfaces import Surfaces
from enginehouse.api.openapi.document import build_document
from enginehouse.contract.errors import ConfigError, PluginError
from enginehouse.contract.surface import NDJSON, ErrorAnswer, Reply, Route
from enginehouse.plugins import PluginRegistry
from enginehouse.plugins.kinds import KINDS
from enginehouse.plugins.registration import Registration
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse.settings.profiles import PROFILES
from enginehouse_testkit.application import make_state
from enginehouse_testkit.growth import assert_near_linear
from enginehouse_testkit.hostile_texts import hostile_text
from enginehouse_testkit.script import write_script
from enginehouse_testkit.server_thread import server_thread

EXAMPLE = Path(__file__).parents[3] / "examples" / "say_surface" / "enginehouse_say.py"
KEYS = (
    KeySettings(name="alice", key="alice", scopes=("infer", "metrics", "admin")),
    KeySettings(name="once", key="once", requests_per_minute=1),
    KeySettings(name="watcher", key="watcher", scopes=("metrics",)),
)
HI = {"text": "Hi", "max_tokens": 999}
ALICE = {"authorization": "Bearer alice"}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginRegistry]:
    """The plugins, with the example installed."""
    site = tmp_path_factory.mktemp("site")
    info = site / "enginehouse_say-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: enginehouse-say\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[enginehouse]\nsay = enginehouse_say\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.syspath_prepend(str(EXAMPLE.parent))
        yield PluginRegistry.load(PluginsSettings(allow=("say",)), builtin=("scripted",))
        del sys.modules["enginehouse_say"]


@pytest.fixture(scope="module")
def client(registry: PluginRegistry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with the example; ``quick`` says Hello, ``slow`` never ends, ``broken`` fails after two tokens."""
    folder = tmp_path_factory.mktemp("say")
    scripts = {
        "quick": write_script(folder / "quick.json", ["Hel", "lo"]),
        "slow": write_script(folder / "slow.json", ["a", {"delay_s": 0.02}], loop=True),
        "broken": write_script(folder / "broken.json", ["Hel", "lo", {"error": "boom"}]),
    }
    settings = Settings(
        auth=AuthSettings(keys=KEYS),
        limits=LimitsSettings(max_body_bytes=10_000),
        models={name: ModelSettings(source=source, backend="scripted") for name, source in scripts.items()},
        plugins=PluginsSettings(allow=()),
    )
    with (
        server_thread(settings, registry) as running,
        httpx.Client(base_url=running.url, timeout=20, headers=ALICE) as client,
    ):
        while client.get("/health").json()["status"] != "ok":
            time.sleep(0.02)
        yield client


@frozen
class Named:
    """A surface with routes of another one."""

    name: str
    routes: Sequence[Route] = ()
    api_version: int = 1
    request_id_header: str | None = None
    takes_any_type: bool = False

    def error(self, error: ErrorAnswer) -> Reply:
        return Reply({})


class Failing(Named):
    """A surface whose errors are errors."""

    def error(self, error: ErrorAnswer) -> Reply:
        raise RuntimeError(error.message)


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.iter_lines() if line]


def running(client: httpx.Client) -> list[dict[str, Any]]:
    return client.get("/admin/requests").json()["data"]


# -- the example ------------------------------------------------------------------------------------


def test_the_example_is_small() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 80


def test_hook_register_surfaces(registry: PluginRegistry) -> None:
    (surface,) = registry.surfaces.values()

    assert [record.hooks for record in registry.plugins if record.name == "say"] == [("register_surfaces",)]
    assert surface.name == "say" and [route.path for route in surface.routes] == ["/say"]


def test_a_response_and_a_stream_say_the_same(client: httpx.Client) -> None:
    whole = client.post("/say", json=HI)
    with client.stream("POST", "/say", json={"text": "Hi", "stream": True}) as response:
        lines = lines_of(response)

    assert whole.json() == {"model": "quick", "say": "Hello", "tokens": 2}
    assert whole.headers["content-type"] == "application/json"
    assert response.headers["content-type"] == "application/x-ndjson"
    assert lines == [{"model": "quick"}, {"say": "Hel"}, {"say": "lo"}, {"done": True, "tokens": 2}]


def test_an_error_in_a_stream_is_its_last_line(client: httpx.Client) -> None:
    with client.stream("POST", "/say", json={"model": "broken", "text": "Hi", "stream": True}) as response:
        *said, last = lines_of(response)

    assert response.status_code == 200 and said[-1] == {"say": "lo"}
    assert last["done"] is False and last["problem"].startswith("The model failed")


def test_bodies_are_decoded_strictly(client: httpx.Client) -> None:
    response = client.post("/say", json={"text": "Hi", "max_tokens": "many", "stream": True})
    ignored = client.post("/say", json={"text": "Hi", "volume": 11})

    assert response.status_code == 400
    assert response.json() == {"problem": response.json()["problem"], "code": "invalid_value"}
    assert "max_tokens" in response.json()["problem"]
    assert ignored.status_code == 200 and ignored.headers["x-enginehouse-ignored"] == "volume"


@pytest.mark.parametrize(
    ("status", "code", "sent"),
    [
        (401, "invalid_api_key", {"method": "POST", "url": "/say", "headers": {"authorization": "Bearer no"}}),
        (403, "insufficient_scope", {"method": "POST", "url": "/say", "headers": {"authorization": "Bearer watcher"}}),
        (404, "not_found", {"method": "GET", "url": "/say/louder"}),
        (404, "model_not_found", {"method": "POST", "url": "/say", "json": {"text": "Hi", "model": "none"}}),
        (405, "method_not_allowed", {"method": "GET", "url": "/say"}),
        (413, "body_too_large", {"method": "POST", "url": "/say", "json": {"text": "x" * 20_000}}),
        (415, "unsupported_media_type", {"method": "POST", "url": "/say", "data": {"text": "Hi"}}),
    ],
)
def test_errors_on_its_addresses_have_its_body(
    client: httpx.Client, status: int, code: str, sent: dict[str, Any]
) -> None:
    response = client.request(**sent)

    assert (response.status_code, response.json()) == (status, {"problem": response.json()["problem"], "code": code})


def test_errors_elsewhere_do_not(client: httpx.Client) -> None:
    for path in ("/sayings", "/v1/chat/completions/say", "/"):
        assert client.get(path).json()["error"]["code"] in ("not_found", "method_not_allowed")


def test_a_header_that_is_wrong_starts_nothing(client: httpx.Client) -> None:
    response = client.post("/say", json={**HI, "model": "slow"}, headers={"X-Enginehouse-Details": "x"})

    assert response.status_code == 400 and response.json()["code"] == "invalid_value"
    assert running(client) == []


def test_integers_that_no_worker_takes_are_refused(client: httpx.Client) -> None:
    response = client.post("/say", json={"text": "Hi", "max_tokens": 10**30})

    assert response.status_code == 400 and "max_tokens" in response.json()["problem"]


def test_members_that_mean_something_to_others_only_are_ignored(client: httpx.Client) -> None:
    response = client.post("/say", json={"text": "Hi", "thinking": {"type": "enabled"}, "input": "x"})

    assert response.status_code == 200 and response.headers["x-enginehouse-ignored"] == "thinking, input"


@pytest.mark.parametrize("method", ["opening", "fail"])
def test_a_writer_that_fails_ends_the_stream_with_an_error(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(sys.modules["enginehouse_say"].SayAssembler, method, fail)
    with client.stream("POST", "/say", json={"text": "Hi", "model": "broken", "stream": True}) as response:
        last = lines_of(response)[-1]

    if method == "opening":
        assert last["done"] is False
    else:
        assert last["error"]["code"] == "generation_failed"


def test_limits_of_keys_count_its_requests(client: httpx.Client) -> None:
    once = {"authorization": "Bearer once"}
    first, second = (client.post("/say", json=HI, headers=once) for _ in range(2))

    assert first.status_code == 200 and first.headers["x-ratelimit-limit-requests"] == "1"
    assert second.status_code == 429 and int(second.headers["retry-after"]) > 0
    assert second.json()["code"] == "rate_limit_exceeded"


def test_a_client_that_leaves_cancels(client: httpx.Client) -> None:
    with client.stream("POST", "/say", json={**HI, "model": "slow", "stream": True}) as response:
        lines = response.iter_lines()
        while "say" not in next(lines):  # the opening comes before the engine has the request
            pass
        assert [one["model"] for one in running(client)] == ["slow"]

    deadline = time.monotonic() + 60
    while running(client):
        assert time.monotonic() < deadline, "the request goes on"
        time.sleep(0.02)


def test_metrics_and_the_log_name_its_address(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, access_lines: Callable[[int], list[str]]
) -> None:
    with caplog.at_level("INFO", "enginehouse.access"):
        client.post("/say", json=HI)
        (line,) = [line for line in access_lines(1) if "path=/say" in line]

    assert "key=alice" in line and "model=quick" in line and "completion_tokens=2" in line
    assert 'endpoint="/say"' in client.get("/metrics").text


def test_the_openapi_document_describes_it(client: httpx.Client) -> None:
    (operation,) = (client.get("/schema").json()["paths"]["/say"]["post"],)
    body = operation["requestBody"]["content"]["application/json"]["schema"]

    assert set(body["properties"]) == {"text", "max_tokens", "stream", "model"} and body["required"] == ["text"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "application/x-ndjson"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"path": "/admin/say"}, "not an address of core"),
        ({"path": "say"}, "must begin with /"),
        ({"body": dict}, "must be an attrs class with the attribute 'stream'"),
        ({"body": Named}, "must be an attrs class with the attribute 'stream'"),
        (None, "is neither a GenerationRoute nor an ReplyRoute"),
    ],
)
def test_routes_that_core_cannot_serve_are_load_errors(
    registry: PluginRegistry, change: dict[str, Any] | None, reason: str
) -> None:
    (route,) = registry.surfaces["say"].routes
    broken = Route(path="/say", name="say", summary="Speak") if change is None else evolve(route, **change)

    with pytest.raises(PluginError, match=reason):
        Registration().register(KINDS["surfaces"], "one", Named("one", (broken,)))


@pytest.mark.parametrize("header", ["a b", "", "x\r\nset-cookie", 7])
def test_a_header_of_the_id_that_cannot_be_sent_is_a_load_error(header: Any) -> None:
    with pytest.raises(PluginError, match="must be None or the name of a header"):
        Registration().register(KINDS["surfaces"], "one", Named("one", request_id_header=header))


def test_a_surface_that_fails_does_not_hide_an_error(caplog: pytest.LogCaptureFixture) -> None:
    scope = {"enginehouse.surface": Failing("failing")}

    status, _, body = error_at_once(http_error(404, "Nothing."), scope)

    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
    assert "the surface 'failing' of the plugin" in caplog.text


@frozen(kw_only=True)
class Line:
    """Part of a body."""

    text: str
    volume: complex | None = None


@frozen(kw_only=True)
class Lines:
    """A body with parts."""

    lines: tuple[Line, ...]
    stream: bool = False


async def _nothing() -> None:
    """A connection from which nothing comes."""


def test_unknown_members_of_parts_are_listed() -> None:
    decoder = BodyDecoder(Lines, {}, LimitsSettings(), "reject")
    body = {"lines": [{"text": "a"}, {"text": "b", "pitch": 1}], "volume": 11}
    caller = Caller(profile=PROFILES["openai"])
    server = ServerAccess(make_state(settings()), {}, _nothing, caller)  # type: ignore[typeddict-item]
    decoded = decoder.decode(json.dumps(body).encode(), server)

    assert decoded.body.lines[1] == Line(text="b")
    assert decoded.ignored == ["volume", "lines[1].pitch"]


def test_the_openapi_document_holds_the_parts_of_its_bodies(registry: PluginRegistry) -> None:
    (route,) = registry.surfaces["say"].routes
    document = build_document([evolve(route, body=Lines)], {}, LimitsSettings())
    body = document["paths"]["/say"]["post"]["requestBody"]["content"]["application/json"]["schema"]

    assert body["properties"]["lines"]["items"] == {"$ref": "#/components/schemas/say.Line"}
    assert set(document["components"]["schemas"]["say.Line"]["properties"]) == {"text", "volume"}


def test_the_openapi_document_has_what_tokenize_reads_with_details() -> None:
    schemas = build_document([], {}, LimitsSettings())["components"]["schemas"]

    assert {"details", "cache_salt", "prompt_cache_key"} <= set(schemas["TokenizeRequest"]["properties"])


def test_the_surface_of_an_address_is_found_in_linear_time(registry: PluginRegistry) -> None:
    surfaces = Surfaces([registry.surfaces["say"]], None)

    assert surfaces.at("/say/" + "a/" * 30_000, {}) is registry.surfaces["say"]
    assert surfaces.at("/other" + "/a" * 30_000, {}) is None
    assert_near_linear(partial(hostile_text, "/a"), partial(surfaces.at, headers={}), 200_000)


# -- which surfaces are on --------------------------------------------------------------------------


def settings(*surfaces: str) -> Settings:
    return Settings(server=ServerSettings(surfaces=surfaces or None), plugins=PluginsSettings(allow=()))


def addresses(*surfaces: str) -> set[str]:
    return {route.path_format for route in build_app(make_state(settings(*surfaces))).app.routes}


def test_surfaces_can_be_left_out(registry: PluginRegistry) -> None:
    both = [Named("openai"), registry.surfaces["say"]]

    assert [route.path for route in Surfaces(both, None).routes] == ["/say"]
    assert [route.path for route in Surfaces(both, ["openai"]).routes] == []
    assert "/v1/models" in addresses("openai") and addresses() == addresses("openai")


def test_an_unknown_surface_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"server\.surfaces: unknown surface 'opena'"):
        addresses("opena")


def test_two_surfaces_with_one_address_stop_the_start(registry: PluginRegistry) -> None:
    say = registry.surfaces["say"]

    with pytest.raises(ConfigError, match="'say' and 'other' both have /say"):
        Surfaces([say, Named("other", say.routes)], None)


# -- frames -----------------------------------------------------------------------------------------


def test_chunks_stay_on_one_line() -> None:
    """Whatever a careless reader takes for the end of a line."""
    written = write_chunks(NDJSON, [{"text": "a\u2028b\u2029c\x85d\ne"}])

    assert len(written.decode().splitlines()) == 1
    assert json.loads(written) == {"text": "a\u2028b\u2029c\x85d\ne"}
