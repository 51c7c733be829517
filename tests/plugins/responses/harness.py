"""Scripted answers, the documents that judge responses, and a reader of streams."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx
import jsonschema
import pytest
from attrs import frozen

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'


APPLY_PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The grammar of Codex's tool of this name."""
PATCH = '*** Begin Patch\n*** Add File: a.py\n+print("ü")\n*** End Patch\n'


def call_text(name: str, **arguments: Any) -> str:
    """A call as a model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def in_pieces(text: str, size: int = 3) -> list[dict[str, Any]]:
    """Tokens of a script: parts of ``size`` bytes."""
    data = text.encode()
    return [{"bytes": list(data[start : start + size])} for start in range(0, len(data), size)]


# -- the judge ---------------------------------------------------------------------------------------

_DOCUMENT = "openresponses/openapi/2026-04-24.json"
_OURS = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}
"""OpenAI's names of events to those of Open Responses, where they differ."""
_NOT_THEIRS = ("custom_tool_call",)


@functools.cache
def _document() -> dict[str, Any]:
    """Open Responses' OpenAPI document, from the package's files: it is not imported."""
    try:
        files = importlib.metadata.files("openresponses-py") or ()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("openresponses-py is not installed")
    (file,) = (file for file in files if str(file) == _DOCUMENT)
    document: dict[str, Any] = json.loads(file.read_text())
    schemas = document["components"]["schemas"]
    # The document was generated without the type of a schema, which may only be null there.
    schemas["JsonSchemaResponseFormat"]["properties"]["schema"] = {}
    # What OpenAI's API has besides.
    for name, kinds in (("ItemField", ["custom_tool_call"]), ("Tool", ["custom", "namespace"])):
        schemas[name]["oneOf"].append({"type": "object", "properties": {"type": {"enum": kinds}}, "required": ["type"]})
    return document


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    document = _document()
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    )


@functools.cache
def _event_schemas() -> Mapping[str, str]:
    named = {}
    for name, schema in _document()["components"]["schemas"].items():
        if name.endswith("StreamingEvent"):
            named[schema["properties"]["type"]["enum"][0]] = name
    return named


def check_response(response: Mapping[str, Any]) -> None:
    """Check a whole response."""
    _validator("ResponseResource").validate(response)


def check_events(events: Iterable[Mapping[str, Any]]) -> None:
    """Check each event of a stream."""
    for event in events:
        kind = _OURS.get(event["type"], event["type"])
        if kind.startswith("response.custom_tool_call"):
            continue  # the document has no custom tools
        _validator(_event_schemas()[kind]).validate({**event, "type": kind})


# -- streams -----------------------------------------------------------------------------------------


@frozen
class Stream:
    """A stream that was read to its end."""

    events: Sequence[dict[str, Any]]
    is_done: bool
    headers: httpx.Headers

    @property
    def types(self) -> list[str]:
        """The types of the events, without ``response.``."""
        return [event["type"].removeprefix("response.") for event in self.events]

    @property
    def last(self) -> dict[str, Any]:
        """The response of the last event."""
        response: dict[str, Any] = self.events[-1]["response"]
        return response


def read_events(lines: Iterable[str]) -> tuple[list[dict[str, Any]], bool]:
    """Read the lines of a stream; returns the events, and whether ``[DONE]`` came at the end."""
    events: list[dict[str, Any]] = []
    named, is_done = None, False
    for line in lines:
        assert not (line and is_done), "nothing follows [DONE]"
        if line.startswith("event: "):
            named = line.removeprefix("event: ")
        elif line == "data: [DONE]":
            is_done = True
        elif line.startswith("data: "):
            events.append(json.loads(line.removeprefix("data: ")))
            assert named == events[-1]["type"]
            named = None
    return events, is_done


def accumulated(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The output items that a stream builds up by its deltas alone, with the statuses of their ends."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        elif "output_index" in event:
            item = items[event["output_index"]]
            assert event.get("item_id", item["id"]) == item["id"]
            _apply(kind, event, item)
    return items


def _apply(kind: str, event: Mapping[str, Any], item: dict[str, Any]) -> None:
    if kind == "content_part.added":
        assert event["content_index"] == len(item["content"])
        item["content"].append(json.loads(json.dumps(event["part"])))
    elif kind in ("output_text.delta", "reasoning_text.delta"):
        part = item["content"][event["content_index"]]
        part["text"] += event["delta"]
        if "logprobs" in event:
            part["logprobs"] += event["logprobs"]
    elif kind in ("output_text.done", "reasoning_text.done"):
        assert event["text"] == item["content"][event["content_index"]]["text"]
    elif kind == "content_part.done":
        assert event["part"] == item["content"][event["content_index"]]
    elif kind == "function_call_arguments.delta":
        item["arguments"] += event["delta"]
    elif kind == "function_call_arguments.done":
        assert event["arguments"] == item["arguments"]
    elif kind == "custom_tool_call_input.delta":
        item["input"] += event["delta"]
    elif kind == "custom_tool_call_input.done":
        assert event["input"] == item["input"]
    else:
        assert kind == "output_item.done"
        item["status"] = event["item"]["status"]
        if "encrypted_content" in event["item"]:
            item["encrypted_content"] = event["item"]["encrypted_content"]
        assert event["item"] == item


# -- requests ----------------------------------------------------------------------------------------


@frozen
class Client:
    """Requests to one server, whose responses and events are all checked."""

    http: httpx.Client

    def create(self, model: str, input: Any = "hi", **fields: Any) -> dict[str, Any]:
        """A whole response."""
        answer = self.http.post("/v1/responses", json={"model": model, "input": input, **fields})
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        check_response(response)
        return response

    def stream(self, model: str, input: Any = "hi", **fields: Any) -> Stream:
        """A streamed response, checked for what holds for every one."""
        body = {"model": model, "input": input, "stream": True, **fields}
        with self.http.stream("POST", "/v1/responses", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            events, is_done = read_events(answer.iter_lines())
        check_stream(events)
        return Stream(events, is_done, answer.headers)

    def refused(self, model: str, input: Any = "hi", status: int = 400, **fields: Any) -> dict[str, Any]:
        """The error of a refused request."""
        answer = self.http.post("/v1/responses", json={"model": model, "input": input, **fields})
        assert answer.status_code == status, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error


def check_stream(events: Sequence[dict[str, Any]]) -> None:
    """Check numbers, schemas, and that what the deltas build up is the final response."""
    check_events(events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[:2]:
        assert event["response"]["output"] == [] and event["response"]["status"] == "in_progress"
    last = events[-1]["response"]
    end = "incomplete" if last["status"] == "cancelled" else last["status"]  # the API has no event of its own
    assert events[-1]["type"] == f"response.{end}"
    assert accumulated(events) == last["output"]
    lasting = [
        name
        for name in last
        if name not in ("completed_at", "error", "incomplete_details", "output", "status", "usage")
    ]
    for event in events[:2]:
        assert all(event["response"][name] == last[name] for name in lasting if name != "enginehouse")
