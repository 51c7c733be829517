"""What the clients of the soak test ask: every kind of request, and what must come of it.

Each kind sends one request under an id of its own and returns the outcomes that the server's log may show for it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

import httpx
from attrs import frozen

__all__ = ["KINDS", "Client", "SoakFailed", "long_prompt"]

_WORDS = ("river", "stone", "cloud", "engine", "paper", "window", "garden", "music", "travel", "silver", "bridge")
_FINISHED = frozenset({"stop", "length", "tool_calls"})
_ABORTED = frozenset({"cancelled", *_FINISHED})
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class SoakFailed(AssertionError):
    """An answer was not what it must be."""


@frozen(eq=False)
class Client:
    """One client: sends requests with a key, and cancels some with an operator's."""

    http: httpx.AsyncClient
    key: str
    admin_key: str
    random: random.Random

    def headers(self, request_id: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}", "x-request-id": request_id}

    def chat(self, num_words: int = 20, **fields: object) -> dict[str, object]:
        text = " ".join(self.random.choices(_WORDS, k=num_words))
        messages = [{"role": "user", "content": f"Write a story about {text}."}]
        return {"messages": messages, "max_tokens": self.random.randint(4, 40), **fields}

    async def post(self, request_id: str, body: object, path: str = "/v1/chat/completions") -> httpx.Response:
        return await self.http.post(path, json=body, headers=self.headers(request_id))


Kind = Callable[[Client, str], Awaitable[frozenset[str]]]


async def whole(client: Client, request_id: str) -> frozenset[str]:
    answer = await client.post(request_id, client.chat(n=client.random.choice((1, 1, 2))))
    _check(answer, 200)
    if answer.headers["x-request-id"] != request_id:
        raise SoakFailed("the answer has another request id")
    return _FINISHED


async def completion(client: Client, request_id: str) -> frozenset[str]:
    body = {"prompt": [client.chat()["messages"][0]["content"], "One, two,"], "max_tokens": 12}  # type: ignore[index]
    _check(await client.post(request_id, body, "/v1/completions"), 200)
    return _FINISHED


async def stream(client: Client, request_id: str) -> frozenset[str]:
    lines = await _read_stream(client, request_id, client.chat(stream=True))
    if lines[-1] != "data: [DONE]":
        raise SoakFailed(f"a stream ended with {lines[-1]!r}")
    return _FINISHED


async def abort_stream(client: Client, request_id: str) -> frozenset[str]:
    await _read_stream(client, request_id, client.chat(stream=True, max_tokens=200), client.random.randint(1, 12))
    return _ABORTED


async def abort_early(client: Client, request_id: str) -> frozenset[str]:
    """Leave at any moment: while the request waits, is tokenized, or computes its prompt."""
    url = urlsplit(str(client.http.base_url))
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    body = json.dumps(client.chat(200, stream=client.random.random() < 0.5)).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", f"host: {url.netloc}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in client.headers(request_id).items()]
    writer.write("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body)
    await writer.drain()
    await asyncio.sleep(client.random.random() * 0.3)
    writer.transport.abort()
    return _ABORTED


async def tools(client: Client, request_id: str) -> frozenset[str]:
    choice = client.random.choice(("auto", "required"))
    answer = await client.post(request_id, client.chat(tools=[_TOOL], tool_choice=choice, max_tokens=60))
    _check(answer, 200)
    if choice == "required" and answer.json()["choices"][0]["finish_reason"] == "tool_calls":
        call = answer.json()["choices"][0]["message"]["tool_calls"][0]
        json.loads(call["function"]["arguments"])
    return _FINISHED


async def schema(client: Client, request_id: str) -> frozenset[str]:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
    answer = await client.post(request_id, client.chat(response_format=form, max_tokens=80))
    _check(answer, 200)
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) != {"name", "age"}:
        raise SoakFailed(f"not of the schema: {choice}")
    return _FINISHED


async def long_prompt(client: Client, request_id: str) -> frozenset[str]:
    _check(await client.post(request_id, client.chat(600, max_tokens=8)), 200)
    return _FINISHED


async def bad(client: Client, request_id: str) -> frozenset[str]:
    """What must be refused, each for its reason."""
    path, body, headers, status, code = client.random.choice(_BAD)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {**client.headers(request_id), "content-type": "application/json", **headers}
    _check(await client.http.post(path, content=content, headers=fields), status)
    return frozenset({code})


async def cancelled_by_operator(client: Client, request_id: str) -> frozenset[str]:
    """Ask for much, and let an operator cancel it."""
    asking = asyncio.create_task(client.post(request_id, client.chat(max_tokens=400, ignore_eos=True)))
    await asyncio.sleep(client.random.random() * 0.5)
    admin = {"authorization": f"Bearer {client.admin_key}"}
    order = await client.http.post(f"/admin/requests/{request_id}/cancel", headers=admin)
    answer = await asking
    if (answer.status_code == 410) != (order.status_code == 200) or answer.status_code not in (200, 410):
        raise SoakFailed(f"cancelling answered {order.status_code}, the request {answer.status_code}")
    return frozenset({"request_cancelled"}) if answer.status_code == 410 else _FINISHED


_CHAT = "/v1/chat/completions"
_HI = [{"role": "user", "content": "hi"}]
_BAD: tuple[tuple[str, object, Mapping[str, str], int, str], ...] = (
    (_CHAT, {"messages": _HI, "model": "nobody"}, {}, 404, "model_not_found"),
    (_CHAT, {"messages": _HI, "temperature": "hot"}, {}, 400, "invalid_value"),
    (_CHAT, b'{"messages": [', {}, 400, "invalid_value"),
    (_CHAT, b"[" * 100_000, {}, 400, "invalid_value"),
    (_CHAT, {"messages": _HI}, {"authorization": "Bearer wrong"}, 401, "invalid_api_key"),
    (_CHAT, {"messages": _HI}, {"content-type": "text/plain"}, 415, "unsupported_media_type"),
    (_CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}, {}, 400, "context_length_exceeded"),
    (_CHAT, {"messages": _HI, "guided_regex": "("}, {}, 400, "invalid_value"),
    ("/v1/nothing", {}, {}, 404, "not_found"),
    ("/admin/slots", {}, {}, 405, "method_not_allowed"),
)

KINDS: tuple[tuple[Kind, int], ...] = (
    (stream, 5),
    (whole, 3),
    (completion, 1),
    (abort_stream, 3),
    (abort_early, 2),
    (tools, 2),
    (schema, 2),
    (long_prompt, 1),
    (bad, 4),
    (cancelled_by_operator, 1),
)
"""Every kind of request, and how often it comes beside the others."""


async def _read_stream(client: Client, request_id: str, body: object, most: int | None = None) -> list[str]:
    """The lines of a stream, at most the first ``most``; then the connection is closed."""
    lines: list[str] = []
    async with client.http.stream("POST", _CHAT, json=body, headers=client.headers(request_id)) as answer:
        if answer.status_code != 200:
            raise SoakFailed(f"a stream was answered {answer.status_code}: {await answer.aread()!r}")
        async for line in answer.aiter_lines():
            if line:
                lines.append(line)
            if most is not None and len(lines) >= most:
                break
    return lines


def _check(answer: httpx.Response, status: int) -> None:
    if answer.status_code != status:
        raise SoakFailed(f"answered {answer.status_code} instead of {status}: {answer.text[:300]}")
