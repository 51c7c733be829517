"""Who may call the server, from where, with what."""

import logging
from collections.abc import Iterator

import httpx
import pytest

from enginehouse.settings.config import AuthSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

KEY = "secret-key-1"
ORIGIN = "https://app.example"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_script(tmp_path_factory.mktemp("script") / "hello.json", ["Hel", "lo"])


def serve(source: str, keys: tuple[str, ...] = (), **server) -> Iterator[httpx.Client]:
    settings = Settings(
        server=ServerSettings(**server),
        auth=AuthSettings(keys=keys),
        models={"m": ModelSettings(source=source, backend="scripted")},
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def keyless(source: str) -> Iterator[httpx.Client]:
    yield from serve(source)


@pytest.fixture(scope="module")
def guarded(source: str) -> Iterator[httpx.Client]:
    keys = (KEY, "zweiter-schlüssel")
    yield from serve(source, keys, cors_origins=(ORIGIN,), allowed_hosts=("models.internal",))


def code(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"]


PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/m"),
    ("POST", "//v1/chat/completions"),
    ("POST", "/v1//chat/completions"),
    ("POST", "/V1/CHAT/COMPLETIONS"),
    ("POST", "/chat/completions"),
    ("POST", "/health/../v1/chat/completions"),
    ("POST", "/%76%31/chat/completions"),
    ("GET", "/metrics"),
    ("GET", "/schema"),
    ("GET", "/health/"),
    ("OPTIONS", "/v1/models"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"authorization": "Bearer"},
        {"authorization": "Bearer \xff\xfe".encode("latin-1")},
        {"authorization": "Bearer " + "x" * 60_000},
        {"x-api-key": ""},
    ],
)
def test_h30_no_route_answers_without_a_key(guarded: httpx.Client, method: str, path: str, headers) -> None:
    url = str(guarded.base_url).rstrip("/") + path
    response = guarded.request(method, url, headers=headers, json=CHAT if method == "POST" else None)

    assert response.status_code == 401
    assert code(response) == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert KEY not in response.text


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"authorization": f"BEARER   {KEY}"},
        {"x-api-key": KEY},
        {"authorization": "Bearer zweiter-schlüssel".encode()},
    ],
)
def test_h30_the_right_key_opens(guarded: httpx.Client, headers) -> None:
    assert guarded.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200


def test_h30_health_is_public(guarded: httpx.Client) -> None:
    assert guarded.get("/health").status_code == 200


def test_h30_keys_are_never_logged(guarded: httpx.Client, caplog: pytest.LogCaptureFixture, access_lines) -> None:
    with caplog.at_level(logging.DEBUG):
        guarded.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
        guarded.get("/v1/models", headers={"authorization": f"Basic {KEY}"})
        lines = access_lines(2)

    assert "status=401" in lines[1]
    assert KEY not in caplog.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "192.168.0.9"])
def test_foreign_host_is_refused(keyless: httpx.Client, host: str) -> None:
    response = keyless.get("/v1/models", headers={"host": host})

    assert response.status_code == 403
    assert code(response) == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "127.8.8.8", "[::1]:8080", "[::1]"])
def test_loopback_hosts_are_answered(keyless: httpx.Client, host: str) -> None:
    assert keyless.get("/v1/models", headers={"host": host}).status_code == 200


def test_allowed_host_is_answered(guarded: httpx.Client) -> None:
    assert guarded.get("/health", headers={"host": "Models.internal:443"}).status_code == 200
    assert guarded.get("/health", headers={"host": "other.internal"}).status_code == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1", "x"])
def test_foreign_origin_is_refused(keyless: httpx.Client, origin: str) -> None:
    for response in (
        keyless.post("/v1/chat/completions", json=CHAT, headers={"origin": origin}),
        keyless.get("/v1/models", headers={"origin": origin}),
    ):
        assert response.status_code == 403
        assert code(response) == "origin_not_allowed"
        assert "access-control-allow-origin" not in response.headers


def test_own_origin_is_answered(keyless: httpx.Client) -> None:
    origin = str(keyless.base_url).rstrip("/")

    assert keyless.get("/v1/models", headers={"origin": origin}).status_code == 200


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-lang",
}


def test_h31_preflight(guarded: httpx.Client) -> None:
    response = guarded.options("/v1/chat/completions", headers={"origin": ORIGIN, **PREFLIGHT})

    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    allowed = response.headers["access-control-allow-headers"]
    assert all(name in allowed for name in ("authorization", "content-type", "x-stainless-lang"))
    assert response.headers["vary"] == "Origin"


@pytest.mark.parametrize(
    ("origin", "asked", "said"),
    [
        (ORIGIN, "true", "true"),
        (ORIGIN, "True", "true"),
        (ORIGIN, "false", None),
        (ORIGIN, None, None),
        ("https://evil.example", "true", None),
    ],
)
def test_pages_may_reach_a_private_network(guarded: httpx.Client, origin: str, asked, said: str | None) -> None:
    """Chromium asks this of a server at a private address before a public page may call it."""
    headers = {"origin": origin, **PREFLIGHT} | ({"access-control-request-private-network": asked} if asked else {})
    response = guarded.options("/v1/chat/completions", headers=headers)

    assert response.headers.get("access-control-allow-private-network") == said
    assert response.status_code == (204 if origin == ORIGIN else 403)


def test_h31_preflight_of_another_origin(guarded: httpx.Client) -> None:
    response = guarded.options("/v1/chat/completions", headers={"origin": "https://evil.example", **PREFLIGHT})

    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("body", "key", "status"),
    [
        (CHAT, KEY, 200),
        (CHAT | {"stream": True}, KEY, 200),
        (CHAT, "wrong", 401),
        ({"messages": 5}, KEY, 400),
        (CHAT | {"model": "none"}, KEY, 404),
    ],
)
def test_h31_every_answer_carries_cors_headers(guarded: httpx.Client, body, key: str, status: int) -> None:
    headers = {"origin": ORIGIN, "authorization": f"Bearer {key}"}
    response = guarded.post("/v1/chat/completions", json=body, headers=headers)

    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert response.headers["vary"] == "Origin"
    assert "retry-after" in response.headers["access-control-expose-headers"]


def test_h31_head_and_wrong_methods(guarded: httpx.Client) -> None:
    head = guarded.head("/health", headers={"origin": ORIGIN})
    assert head.status_code == 200 and head.content == b""
    assert head.headers["access-control-allow-origin"] == ORIGIN

    headers = {"x-api-key": KEY}
    wrong = guarded.get("/v1/chat/completions", headers=headers)
    assert wrong.status_code == 405 and "POST" in wrong.headers["allow"] and code(wrong) == "method_not_allowed"
    missing = guarded.get("/v1/nothing", headers=headers)
    assert missing.status_code == 404 and code(missing) == "not_found"


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"']
)
def test_json_content_types(keyless: httpx.Client, kind: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'

    assert keyless.post("/v1/chat/completions", content=body, headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize("kind", ["application/json; charset=latin-1", "application/jsonx", "text/json", ""])
def test_other_content_types_are_refused(keyless: httpx.Client, kind: str) -> None:
    response = keyless.post("/v1/chat/completions", content=b"{}", headers={"content-type": kind})

    assert response.status_code == 415
    assert code(response) == "unsupported_media_type"


def test_wildcard_address_answers_for_addresses_but_not_for_names(source: str) -> None:
    for client in serve(source, (KEY,), host="0.0.0.0"):
        assert client.get("/health", headers={"host": "192.168.0.9:8080"}).status_code == 200
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
