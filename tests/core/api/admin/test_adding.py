"""Models that administrators add and remove while the server runs; which sources they may name; the event stream."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from enginehouse.cli.main import main
from enginehouse_testkit.script import write_script
from enginehouse_testkit.waiting import wait_until

OPEN = """
[server]
models_dir = "models"
allowed_sources = ["owner/*"]

[limits]
memory_budget = "20MB"

[plugins]
allow = ["samplers"]

[models.plain]
source = "plain.json"
backend = "scripted"

[models."added*"]
backend = "scripted"
ttl = 77

[models."fake*"]
backend = "fake"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    write_script(folder / "one.json", ["On", "e"])
    (folder / "notes.txt").write_text("not a model", encoding="utf-8")
    (folder / "out.json").symlink_to(tmp_path / "plain.json")
    return folder


@pytest.fixture
def server(operate: Callable[..., Any], folder: Path) -> Any:
    return operate(OPEN)


def _add(server: Any, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = server.client.post("/admin/models", json=body)
    return answer.status_code, answer.json()


def test_a_model_of_the_folder_is_added_served_and_removed(server: Any) -> None:
    status, added = _add(server, source="one.json", id="added-one", aliases=["uno"], defaults={"temperature": 0})

    assert (status, added["origin"], added["state"], added["ttl"]) == (201, "added", "unloaded", 77), added
    assert server.ask("uno").json()["choices"][0]["text"] == "One"
    assert server.reload(OPEN).json()["models"]["kept"] == ["plain", "added-one"]
    assert server.client.delete("/admin/models/uno").json() == {"id": "added-one", "object": "model", "deleted": True}
    assert server.ask("uno").status_code == 404
    assert server.client.delete("/admin/models/uno").status_code == 404


REFUSALS = [
    ({"source": "one.json", "id": "plain"}, 409, "conflict", "id"),
    ({"source": "one.json", "id": "added", "aliases": ["plain"]}, 409, "conflict", "aliases"),
    ({"source": "none.json", "id": "added"}, 404, "source_not_found", "source"),
    ({"source": "/etc/passwd", "id": "added"}, 403, "source_not_allowed", "source"),
    ({"source": "/no/such/file", "id": "added"}, 403, "source_not_allowed", "source"),
    ({"source": "../plain.json", "id": "added"}, 403, "source_not_allowed", "source"),
    ({"source": "../:Q4_K_M", "id": "added"}, 403, "source_not_allowed", "source"),
    ({"source": "out.json", "id": "added"}, 403, "source_not_allowed", "source"),
    ({"source": ".", "id": "added"}, 403, "source_not_allowed", "source"),
    ({"source": "one.json\0", "id": "added"}, 400, "invalid_value", "source"),
    ({"source": "one.json", "id": "*"}, 400, "invalid_value", "id"),
    ({"source": "one.json", "id": "added", "context": 0}, 400, "invalid_value", "context"),
    ({"source": "one.json", "id": "added", "python": "/bin/sh"}, 400, "invalid_value", "python"),
    ({"source": "one.json", "id": "added", "pin": True}, 400, "invalid_value", "ttl"),
    ({"source": "notes.txt", "id": "else"}, 400, "invalid_value", "source"),
    ({"id": "added"}, 400, "invalid_value", "source"),
]


def test_refusals_name_code_and_field(server: Any) -> None:
    answers = [_add(server, **body) for body, *_ in REFUSALS]

    refused = [(status, answer["error"]["code"], answer["error"]["param"]) for status, answer in answers]
    assert refused == [tuple(expected) for _, *expected in REFUSALS]
    assert list(server.models()) == ["plain"]


def test_a_model_that_never_fits_is_refused(operate: Callable[..., Any], folder: Path) -> None:
    small = operate(OPEN.replace('"20MB"', "1").replace("[models.plain]", '[models.plain]\nload = "lazy"'))

    status, answer = _add(small, source="notes.txt", id="fake-1")

    assert (status, answer["error"]["code"], answer["error"]["param"]) == (507, "model_too_large", "source"), answer


def test_adding_and_removing_leave_failed_models_alone(operate: Callable[..., Any], folder: Path) -> None:
    """Only a reload tries them again: their loads may take minutes."""
    server = operate(OPEN + f'[models.broken]\nsource = "{folder}/broken.json"\nbackend = "scripted"\n')
    refused = server.client.post("/admin/models/broken/download")
    assert (refused.status_code, "broken.json" in refused.json()["error"]["message"]) == (409, True), refused.text
    write_script(folder / "broken.json", ["Whole"])

    assert _add(server, source="one.json", id="added")[0] == 201
    assert server.client.delete("/admin/models/added").status_code == 200
    assert server.models()["broken"]["state"] == "failed"
    server.reload(server.config.read_text("utf-8"))
    wait_until(lambda: server.models()["broken"]["state"] == "ready", "the model that a reload tries again")


def test_models_of_the_configuration_are_not_removed(server: Any) -> None:
    answer = server.client.delete("/admin/models/plain")

    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "id")
    assert server.ask("plain").status_code == 200


