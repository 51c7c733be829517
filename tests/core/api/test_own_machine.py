"""Without keys, what manages the server is answered to direct requests of its own machine only."""

import socket
from collections.abc import Iterator

import httpx
import pytest

from enginehouse.api.http.origins import foreign_sign
from enginehouse.settings.config import AuthSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
FOREIGN_PAGES = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"origin": "chrome-extension://abcdefgh"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]
PROXIES = [
    {"x-forwarded-for": "203.0.113.9"},
    {"X-Forwarded-Host": "llm.example"},
    {"X-Forwarded-Proto": "https"},
    {"forwarded": "for=203.0.113.9"},
    {"x-real-ip": "127.0.0.1"},
    {"via": "1.1 proxy"},
    {"cf-connecting-ip": "203.0.113.9"},
    {"True-Client-IP": "203.0.113.9"},
    {"x-forwarded-for": ""},
]
OTHER_HOSTS = [{"host": "llm.example"}, {"host": "LLM.example:443"}]
ORDERS = [
    ("POST", "/admin/reload"),
    ("POST", "/admin/models/m/unload"),
    ("GET", "/admin/models"),
    ("GET", "/admin/requests"),
    ("GET", "/admin/events"),
    ("GET", "/admin/slots"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_script(tmp_path_factory.mktemp("script") / "hello.json", ["Hel", "lo"])


def connect(source: str, keys: tuple[str, ...] = (), **server) -> Iterator[httpx.Client]:
    settings = Settings(
        server=ServerSettings(cors_origins=("*",), allowed_hosts=("llm.example",), **server),
        auth=AuthSettings(keys=keys),
        models={"m": ModelSettings(source=source, backend="scripted")},
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def keyless(source: str) -> Iterator[httpx.Client]:
    yield from connect(source)


@pytest.mark.parametrize(("method", "path"), ORDERS)
@pytest.mark.parametrize("headers", [*FOREIGN_PAGES, *PROXIES, *OTHER_HOSTS], ids=str)
def test_orders_of_others_need_a_key(keyless: httpx.Client, method: str, path: str, headers: dict[str, str]) -> None:
    response = keyless.request(method, path, headers=headers, json={} if method == "POST" else None)

    assert response.status_code == 403
    error = response.json()["error"]
    assert error["code"] == "insufficient_scope"
    assert "auth.key_file" in error["message"] and "key with the scope 'admin'" in error["message"]
    assert keyless.get("/v1/models/m").json()["state"] == "ready"


@pytest.mark.parametrize("headers", [*FOREIGN_PAGES, *PROXIES, *OTHER_HOSTS], ids=str)
def test_others_may_use_the_models(keyless: httpx.Client, headers: dict[str, str]) -> None:
    assert keyless.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200


@pytest.mark.parametrize("header", ["origin", "x-forwarded-for", "sec-fetch-site"])
def test_the_second_of_repeated_headers_counts_too(keyless: httpx.Client, header: str) -> None:
    own = str(keyless.base_url).rstrip("/")
    values = {"origin": (own, "https://evil.example"), "sec-fetch-site": ("none", "cross-site")}.get(header, ("", "x"))

    assert keyless.get("/admin/models", headers=[(header, value) for value in values]).status_code == 403


def test_own_requests_and_own_pages_manage_the_server(keyless: httpx.Client) -> None:
    origin = str(keyless.base_url).rstrip("/")
    for headers in ({}, {"origin": origin, "sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
        assert keyless.get("/admin/models", headers=headers).status_code == 200
    for host in ("localhost", "127.0.0.1:1", "[::1]:8080", "[::ffff:127.0.0.1]"):
        assert keyless.get("/admin/models", headers={"host": host}).status_code == 200


def test_a_proxy_that_says_nothing_is_known_by_its_http_version(keyless: httpx.Client) -> None:
    """This is what nginx sends with nothing but ``proxy_pass``."""
    url = keyless.base_url
    with socket.create_connection((url.host, url.port)) as connection:
        head = f"GET /admin/models HTTP/1.0\r\nHost: {url.host}:{url.port}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.makefile("rb").readline().split()[1] == b"403"


@pytest.mark.parametrize("headers", [*FOREIGN_PAGES[:2], *PROXIES, *OTHER_HOSTS], ids=str)
def test_a_key_opens_wherever_it_comes_from(source: str, with_keys: httpx.Client, headers: dict[str, str]) -> None:
    assert with_keys.get("/v1/models", headers={**headers, "x-api-key": "k"}).status_code == 200


@pytest.fixture(scope="module")
def with_keys(source: str) -> Iterator[httpx.Client]:
    yield from connect(source, ("k",))


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]"), ("::", "http://127.0.0.1"), ("::", "http://[::1]")])
def test_ipv6(source: str, host: str, url: str) -> None:
    """On ``::`` a caller from 127.0.0.1 has the address ::ffff:127.0.0.1."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    for client in connect(source, host=host, insecure=True):
        address = f"{url}:{client.base_url.port}/admin/models"
        assert client.get(address).status_code == 200
        assert client.get(address, headers={"via": "1.1 proxy"}).status_code == 403


@pytest.mark.parametrize(
    ("client", "server", "is_own"),
    [
        (("127.0.0.1", 5), ("127.0.0.1", 80), True),
        (("::ffff:127.0.0.1", 5), ("::ffff:127.0.0.1", 80), True),
        (("::ffff:192.0.2.7", 5), ("::ffff:127.0.0.1", 80), False),
        (("192.0.2.7", 5), ("192.0.2.1", 80), False),
        (None, ("127.0.0.1", 80), False),  # its connection had ended before its address was asked for
        (None, ("/run/enginehouse.sock", None), True),
        (None, None, True),  # the same with older versions of uvicorn
    ],
)
def test_addresses_of_callers(client, server, is_own: bool) -> None:
    scope = {"client": client, "server": server, "scheme": "http", "http_version": "1.1"}
    headers = [(b"host", b"localhost")]

    assert (foreign_sign({**scope, "headers": headers}) is None) == is_own
    assert foreign_sign({**scope, "headers": [*headers, (b"x-forwarded-for", b"::1")]}) is not None
