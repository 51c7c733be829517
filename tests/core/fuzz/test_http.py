"""Bodies and heads of requests, whole and damaged: an answer or a client error, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st

from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

from .cases import JSON, NASTY_TEXT, NUM_CASES, run_cases, some_members

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/apply-template")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("models")
    models = {
        "m": ModelSettings(source=write_script(folder / "m.json", ["Hel", "lo"]), backend="scripted"),
        "fake": ModelSettings(source=str(folder), backend="fake", isolation="thread", context=256),
    }
    settings = Settings(
        models=models,
        plugins=PluginsSettings(allow=("samplers", "parsers")),
        limits=LimitsSettings(max_tokens=8),
        server=ServerSettings(head_timeout_s=5.0, body_timeout_s=5.0),
    )
    with served(settings, timeout=60) as client:
        yield client


_CONTENT = st.one_of(
    NASTY_TEXT,
    st.none(),
    st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "image_url", "file", "refusal", 5])},
            optional={"text": st.one_of(NASTY_TEXT, JSON), "image_url": st.one_of(NASTY_TEXT, JSON)},
        ),
        max_size=3,
    ),
    JSON,
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "function", 3])},
    optional={
        "content": _CONTENT,
        "name": st.one_of(NASTY_TEXT, JSON),
        "tool_calls": st.one_of(
            JSON,
            st.lists(
                st.fixed_dictionaries(
                    {"function": st.dictionaries(st.sampled_from(["name", "arguments"]), st.one_of(NASTY_TEXT, JSON))}
                ),
                max_size=2,
            ),
        ),
        "tool_call_id": JSON,
        "reasoning_content": JSON,
    },
)
_SCHEMA = st.one_of(JSON, st.fixed_dictionaries({"type": st.sampled_from(["object", "string", 7]), "properties": JSON}))
_TOOL = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "x"])},
    optional={
        "function": st.fixed_dictionaries(
            {"name": st.one_of(st.sampled_from(["f", "g"]), JSON)}, optional={"parameters": _SCHEMA}
        )
    },
)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["m", "fake", "nobody", "../../etc", ""]),
    "messages": st.lists(_MESSAGE, max_size=4),
    "prompt": st.one_of(NASTY_TEXT, st.lists(st.integers(-1, 300), max_size=4), st.lists(NASTY_TEXT, max_size=2)),
    "content": NASTY_TEXT,
    "tokens": st.lists(st.integers(-1, 300), max_size=4),
    "max_tokens": st.integers(-1, 10),
    "n": st.integers(0, 20),
    "stop": st.one_of(NASTY_TEXT, st.lists(NASTY_TEXT, max_size=20)),
    "logit_bias": st.dictionaries(
        st.one_of(st.integers(-1, 300).map(str), NASTY_TEXT), st.floats(-101, 101), max_size=3
    ),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "x": JSON}),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 6)),
    "top_logprobs": st.integers(-1, 21),
    "tools": st.lists(_TOOL, max_size=3),
    "tool_choice": st.one_of(st.sampled_from(["auto", "none", "required"]), JSON),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema", "yaml"])},
        optional={
            "json_schema": st.fixed_dictionaries(
                {}, optional={"name": NASTY_TEXT, "schema": _SCHEMA, "strict": st.booleans()}
            )
        },
    ),
    "chat_template_kwargs": st.dictionaries(NASTY_TEXT, JSON, max_size=3),
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-0.5, 1.5),
    "top_k": st.integers(-2, 400),
    "seed": st.integers(-(2**70), 2**70),
    "samplers": st.one_of(st.lists(NASTY_TEXT, max_size=3), JSON),
    "prediction": JSON,
    "thinking_budget": st.integers(-2, 10),
    "echo": st.booleans(),
    "suffix": NASTY_TEXT,
    "cache_salt": NASTY_TEXT,
}
_WRONG = st.sampled_from([None, True, -1, 0, 1.5, 10**30, "", "x", [], {}, [[]], {"a": 1}])
_BODY = some_members(
    {name: st.one_of(strategy, strategy, strategy, strategy, _WRONG) for name, strategy in _FIELDS.items()}, most=6
)


def _check_answer(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.content.endswith(b"data: [DONE]\n\n"), response.content[-300:]


@NUM_CASES
def test_bodies(client: httpx.Client, num_cases: int) -> None:
    def check(path: str, body: dict[str, Any], unknown: Any) -> None:
        body = (
            {"messages": [{"role": "user", "content": "hi"}], **body}
            if "chat" in path and "prompt" not in body
            else body
        )
        _check_answer(client.post(path, json=body | ({"x": unknown} if unknown is not None else {})))

    run_cases(num_cases, check, path=st.sampled_from(PATHS), body=_BODY, unknown=JSON)
    assert client.post(PATHS[0], json={"messages": [{"role": "user", "content": "hi"}]}).status_code == 200


@NUM_CASES
def test_damaged_bodies(client: httpx.Client, num_cases: int) -> None:
    def check(path: str, body: Any, at: int, patch: bytes, length: int) -> None:
        data = json.dumps(body).encode()
        at %= len(data) + 1
        damaged = data[:at] + patch + data[at + length :]
        _check_answer(client.post(path, content=damaged, headers={"content-type": "application/json"}))

    run_cases(
        num_cases,
        check,
        path=st.sampled_from(PATHS),
        body=st.one_of(_BODY, JSON),
        at=st.integers(0, 10_000),
        patch=st.one_of(
            st.binary(max_size=6),
            st.sampled_from([b"[" * 5000, b'{"a":' * 2000, b'"a":1,"a":2,', b"\\ud800", b"1e999"]),
        ),
        length=st.integers(0, 6),
    )
    assert client.post(PATHS[0], json={"messages": [{"role": "user", "content": "hi"}]}).status_code == 200


_HEADERS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *(
                    b"host: localhost",
                    b"host: evil.example",
                    b"content-type: application/json",
                    b"content-length: 5",
                    b"content-length: x",
                ),
                *(
                    b"transfer-encoding: chunked",
                    b"content-encoding: gzip",
                    b"origin: http://evil.example",
                    b"expect: 100-continue",
                ),
                *(
                    b"connection: close",
                    b"connection: upgrade\r\nupgrade: websocket",
                    b"authorization: Bearer \xff",
                    b"x-request-id: a",
                ),
                *(
                    b" folded",
                    b"no colon",
                    b": empty",
                    b"x: " + b"y" * 3000,
                    b"accept: text/event-stream",
                    b"x-enginehouse-details: true",
                ),
            ]
        ),
        st.binary(max_size=30),
    ),
    max_size=5,
)


@NUM_CASES
def test_heads(client: httpx.Client, num_cases: int) -> None:
    """Sent over a socket, as no client library would; the answer is HTTP, or the connection just ends."""

    def check(method: bytes, target: bytes, version: bytes, headers: list[bytes], body: bytes) -> None:
        data = b"\r\n".join([b" ".join([method, target, version]), b"host: localhost", *headers, b"", body])
        with socket.create_connection((client.base_url.host, client.base_url.port), timeout=30) as connection:
            connection.sendall(data)
            received = b""
            try:
                connection.settimeout(0.05)
                with contextlib.suppress(TimeoutError):  # perhaps it waits for more
                    received = connection.recv(65536)
                connection.settimeout(30)
                connection.shutdown(socket.SHUT_WR)
                while more := connection.recv(65536):
                    received += more
            except OSError:  # closed meanwhile
                pass
        assert received == b"" or received.startswith(b"HTTP/1.1 "), received[:100]
        assert not received.startswith(b"HTTP/1.1 5"), received

    run_cases(
        num_cases,
        check,
        method=st.one_of(
            st.sampled_from([b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"get"]), st.binary(max_size=5)
        ),
        target=st.one_of(
            st.sampled_from(
                [
                    b"/health",
                    b"/v1/models",
                    b"/v1/chat/completions",
                    b"/v1/models/%ff",
                    b"//",
                    b"*",
                    b"/compat/x/v1/models",
                ]
            ),
            st.binary(max_size=12).map(lambda rest: b"/" + rest),
        ),
        version=st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"", b"HTTP/1.1 x"]),
        headers=_HEADERS,
        body=st.one_of(st.binary(max_size=20), st.just(b'{"messages":[{"role":"user","content":"hi"}]}')),
    )
    assert client.get("/health").status_code == 200
