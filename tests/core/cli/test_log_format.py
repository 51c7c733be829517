"""Log lines as JSON: one object per line, whatever is in it."""

import json
import logging
import sys
from pathlib import Path

import httpx
import pytest

from enginehouse.cli.output import JsonFormatter, formatter_for
from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import started_server


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("enginehouse.test", logging.WARNING, __file__, 1, "%s", (message,), None)
    vars(made).update(extra)
    return made


@pytest.mark.parametrize(
    "text", ["plain", 'quotes " and \\', "two\nlines", "lone \ud800 surrogate", "漢字", "\x00\x1b[31m"]
)
def test_a_line_is_one_line_and_one_object(text: str) -> None:
    line = JsonFormatter().format(record(text))
    read = json.loads(line)

    assert "\n" not in line and "\x1b" not in line
    assert read["message"] == text.encode("utf-8", "replace").decode()
    assert (read["level"], read["logger"]) == ("warning", "enginehouse.test")
    assert read["time"].endswith("+00:00")


def test_requests_are_objects_of_their_own() -> None:
    fields = {"id": "r", "path": "/x\ud800", "status": 200, "total_s": 0.12345678, "stream": True}
    read = json.loads(JsonFormatter().format(record("not shown", access=fields)))

    assert read["request"] == {"id": "r", "path": "/x?", "status": 200, "total_s": 0.123457, "stream": True}
    assert "message" not in read


def test_exceptions_are_in_the_same_line() -> None:
    made = record("it failed")
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    read = json.loads(JsonFormatter().format(made))

    assert read["message"] == "it failed" and "ValueError: why" in read["exception"]


def test_text_stays_text() -> None:
    assert formatter_for("text").format(record("plain")).endswith("WARNING plain")


def test_every_line_of_a_server_that_writes_json_is_json(tmp_path: Path) -> None:
    source = write_script(tmp_path / "hello.json", ["Hel", "lo"])
    config = tmp_path / "enginehouse.toml"
    config.write_text(
        f'[server]\nlog_format = "json"\n[plugins]\nallow = []\n[models.m]\nsource = "{source}"\nbackend = "scripted"\n'
    )
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with started_server("--config", config) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        url = server.url
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    (request,) = [line["request"] for line in lines if line["logger"] == "enginehouse.access"]

    assert url is not None
    assert any("listening on" in line.get("message", "") for line in lines)
    assert request["id"] == answer.json()["id"] and request["status"] == 200 and request["outcome"] == "length"
    assert request["completion_tokens"] == 2 and request["first_token_s"] >= 0
