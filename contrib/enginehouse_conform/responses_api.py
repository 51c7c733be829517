"""R01 to R14: OpenAI's Responses API."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from enginehouse.cli.target import Answer, Target
from enginehouse_conform.check import Check, NotOffered, require
from enginehouse_conform.events import LAMP_SCHEMA, fits_lamp, read_named
from enginehouse_conform.reading import answered, offered, refused

__all__ = ["CHECKS"]

_MEMBERS = (
    *("id", "object", "created_at", "completed_at", "status", "error", "incomplete_details", "instructions", "model"),
    *("output", "parallel_tool_calls", "temperature", "top_p", "tool_choice", "tools", "previous_response_id"),
    *("reasoning", "text", "truncation", "top_logprobs", "max_output_tokens", "max_tool_calls", "metadata"),
    *("safety_identifier", "prompt_cache_key", "service_tier", "store", "background", "usage"),
    *("presence_penalty", "frequency_penalty"),
)
_ENDS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
_TEXT_OF_DONE = {
    "output_text": "text",
    "reasoning_text": "text",
    "reasoning": "text",
    "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
}
_LAMP = {"type": "function", "name": "set_lamp", "description": "Switch the lamp.", "parameters": LAMP_SCHEMA}
_FORCED = {"tools": [_LAMP], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
_ASK = "Say something about the sea."


def _create(target: Target, **fields: Any) -> Answer:
    body = {"model": target.model, "input": _ASK, "temperature": 0, "max_output_tokens": 16, **fields}
    return target.post("/responses", {name: value for name, value in body.items() if value is not ...})


def _stream(target: Target, **fields: Any) -> list[dict[str, Any]]:
    return read_named(_create(target, stream=True, **fields), ends_with_done=True)


def _text(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part.get("text", "") for part in parts)


def _items(response: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return what is equal in two responses to one request."""
    names = ("type", "status", "role", "name", "arguments", "input", "content")
    return [tuple(json.dumps(item.get(name)) for name in names) for item in response["output"]]


def _shape(response: dict[str, Any]) -> None:
    missing = [name for name in _MEMBERS if name not in response]
    require(not missing, f"a response lacks {', '.join(missing)}")
    require(response["object"] == "response", f"a response is a {response['object']!r}")
    require(str(response["id"]).startswith("resp_"), f"the id {response['id']!r} does not begin with 'resp_'")
    require(isinstance(response["created_at"], int | float), "created_at is not a number")
    ids = [item["id"] for item in response["output"]]
    require(len(set(ids)) == len(ids) and all(ids), "items of a response have no ids of their own")
    for item in response["output"]:
        if item["type"] == "message":
            require(item["role"] == "assistant", f"a message has the role {item['role']!r}")
            kinds = {part["type"] for part in item["content"]}
            require(kinds <= {"output_text", "refusal"}, f"a message has the parts {sorted(kinds)}")


def _whole(target: Target) -> None:
    response = answered(_create(target))
    _shape(response)
    require(response["status"] in ("completed", "incomplete"), f"the status is {response['status']!r}")
    require(response["output"], "a response has no output")


def _lifecycle(target: Target) -> None:
    events = _stream(target)
    numbers = [event.get("sequence_number") for event in events]
    require(numbers == list(range(len(events))), f"sequence numbers are {numbers[:6]} ...")
    kinds = [event["type"] for event in events]
    first = ["response.created", "response.in_progress"]
    started = [kind for kind in kinds[:3] if kind != "response.queued"]
    require(started[:2] == first, f"a stream begins with {kinds[:2]}")
    ends = [place for place, kind in enumerate(kinds) if kind in _ENDS]
    require(ends == [len(events) - 1], f"a stream ends with {kinds[-1]!r}")
    whole = [event["response"] for event in events if "response" in event]
    for response in whole:
        _shape(response)
        require(response["id"] == whole[0]["id"], "the id of a response changes in its stream")
    for response in whole[:2]:
        require(response["output"] == [], f"{response['status']}: output is not empty at the beginning")
        require(
            response["status"] in ("in_progress", "queued"), f"the status at the beginning is {response['status']!r}"
        )
    require(whole[-1]["status"] == _ENDS[kinds[-1]], f"{kinds[-1]} has the status {whole[-1]['status']!r}")
    require(isinstance(whole[-1]["usage"], dict), "the last event has no usage")


def _item_order(target: Target) -> None:
    _check_items(_stream(target))


