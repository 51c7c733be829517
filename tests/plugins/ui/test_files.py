"""The files of the page as they are served, without a browser: policy, sizes, origins, and what is vendored."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import enginehouse_ui
from enginehouse.settings.config import AuthSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

ROOT = Path(enginehouse_ui.__file__).parent
PAGE = ROOT / "page"
OWN = [path for path in sorted(PAGE.rglob("*")) if path.is_file() and "vendor" not in path.parts]
LAZY = "vendor/uplot/uPlot.esm.js"
HTML = {"accept": "text/html,application/xhtml+xml"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_script(tmp_path_factory.mktemp("script") / "hello.json", ["Hello"])


def settings(source: str, keys: tuple[str, ...] = (), **server) -> Settings:
    return Settings(
        server=ServerSettings(**server),
        auth=AuthSettings(keys=keys),
        models={"m": ModelSettings(source=source, backend="scripted")},
        plugins=PluginsSettings(allow=("ui",)),
    )


@pytest.fixture(scope="module")
def client(source: str) -> Iterator[httpx.Client]:
    with served(settings(source, keys=("a-secret-key",)), headers={"x-api-key": "a-secret-key"}) as client:
        del client.headers["x-api-key"]
        yield client


def test_browsers_are_led_to_the_page_without_a_key(client: httpx.Client) -> None:
    answer = client.get("/", headers=HTML, follow_redirects=True)

    assert answer.status_code == 200
    assert answer.url.path == "/ui/console/"
    assert '<script type="module" src="app.js">' in answer.text
    assert client.get("/ui", follow_redirects=True).url.path == "/ui/console/"
    assert client.get("/ui/console", follow_redirects=True).url.path == "/ui/console/"


def test_everything_else_needs_the_key(client: httpx.Client) -> None:
    statuses = {path: client.get(path).status_code for path in ("/", "/v1/models", "/uix", "/admin/models")}

    assert set(statuses.values()) == {401}
    assert client.post("/ui/console/", json={}).status_code == 401


@pytest.mark.parametrize("path", [path.relative_to(PAGE).as_posix() for path in OWN])
def test_every_file_is_served_under_the_policy(client: httpx.Client, path: str) -> None:
    answer = client.get(f"/ui/console/{path}")

    assert answer.content == (PAGE / path).read_bytes()
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_file_that_the_browser_has_is_not_sent_again(client: httpx.Client) -> None:
    tag = client.get("/ui/console/app.js").headers["etag"]

    answer = client.get("/ui/console/app.js", headers={"if-none-match": tag})

    assert (answer.status_code, answer.content) == (304, b"")
    assert client.get("/ui/console/app.js", headers={"if-none-match": '"another"'}).status_code == 200


def test_files_are_compressed_for_those_who_take_it(client: httpx.Client) -> None:
    assert client.get("/ui/console/app.js").headers["content-encoding"] == "gzip"
    for refused in ("identity", "gzip;q=0", "gzip; q=0.0, br"):
        assert "content-encoding" not in client.get("/ui/console/app.js", headers={"accept-encoding": refused}).headers
    assert client.head("/ui/console/app.js").content == b""


@pytest.mark.parametrize(
    "path",
    ["../vendored.json", "..%2fvendored.json", "%2e%2e/%2e%2e/__init__.py", "../__init__.py", "//etc/passwd", "no.js"],
)
def test_no_path_leads_out_of_the_folder(client: httpx.Client, path: str) -> None:
    answer = client.get(f"/ui/console/{path}")

    assert answer.status_code in (401, 404)
    assert answer.headers["content-type"] == "application/json"


def test_first_load_is_small() -> None:
    first = [path for path in PAGE.rglob("*") if path.is_file() and path.suffix in (".html", ".js", ".css", ".svg")]
    sizes = {path: len(gzip.compress(path.read_bytes())) for path in first}

    assert sum(size for path, size in sizes.items() if path != PAGE / LAZY) <= 120_000
    assert sum(path.stat().st_size for path in first) <= 410_000


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_files_name_no_other_origin(path: Path) -> None:
    """Neither as an address to load from nor as code that the policy would stop."""
    text = path.read_text(encoding="utf-8")

    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)[\w.]+", text) == []
    assert re.findall(r"\beval\(|new Function|\bstyle=|\bon\w+=\"", text) == []


def test_vendored_files_are_those_of_the_packages() -> None:
    """A changed file needs a new version here: `npm pack NAME@VERSION` gives the archive of this integrity."""
    listed = json.loads((ROOT / "vendored.json").read_text(encoding="utf-8"))
    files = {name: digest for package in listed.values() for name, digest in package["files"].items()}
    found = {
        path.relative_to(PAGE / "vendor").as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (PAGE / "vendor").rglob("*")
        if path.is_file()
    }

    assert files == found
    assert all({"version", "licence", "integrity"} <= set(package) for package in listed.values())
    assert all(f"{name}/LICENSE.txt" in files for name in listed)


@pytest.mark.parametrize(
    ("server", "is_on"),
    [({}, True), ({"ui": False}, False), ({"host": "0.0.0.0", "insecure": True}, False)],
    ids=["loopback", "off", "all addresses"],
)
def test_the_page_is_on_where_only_this_machine_reaches_it(source: str, server: dict, is_on: bool) -> None:
    with served(settings(source, port=0, **server)) as client:
        assert client.get("/ui/console/").status_code == (200 if is_on else 404)
        assert client.get("/", headers=HTML).status_code == (307 if is_on else 404)
