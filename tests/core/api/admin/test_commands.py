"""`enginehouse models list|load|unload` against a running server."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from enginehouse.cli import main

from .conftest import PLAIN, Operated

Operate = Callable[..., Operated]
FAKE = "org/fake:tag"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["models", *arguments], catch_exceptions=False)


def test_models_are_loaded_listed_and_unloaded(operate: Operate) -> None:
    url = operate().url
    loaded = run("load", FAKE, "--url", f"{url}/v1/")
    listed = run("list", "--url", url)
    data = json.loads(run("list", "--url", url, "--json").stdout)
    unloaded = run("unload", "gpt-plain", "--url", url, "--drain-s", "5")

    assert (loaded.exit_code, loaded.stdout) == (0, f"{FAKE} is ready\n")
    assert f"{FAKE}" in listed.output and "6.2 MiB (cpu)" in listed.output
    assert "cpu: 6.2 MiB of 19.1 MiB" in listed.output
    assert [model["id"] for model in data["data"]] == ["plain", FAKE, "endless"]
    assert (unloaded.exit_code, unloaded.stdout) == (0, "plain is unloaded\n")


def test_refusals_of_the_server_are_shown(operate: Operate) -> None:
    server = operate(PLAIN.replace('backend = "fake"', 'backend = "fake"\npin = true'))
    run("load", FAKE, "--url", server.url)
    refused = run("unload", FAKE, "--url", server.url)
    unknown = run("load", "nobody", "--url", server.url)
    forced = run("unload", FAKE, "--force", "--url", server.url)

    assert (refused.exit_code, unknown.exit_code, forced.exit_code) == (2, 2, 0)
    assert "is pinned; use force to unload it all the same" in refused.output
    assert "The model 'nobody' does not exist" in unknown.output


def test_key_is_an_option_or_a_variable(operate: Operate, monkeypatch: pytest.MonkeyPatch) -> None:
    url = operate(PLAIN + '\n[auth]\nkeys = [{name = "boss", key = "boss", scopes = ["infer", "admin"]}]\n').url
    assert "A valid API key is needed" in run("list", "--url", url).output
    assert run("list", "--url", url, "--key", "boss").exit_code == 0
    monkeypatch.setenv("ENGINEHOUSE_KEY", "boss")
    assert run("list", "--url", url).exit_code == 0


@pytest.fixture
def other_server() -> Iterator[str]:
    """A server that is none of ours."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_is_no_server_of_ours_is_said(other_server: str) -> None:
    assert "is not an Enginehouse server" in run("list", "--url", other_server).output
    assert "no server answers at http://127.0.0.1:9" in run("list", "--url", "http://127.0.0.1:9").output
    assert "must begin with http" in run("load", "m", "--url", "ftp://x").output


def test_models_alone_still_lists_what_could_be_served(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "enginehouse.toml").write_text('[models.m]\nsource = "fake"\nbackend = "fake"\n')

    assert "named in the settings" in run().output
    assert json.loads(run("--json").stdout)[0]["name"] == "m"
