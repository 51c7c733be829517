"""Who may do what: scopes, profiles and namespaces of keys, every registered route, what web pages get."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from attrs import evolve
from litestar import get

from enginehouse.api.http.app import build_app
from enginehouse.api.http.callers import PUBLIC, scope_of
from enginehouse.api.http.keys import hash_key, key_line
from enginehouse.contract.errors import ConfigError
from enginehouse.settings.auth import KeySettings
from enginehouse.settings.config import (
    AuthSettings,
    ModelSettings,
    PluginsSettings,
    ServerSettings,
    Settings,
)
from enginehouse.settings.profiles import PROFILES
from enginehouse_testkit.application import make_state
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served
from enginehouse_testkit.server_thread import server_thread

from .harness import chat

ORIGIN = "https://app.example"
FILED = "a-key-that-only-its-owner-knows"
KEYS = (
    "plain",
    KeySettings(name="everything", key="all", scopes=("infer", "metrics", "admin")),
    KeySettings(name="watcher", key="watch", scopes=("metrics",)),
    KeySettings(name="manager", key="manage", scopes=("admin",)),
    KeySettings(name="octo", key="octo", profile="octomil"),
    KeySettings(name="pair-1", key="pair-1", namespace="pair"),
    KeySettings(name="pair-2", key="pair-2", namespace="pair"),
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def connect(settings: Settings) -> Iterator[httpx.Client]:
    with served(settings, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("doors")
    key_file = folder / "keys.txt"
    key_file.write_text(key_line("filed", hash_key(FILED), profile="mini-sglang") + "\n", encoding="utf-8")
    hello = write_script(folder / "hello.json", ["Hel", "lo"])
    return Settings(
        server=ServerSettings(cors_origins=(ORIGIN,)),
        auth=AuthSettings(keys=KEYS, key_file=str(key_file)),
        models={
            "m": ModelSettings(source=hello, backend="scripted"),
            "fake": ModelSettings(source=str(folder), backend="fake", isolation="thread", context=512),
        },
        plugins=PluginsSettings(allow=()),
    )


@pytest.fixture(scope="module")
def client(settings: Settings) -> Iterator[httpx.Client]:
    yield from connect(settings)


@pytest.fixture(scope="module")
def routes(settings: Settings) -> list[tuple[str, dict[str, str | None]]]:
    """Every registered address with its methods, and the scope that each needs."""
    return [
        (route.path_format, {method: scope_of(handler) for method, (handler, _) in route.route_handler_map.items()})
        for route in build_app(make_state(settings)).app.routes
    ]


def test_every_route_has_the_one_check_of_permissions(settings: Settings) -> None:
    """A hook of a route or a router would replace that of the application."""
    handlers = [handler for route in build_app(make_state(settings)).app.routes for handler in route.route_handlers]
    checks = {handler.resolve_before_request() for handler in handlers}

    assert len(checks) == 1
    assert None not in checks


@pytest.mark.parametrize(("peer", "status"), [("127.0.0.1", 200), ("::1", 200), ("192.0.2.7", 403), (None, 403)])
async def test_without_keys_only_this_machine_manages_the_server(
    settings: Settings, tmp_path: Path, peer: str | None, status: int
) -> None:
    """``insecure`` lets everyone use the models, not unload them or read what others are answered."""
    open_to_all = evolve(settings, auth=AuthSettings(), server=ServerSettings(host="0.0.0.0", insecure=True))
    app = build_app(make_state(open_to_all))

    async def call(method: str, path: str) -> int:
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1")],
            "client": None if peer is None else (peer, 50000),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
        }
        sent = []

        async def receive() -> dict:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return sent[0]["status"]

    assert await call("GET", "/admin/models") == status
    assert await call("GET", "/admin/requests") == status
    assert await call("GET", "/v1/models") == 200
    assert await call("GET", "/metrics") == 200


API = {"/chat/completions", "/completions", "/compress", "/route", "/tokenize", "/detokenize", "/apply-template"}
API |= {"/models", "/models/{model_id}", "/chat/completions/input_tokens"}


def test_every_route_says_what_it_needs(routes) -> None:
    """Whoever adds an address outside ``/admin`` adds it here, too."""
    needed = {address: scope for address, scopes in routes for scope in scopes.values()}
    open_to_users = {*API, *(f"/v1{path}" for path in API), "/schema", "/schema/openapi.json"}

    assert all(len(set(scopes.values())) == 1 for _, scopes in routes)
    assert {address for address, scope in needed.items() if scope is None} == PUBLIC == {"/health"}
    assert {address for address, scope in needed.items() if scope == "infer"} == open_to_users
    assert {address for address, scope in needed.items() if scope == "metrics"} == {"/metrics"}
    assert {scope for address, scope in needed.items() if address.startswith("/admin/")} == {"admin"}
    assert {address for address, scope in needed.items() if scope == "admin"} > {"/admin/models", "/admin/reload"}


def test_h30_every_registered_route_needs_a_key(client: httpx.Client, routes) -> None:
    """Also in every profile, and with a wrong key."""
    checked = 0
    for address, methods in routes:
        path = re.sub(r"\{\w+\}", "m", address)
        paths = [path, *(f"/compat/{name}{path}" for name in PROFILES if path.startswith("/v1/"))]
        for path, method in [(path, method) for path in paths for method in sorted(methods)]:
            for headers in ({}, bearer("wrong")):
                response = client.request(method, path, headers=headers, json=chat() if method == "POST" else None)
                expected = (200, 204) if address in PUBLIC else (401,)
                assert response.status_code in expected, (method, path)
                checked += 1
    assert checked > 100


def test_every_registered_route_needs_its_scope(client: httpx.Client, routes) -> None:
    scopes = {"plain": {"infer"}, "all": {"infer", "metrics", "admin"}, "watch": {"metrics"}, "manage": {"admin"}}
    for address, methods in routes:
        path = re.sub(r"\{\w+\}", "m", address)
        for method, needed in methods.items():
            if method in ("OPTIONS", "HEAD"):
                continue
            for key, granted in scopes.items():
                body = chat() if method == "POST" else None
                with client.stream(method, path, headers=bearer(key), json=body) as response:
                    if needed is None or needed in granted:  # some answers never end, so they are not read
                        names_something = path.startswith("/admin/") or path.endswith("/route")
                        known = (200, 400, 404, 409) if names_something else (200, 400)
                        assert response.status_code in known, (method, path, key)
                        continue
                    response.read()
                    assert response.status_code == 403, (method, path, key)
                    error = response.json()["error"]
                    assert error["code"] == "insufficient_scope" and repr(needed) in error["message"]


def test_a_route_that_says_nothing_needs_admin() -> None:
    assert scope_of(get("/v1/some-new-thing")) == "admin"


def test_addresses_that_do_not_exist_are_not_found_with_any_key(client: httpx.Client) -> None:
    for key in ("plain", "watch"):
        assert client.get("/v1/nothing", headers=bearer(key)).status_code == 404


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_keys_of_a_file_open(client: httpx.Client, header: str) -> None:
    value = f"Bearer {FILED}" if header == "authorization" else FILED
    response = client.post("/v1/chat/completions", json=chat(), headers={header: value})

    assert response.status_code == 200
    assert response.json()["id"].startswith("cmpl-")  # its profile is mini-sglang


def test_a_bad_key_file_stops_the_start(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("alice secret\n")
    broken = evolve(settings, auth=AuthSettings(key_file=str(tmp_path / "keys.txt")))
    with pytest.raises(ConfigError, match="line 1"), server_thread(broken) as running:
        running.stop()


def test_the_log_names_the_key(client: httpx.Client, caplog: pytest.LogCaptureFixture, access_lines) -> None:
    with caplog.at_level(logging.INFO, "enginehouse.access"):
        client.get("/v1/models", headers=bearer("pair-1"))
        client.get("/v1/models", headers=bearer("wrong"))
        lines = [line for line in access_lines(2) if " path=/v1/models " in line]
        while len(lines) < 2:  # a stream of another test may have ended meanwhile
            lines = [line for line in access_lines(len(lines) + 2) if " path=/v1/models " in line]

    assert "key=pair-1" in lines[0] and "key=" not in lines[1]


def cached_tokens(client: httpx.Client, key: str, prompt: str, **fields) -> int:
    body = {"model": "fake", "prompt": prompt, "max_tokens": 1, **fields}
    answer = client.post("/v1/completions", json=body, headers=bearer(key)).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_keys_prefix_cache_is_its_own(client: httpx.Client) -> None:
    prompt = "Once upon a time there was a key that kept its prompts to itself. " * 3

    assert cached_tokens(client, "plain", prompt) == 0
    assert cached_tokens(client, "plain", prompt) > 0
    assert cached_tokens(client, "all", prompt) == 0  # another key's prompt is not even recognised
    assert cached_tokens(client, "plain", prompt, cache_salt="mine") == 0


def test_keys_of_one_namespace_share_it(client: httpx.Client) -> None:
    prompt = "Two keys once shared whatever they knew, and nobody else was told. " * 3

    assert cached_tokens(client, "pair-1", prompt) == 0
    assert cached_tokens(client, "pair-2", prompt) > 0
    assert cached_tokens(client, "plain", prompt) <= 1  # the begin token, which its own prompts share
    # Nobody gets in by a salt that looks like the namespace.
    assert cached_tokens(client, "plain", prompt, cache_salt="pair\0") == 0


def test_the_profile_of_a_request(client: httpx.Client) -> None:
    """The address comes first, then the key, then the settings."""

    def code(path: str, key: str) -> str:
        body = chat(temperature="hot")
        return client.post(path, json=body, headers=bearer(key)).json()["error"]["code"]

    assert code("/v1/chat/completions", "plain") == "invalid_value"
    assert code("/v1/chat/completions", "octo") == "bad_request"
    assert code("/compat/octomil/v1/chat/completions", "plain") == "bad_request"
    assert code("/compat/openai/v1/chat/completions", "octo") == "invalid_value"


@pytest.mark.parametrize("profile", PROFILES)
def test_compat_addresses_serve_every_route_of_the_api(client: httpx.Client, profile: str) -> None:
    base = f"/compat/{profile}/v1"

    answer = client.post(f"{base}/chat/completions", json=chat(), headers=bearer("plain")).json()
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert answer["id"].startswith(PROFILES[profile].chat_id)
    models = client.get(f"{base}/models", headers=bearer("plain")).json()
    assert [model["id"] for model in models["data"]] == ["m", "fake"]
    assert client.get(f"{base}/models/m", headers=bearer("plain")).status_code == 200
    assert client.post(f"{base}/completions", json={"prompt": "a"}, headers=bearer("plain")).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/compat/none/v1/models", "/compat/octomil", "/compat/octomil/health", "/compat/octomil/compat/omlx/v1/models"],
)
def test_other_compat_addresses_do_not_exist(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 401
    assert client.get(path, headers=bearer("plain")).status_code == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/compat/octomil/v1/chat/completions", "/v1/nothing"])
@pytest.mark.parametrize(
    ("body", "key"),
    [(chat(), "plain"), (chat(stream=True), "plain"), (chat(n=0), "plain"), (chat(), "watch"), ({}, "no")],
)
def test_h31_cors_headers_on_every_answer(client: httpx.Client, path: str, body, key: str) -> None:
    for origin, allowed in ((ORIGIN, True), ("https://evil.example", False), (f"{ORIGIN}.evil.example", False)):
        response = client.post(path, json=body, headers={**bearer(key), "origin": origin})

        assert response.headers.get("access-control-allow-origin") == (ORIGIN if allowed else None)
        assert (response.status_code == 403 and not allowed) or allowed
        assert response.headers["vary"] == "Origin"


def test_h31_pages_may_read_the_headers_that_tell_something(client: httpx.Client) -> None:
    response = client.get("/v1/models", headers={**bearer("plain"), "origin": ORIGIN})
    exposed = response.headers["access-control-expose-headers"].split(", ")

    assert {"retry-after", "x-request-id", "x-enginehouse-ignored", "x-octomil-routed-model"} <= set(exposed)
