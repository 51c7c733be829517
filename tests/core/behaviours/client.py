"""A small, strict client: it accepts no framing that the contract does not promise."""

import json
import time
from typing import Any

import httpx
from attrs import define, frozen


@frozen
class Stream:
    """A streamed answer. ``events`` are the JSON objects between the first byte and ``[DONE]``."""

    response: httpx.Response
    body: bytes
    events: list[dict[str, Any]]
    first_byte_s: float
    total_s: float

    def text(self, index: int = 0) -> str:
        return "".join(
            choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            for choice in self.choices(index)
        )

    def choices(self, index: int | None = None) -> list[dict[str, Any]]:
        found = [choice for event in self.events for choice in event["choices"]]
        return found if index is None else [choice for choice in found if choice["index"] == index]

    def finish_reason(self, index: int = 0) -> str | None:
        reasons = [choice["finish_reason"] for choice in self.choices(index) if choice["finish_reason"]]
        assert len(reasons) == 1, f"choice {index} has the finish reasons {reasons}"
        return reasons[0]

    def logprobs(self, index: int = 0) -> list[dict[str, Any]]:
        parts = [choice["logprobs"] for choice in self.choices(index) if choice.get("logprobs")]
        return [entry for part in parts for entry in part["content"]]

    @property
    def usage(self) -> dict[str, Any] | None:
        return next((event["usage"] for event in self.events if event.get("usage")), None)


@define
class Server:
    """A running server and one of its models.

    Log-probabilities of one token may differ by ``rounding`` between two batches.
    """

    client: httpx.Client
    model: str
    rounding: float = 0.05

    @classmethod
    def connect(cls, url: str, model: str, key: str | None = None) -> "Server":
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return cls(httpx.Client(base_url=url, timeout=600, headers=headers), model)

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    def wait_ready(self, timeout_s: float = 120) -> "Server":
        deadline = time.monotonic() + timeout_s
        while (response := self.client.get("/health")).status_code != 200:
            assert time.monotonic() < deadline, f"not ready: {response.text}"
            time.sleep(0.05)
        return self

    def chat_body(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Say something."}]
        return {"model": self.model, "messages": messages, "temperature": 0, **fields}

    def completion_body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": "Once upon a time", "temperature": 0, **fields}

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def chat(self, **fields: Any) -> dict[str, Any]:
        """A chat that must be answered."""
        return answered(self.post("/v1/chat/completions", self.chat_body(**fields)))

    def complete(self, **fields: Any) -> dict[str, Any]:
        return answered(self.post("/v1/completions", self.completion_body(**fields)))

    def try_chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", self.chat_body(**fields))

    def try_complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", self.completion_body(**fields))

    def stream_chat(self, **fields: Any) -> Stream:
        return self.stream("/v1/chat/completions", self.chat_body(stream=True, **fields))

    def stream_complete(self, **fields: Any) -> Stream:
        return self.stream("/v1/completions", self.completion_body(stream=True, **fields))

    def stream(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Stream:
        began, first_byte_s, chunks = time.perf_counter(), 0.0, []
        with self.client.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200, response.read()
            for chunk in response.iter_raw():
                first_byte_s = first_byte_s or time.perf_counter() - began
                chunks.append(chunk)
        data = b"".join(chunks)
        return Stream(response, data, read_events(data), first_byte_s, time.perf_counter() - began)

    def check_alive(self) -> None:
        """A plain short request is answered right now."""
        answer = self.chat(max_tokens=4)
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def answered(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/json")
    return response.json()


def read_events(data: bytes) -> list[dict[str, Any]]:
    """The events of a body: ``data: <one line of JSON>`` and a blank line each, comments, ``[DONE]`` last."""
    text = data.decode("utf-8")
    assert text.endswith("\n\n"), text[-100:]
    blocks = text.removesuffix("\n\n").split("\n\n")
    events = []
    for block in blocks:
        assert "\n" not in block, f"more than one line in {block!r}"
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        events.append(block.removeprefix("data: "))
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1, events[-1]
    return [json.loads(event) for event in events[:-1]]


def check_client_error(response: httpx.Response, param: str | None = None, status: int = 400) -> dict[str, Any]:
    """The response is a refusal in OpenAI's form; returns the error object."""
    assert response.status_code == status, f"{response.status_code}: {response.text}"
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    if param is not None:
        assert error["param"] is not None and error["param"].startswith(param), error
    return error