def _check_items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Require items one after the other, and that the final response has the same ones. Return them."""
    done: list[dict[str, Any]] = []
    current: dict[str, Any] | None = None
    texts: dict[tuple[str, int], str] = {}
    num_parts = 0
    for event in events:
        kind = event["type"].removeprefix("response.")
        if "output_index" not in event:
            require(current is None or kind not in ("completed", "incomplete"), "a response ends with an open item")
            continue
        require(event["output_index"] == len(done), f"{kind} has the output_index {event['output_index']}")
        if kind == "output_item.added":
            require(current is None, "an item is added while another one is open")
            current, num_parts, texts = event["item"], 0, {}
            continue
        if current is None:
            require(False, f"{kind} comes before its item is added")
            continue
        item_id = event["item"]["id"] if kind == "output_item.done" else event["item_id"]
        require(item_id == current["id"], f"{kind} is of {item_id!r}, not of {current['id']!r}")
        stem, _, what = kind.rpartition(".")
        if kind == "output_item.done":
            same = all(event["item"].get(name) == current.get(name) for name in ("type", "call_id", "name"))
            require(same, "type, call_id or name of an item change in its stream")
            _check_texts(event["item"], texts)
            done.append(event["item"])
            current = None
        elif kind == "content_part.added":
            require(event["content_index"] == num_parts, f"a part has the content_index {event['content_index']}")
            num_parts += 1
        elif what == "delta":
            place = event.get("content_index", 0)
            is_known = "content_index" not in event or place < num_parts
            require(is_known, f"{kind} has the content_index {place}, but no such part was added")
            texts[stem, place] = texts.get((stem, place), "") + event["delta"]
        elif what == "done" and stem in _TEXT_OF_DONE:
            text = event[_TEXT_OF_DONE[stem]]
            joined = texts.setdefault((stem, event.get("content_index", 0)), "")
            require(text == joined, f"{kind} has {text!r}, and its deltas {joined!r}")
    final = events[-1]["response"]["output"]
    require(final == done, "the items of the final response are not those of the stream")
    return done


def _check_texts(item: dict[str, Any], texts: dict[tuple[str, int], str]) -> None:
    for (stem, place), text in texts.items():
        if stem == "output_text":
            require(item["content"][place]["text"] == text, "a message is not the text of its deltas")
        elif stem in ("function_call_arguments", "custom_tool_call_input"):
            require(item[_TEXT_OF_DONE[stem]] == text, "a call is not the text of its deltas")


def _same(target: Target) -> None:
    whole, streamed = answered(_create(target)), _stream(target)[-1]["response"]
    require(_items(whole) == _items(streamed), f"{_text(whole)!r} whole and {_text(streamed)!r} streamed")
    require(whole["status"] == streamed["status"], f"{whole['status']} whole and {streamed['status']} streamed")
    counts = [(usage["input_tokens"], usage["output_tokens"]) for usage in (whole["usage"], streamed["usage"])]
    require(counts[0] == counts[1], f"{counts[0]} tokens whole and {counts[1]} streamed")


def _usage(target: Target) -> None:
    response = answered(_create(target, max_output_tokens=4))
    usage = response["usage"]
    require(
        usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], f"the counts do not add up: {usage}"
    )
    require(0 < usage["output_tokens"] <= 4, f"max_output_tokens 4 made {usage['output_tokens']} tokens")
    require(
        0 <= usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"], "cached tokens exceed the input"
    )
    require(
        usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"], "reasoning exceeds the output"
    )
    if response["status"] == "incomplete":
        reason = response["incomplete_details"]["reason"]
        require(reason == "max_output_tokens", f"a response that was cut has the reason {reason!r}")
    else:
        require(
            usage["output_tokens"] < 4 or response["status"] == "completed", f"the status is {response['status']!r}"
        )


def _count(target: Target) -> None:
    body = {"model": target.model, "input": _ASK, "instructions": "Answer in French."}
    counted = offered(target.post("/responses/input_tokens", body), "counting input tokens")
    used = answered(_create(target, instructions=body["instructions"]))["usage"]["input_tokens"]
    require(counted["input_tokens"] == used, f"{counted['input_tokens']} tokens are counted, and {used} used")


def _calls(target: Target) -> None:
    for choice in ("required", {"type": "function", "name": "set_lamp"}):
        fields = {**_FORCED, "tool_choice": choice}
        whole = offered(_create(target, **fields), f"tool_choice {choice!r}")
        for response in (whole, _last(_stream(target, **fields))):
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            require(calls, f"tool_choice {choice!r} gives no call: {_text(response)!r}")
            require(calls[0]["name"] == "set_lamp" and calls[0]["call_id"], f"a call of {calls[0]['name']!r}")
            require(isinstance(calls[0]["arguments"], str), "arguments are not a string")
            fits_lamp(calls[0]["arguments"])


def _last(events: list[dict[str, Any]]) -> dict[str, Any]:
    _check_items(events)
    response: dict[str, Any] = events[-1]["response"]
    return response


def _tools_of_codex(target: Target) -> None:
    namespace = {"type": "namespace", "name": "mcp__a", "description": "Files.", "tools": [_LAMP]}
    custom = {"type": "custom", "name": "patch", "description": "Edit files."}
    for tool in (namespace, custom, {"type": "web_search"}):
        answered(_create(target, tools=[_LAMP, tool]), f"a tool of the type {tool['type']!r}")


def _format(target: Target) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "name": "t", "strict": True, "schema": {**schema, "additionalProperties": False}}
    response = offered(_create(target, text={"format": form}, max_output_tokens=200), "text.format")
    if response["status"] == "completed":
        value = json.loads(_text(response))
        require(set(value) == {"ok"} and isinstance(value["ok"], bool), f"the text does not fit its schema: {value}")
    bad = {"type": "json_schema", "name": "t", "schema": {"type": "strnig"}}
    refused(_create(target, text={"format": bad}), "a schema of the type 'strnig'")


def _input(target: Target) -> None:
    forms: tuple[Any, ...] = (
        _ASK,
        [{"role": "user", "content": _ASK}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": _ASK}]}],
    )
    counts = [answered(_create(target, input=form), f"input {form!r}")["usage"]["input_tokens"] for form in forms]
    require(len(set(counts)) == 1, f"one text in three forms has {counts} tokens")
    call = {"type": "function_call", "call_id": "call_1", "name": "set_lamp", "arguments": '{"on":true,"level":5}'}

    def length(output: str) -> int:
        result = {"type": "function_call_output", "call_id": "call_1", "output": output}
        items = [{"role": "user", "content": "On."}, call, result, {"role": "user", "content": "And now?"}]
        return int(answered(_create(target, input=items, tools=[_LAMP]), "an earlier call")["usage"]["input_tokens"])

    require(length("five and a half " * 20) > length("5") + 20, "the output of a call is not in the prompt")


def _errors(target: Target) -> None:
    for what, fields in (
        ("no input", {"input": ...}),
        ("an item of an unknown type", {"input": [{"type": "hologram"}]}),
        ("temperature 'hot'", {"temperature": "hot"}),
        ("a choice of a tool that is not there", {"tools": [_LAMP], "tool_choice": {"type": "function", "name": "x"}}),
        ("temperature 'hot', streamed", {"temperature": "hot", "stream": True}),
    ):
        refused(_create(target, **fields), what)
    refused(target.send("POST", f"{target.root}/responses", b'{"model":'), "a cut body")
    answer = _create(target, model="no-such-model")
    require(answer.status == 404, f"an unknown model was answered with {answer.shown()}")
    require(isinstance((answer.json() or {}).get("error"), dict), "an unknown model: no error object")


def _unknown_ids(target: Target) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        answer = target.send(method, f"{target.root}/responses/resp_none{path}")
        require(answer.status == 404, f"{method} of an unknown response was answered with {answer.shown()}")
        require(
            isinstance((answer.json() or {}).get("error"), dict), f"{method} of an unknown response: no error object"
        )
    answer = _create(target, previous_response_id="resp_none")
    require(400 <= answer.status < 500, f"an unknown previous_response_id was answered with {answer.shown()}")


def _stored(target: Target) -> dict[str, Any]:
    response = answered(_create(target, store=True))
    if not response["store"]:
        raise NotOffered("the server stores no responses (store is false)")
    return response


def _kept(target: Target) -> None:
    whole = _stored(target)
    streamed = _stream(target, store=True)[-1]["response"]
    for response in (whole, streamed):
        path = f"/responses/{quote(response['id'])}"
        found = answered(target.get(path), "a stored response")
        require(found["id"] == response["id"] and found["output"] == response["output"], "a stored response differs")
        items = answered(target.get(f"{path}/input_items"), "its input items")["data"]
        require(
            len(items) == 1 and items[0]["role"] == "user", f"a response to one message has {len(items)} input items"
        )
        gone = answered(target.send("DELETE", target.root + path), "a DELETE")
        require(gone.get("deleted") is True, "a DELETE does not say that the response is deleted")
        require(target.get(path).status == 404, "a deleted response can be retrieved")


def _chain(target: Target) -> None:
    previous, counts = _stored(target), []
    for is_streamed in (False, True, False):
        fields = {"input": "Go on.", "previous_response_id": previous["id"], "store": True}
        previous = _stream(target, **fields)[-1]["response"] if is_streamed else answered(_create(target, **fields))
        counts.append(previous["usage"]["input_tokens"])
    require(counts[0] < counts[1] < counts[2], f"prompts of a chain have {counts} tokens: earlier turns are missing")


CHECKS = (
    Check("R01", "A response has every member of its type, ids and output.", _whole),
    Check(
        "R02",
        "Events are numbered, named by their type, and each beginning and end has the whole response.",
        _lifecycle,
    ),
    Check("R03", "Items come one after the other, and the final response has the same ones.", _item_order),
    Check("R04", "Streamed and whole responses say the same and count the same.", _same),
    Check("R05", "Counts add up, and a response that was cut says why.", _usage),
    Check("R06", "input_tokens counts what a response uses.", _count),
    Check("R07", "A required or named call is made, and its arguments fit their schema.", _calls),
    Check("R08", "Tools of other types, as Codex sends them, do not make a request fail.", _tools_of_codex),
    Check("R09", "text.format holds, and one that makes no sense is refused.", _format),
    Check("R10", "Texts, messages and earlier calls are accepted in every usual form, and read.", _input),
    Check("R11", "Malformed requests are refused with an error object before anything is streamed.", _errors),
    Check("R12", "Ids of responses that do not exist are client errors.", _unknown_ids),
    Check("R13", "Stored responses, streamed or not, can be retrieved and deleted.", _kept),
    Check("R14", "previous_response_id continues with all turns before it.", _chain),
)