def _events(url: str, kinds: set[str], begun: threading.Event, got: list[dict[str, Any]]) -> None:
    with httpx.stream("GET", f"{url}/admin/events", timeout=30) as answer:
        for line in answer.iter_lines():
            begun.set()
            if line.startswith("data: "):
                got.append(json.loads(line.removeprefix("data: ")))
                kinds.discard(got[-1]["kind"])
                if not kinds:
                    return


def test_the_stream_has_requests_and_models(server: Any) -> None:
    begun, got = threading.Event(), list[dict[str, Any]]()
    reader = threading.Thread(target=_events, args=(server.url, {"request_ended", "removed", "ready"}, begun, got))
    reader.start()
    assert begun.wait(30)
    _add(server, source="one.json", id="added")
    assert server.ask("added").status_code == 200
    server.client.delete("/admin/models/added")
    reader.join(30)

    requests = [event for event in got if event["kind"].startswith("request_")]
    assert [event["kind"] for event in requests] == ["request_began", "request_ended"]
    assert requests[0]["id"] == requests[1]["id"]
    assert requests[1] | {"model": "added", "asked_model": "added", "status": 200} == requests[1]
    assert requests[1]["usage"]["completion_tokens"] > 0
    assert {"added", "loading", "ready", "removed"} <= {event["kind"] for event in got}


def test_each_end_of_a_request_follows_its_beginning(operate: Callable[..., Any]) -> None:
    server = operate()
    body = {"model": "endless", "prompt": "x", "max_tokens": 1000, "stream": True}
    got = list[dict[str, Any]]()
    with server.client.stream("POST", "/v1/completions", json=body) as running:
        lines = running.iter_lines()
        next(lines)  # it runs before the subscription
        begun = threading.Event()
        reader = threading.Thread(target=_events, args=(server.url, {"unloaded"}, begun, got))
        reader.start()
        assert begun.wait(30)
        assert server.ask("none").status_code == 404  # refused
    server.order("endless", "unload", drain=True)
    reader.join(30)

    pairs = [(event["kind"], event["asked_model"], event["id"]) for event in got if "asked_model" in event]
    first, second = pairs[0][2], pairs[1][2]
    assert pairs == [
        ("request_began", "endless", first),
        ("request_began", "none", second),
        ("request_ended", "none", second),
        ("request_ended", "endless", first),
    ]


@pytest.fixture
def slow_reader(server: Any) -> Iterator[socket.socket]:
    """A subscriber with a small buffer that does not read."""
    host, port = server.url.removeprefix("http://").split(":")
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.settimeout(60)
    reader.connect((host, int(port)))
    reader.sendall(f"GET /admin/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert reader.recv(64).startswith(b"HTTP/1.1 200")
    yield reader
    reader.close()


@pytest.mark.slow
def test_a_slow_reader_loses_events_and_is_told(server: Any, slow_reader: socket.socket) -> None:
    server.client.headers["x-request-id"] = "r" * 120
    body = {"model": "m" * 200, "prompt": "x"}  # refused, which is fast, but counted as a request
    num_sent = 0
    while num_sent < 6000:
        assert server.client.post("/v1/completions", json=body).status_code == 404
        num_sent += 1

    received, seen = b"", 0
    while b'"kind":"lost"' not in received[-100_000:]:
        received += slow_reader.recv(65536)
        seen = received.count(b"request_ended")

    assert seen < num_sent


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_add_list_and_remove(server: Any, folder: Path) -> None:
    (folder / "cut.gguf").write_bytes(b"GGUF")
    config = str(server.config)

    scanned = json.loads(_run("models", "scan", "--config", config, "--json"))
    assert scanned["models"] == []
    assert [Path(one["path"]).name for one in scanned["unserved"]] == ["cut.gguf"]
    assert _run("models", "add", "one.json", "--name", "added", "--url", server.url) == "added is unloaded\n"
    assert server.ask("added").status_code == 200
    assert _run("models", "remove", "added", "--url", server.url) == "added is removed\n"
    refused = CliRunner().invoke(main, ["models", "download", "plain", "--url", server.url])
    assert (refused.exit_code, "have to be downloaded" in refused.output) == (2, True)


def test_a_bad_file_in_the_folder_does_not_refuse_a_reload(server: Any, folder: Path) -> None:
    (folder / "odd.gguf").write_bytes(b"GGUF" + bytes(40))
    (folder / "cut.gguf").write_bytes(b"GGUF")

    reloaded = server.reload(OPEN).json()

    assert reloaded["models"]["added"] == ["odd"], reloaded
    assert (server.models()["odd"]["state"], server.models()["odd"]["origin"]) == ("failed", "folder")
    (unserved,) = server.client.get("/admin/models").json()["unserved"]
    assert (Path(unserved["path"]).name, "4 bytes" in unserved["reason"]) == ("cut.gguf", True)
    assert server.ask("plain").status_code == 200
    (folder / "odd.gguf").unlink()
    assert server.reload(OPEN).json()["models"]["removed"] == ["odd"]
