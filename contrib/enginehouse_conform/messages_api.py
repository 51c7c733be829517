"""M01 to M15: Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from enginehouse.cli.target import Answer, Target
from enginehouse_conform.check import Check, CheckFailed, NotOffered, require
from enginehouse_conform.events import LAMP_SCHEMA, fits_lamp, read_named
from enginehouse_conform.reading import answered, offered

__all__ = ["CHECKS"]

_VERSION = {"anthropic-version": "2023-06-01"}
_REASONS = (
    *("end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal"),
    "model_context_window_exceeded",
)
_DELTAS = {
    "text": {"text_delta": "text", "citations_delta": "citation"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
_LAMP = {"name": "set_lamp", "description": "Switch the lamp.", "input_schema": LAMP_SCHEMA}
_ASK = {"role": "user", "content": "Say something about the sea."}
_FORCED = {"tools": [_LAMP], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200}


def _send(
    target: Target, path: str, data: dict[str, Any] | bytes | None = None, method: str = "POST", **headers: str
) -> Answer:
    body = json.dumps(data).encode() if isinstance(data, dict) else data
    keyed = {} if target.key is None else {"x-api-key": target.key}
    sent = {**_VERSION, **keyed, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return target.send(method, target.root + path, body, sent, has_key=False)


def _create(target: Target, **fields: Any) -> Answer:
    body = {"model": target.model, "messages": [_ASK], "temperature": 0, "max_tokens": 16, **fields}
    return _send(target, "/messages", {name: value for name, value in body.items() if value is not ...})


def _stream(target: Target, **fields: Any) -> list[dict[str, Any]]:
    return read_named(_create(target, stream=True, **fields), ends_with_done=False)


def _text(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def _total(usage: dict[str, Any]) -> int:
    cached = (usage.get(f"cache_{kind}_input_tokens") or 0 for kind in ("creation", "read"))
    return int(usage["input_tokens"]) + sum(cached)


def _shape(message: dict[str, Any]) -> None:
    missing = [
        name
        for name in ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")
        if name not in message
    ]
    require(not missing, f"a message lacks {', '.join(missing)}")
    require(message["type"] == "message", f"a message is a {message['type']!r}")
    require(message["role"] == "assistant", f"a message has the role {message['role']!r}")
    require(str(message["id"]).startswith("msg_"), f"the id {message['id']!r} does not begin with 'msg_'")
    for name in ("input_tokens", "output_tokens"):
        require(isinstance(message["usage"].get(name), int), f"usage has no {name}")


def _whole(target: Target) -> None:
    message = answered(_create(target))
    _shape(message)
    require(message["stop_reason"] in _REASONS, f"the stop_reason is {message['stop_reason']!r}")
    require(message["content"], "a message has no content")


def _lifecycle(target: Target) -> None:
    events = _stream(target)
    kinds = [event["type"] for event in events]
    require(kinds[0] == "message_start" and kinds.count("message_start") == 1, f"a stream begins with {kinds[:2]}")
    require(kinds[-2:] == ["message_delta", "message_stop"], f"a stream ends with {kinds[-2:]}")
    message = events[0]["message"]
    _shape(message)
    require(message["content"] == [] and message["stop_reason"] is None, "message_start has content or a stop_reason")
    last = events[-2]
    require(last["delta"]["stop_reason"] in _REASONS, f"the stop_reason is {last['delta']['stop_reason']!r}")
    require(last["usage"]["output_tokens"] > 0, "message_delta counts no output tokens")


def _block_order(target: Target) -> None:
    _blocks(_stream(target))


def _blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Require contiguous indexes, and blocks one after the other. Return the blocks that the deltas build up."""
    blocks: list[dict[str, Any]] = []
    texts: dict[str, str] | None = None
    for event in events:
        kind = event["type"]
        if not kind.startswith("content_block"):
            require(texts is None, f"{kind} comes while a block is open")
            continue
        index = event["index"]
        if kind == "content_block_start":
            require(texts is None, "a block starts while another one is open")
            require(index == len(blocks), f"block {len(blocks)} has the index {index}")
            blocks.append(dict(event["content_block"]))
            require(blocks[-1].get("input", {}) == {}, "a tool_use starts with an input that is not {}")
            texts = {}
            continue
        require(texts is not None and index == len(blocks) - 1, f"{kind} has the index {index} of no open block")
        texts = texts or {}
        if kind == "content_block_delta":
            delta = event["delta"]
            known = _DELTAS.get(blocks[-1]["type"], {})
            require(delta["type"] in known, f"a block of the type {blocks[-1]['type']!r} has a {delta['type']!r}")
            name = known[delta["type"]]
            texts[name] = texts.get(name, "") + str(delta[name])
        else:
            _fill(blocks[-1], texts)
            texts = None
    require(texts is None, "the stream ends with an open block")
    return blocks


def _fill(block: dict[str, Any], texts: dict[str, str]) -> None:
    if block["type"] == "tool_use":
        text = texts.get("partial_json", "")
        try:
            block["input"] = json.loads(text or "{}")
        except ValueError as error:
            raise CheckFailed(f"the parts of an input do not join to JSON: {text!r}") from error
    else:
        block.update({name: block.get(name, "") + text for name, text in texts.items() if name != "citation"})


def _same(target: Target) -> None:
    whole, events = answered(_create(target)), _stream(target)
    streamed = {"content": _blocks(events)}
    require(_text(whole) == _text(streamed), f"{_text(whole)!r} whole and {_text(streamed)!r} streamed")
    kinds = [[block["type"] for block in one["content"]] for one in (whole, streamed)]
    require(kinds[0] == kinds[1], f"the blocks are {kinds[0]} whole and {kinds[1]} streamed")
    reason = events[-2]["delta"]["stop_reason"]
    require(whole["stop_reason"] == reason, f"ends with {whole['stop_reason']!r} whole and {reason!r} streamed")
    count = events[-2]["usage"]["output_tokens"]
    require(whole["usage"]["output_tokens"] == count, "whole and streamed count otherwise")


def _limits(target: Target) -> None:
    message = answered(_create(target, max_tokens=4))
    count = message["usage"]["output_tokens"]
    require(0 < count <= 4, f"max_tokens 4 made {count} tokens")
    require(count < 4 or message["stop_reason"] in ("max_tokens", "end_turn"), f"ends with {message['stop_reason']!r}")


def _stops(target: Target) -> None:
    text = _text(answered(_create(target, max_tokens=24)))
    stop = text[len(text) // 2 :][:3]
    if not stop.strip():
        raise NotOffered("the model's answer is too short to stop in it")
    message = answered(_create(target, max_tokens=24, stop_sequences=["\u2603\u2603", stop]))
    require(message["stop_reason"] == "stop_sequence", f"a stop sequence ends with {message['stop_reason']!r}")
    require(message["stop_sequence"] == stop, f"stop_sequence is {message['stop_sequence']!r}, not {stop!r}")
    require(stop not in _text(message), "the stop sequence is in the text")


def _calls(target: Target) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "set_lamp"}):
        fields = {**_FORCED, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        message = offered(_create(target, **fields), f"tool_choice {choice['type']!r}")
        events = _stream(target, **fields)
        for content, reason in (
            (message["content"], message["stop_reason"]),
            (_blocks(events), events[-2]["delta"]["stop_reason"]),
        ):
            calls = [block for block in content if block["type"] == "tool_use"]
            require(len(calls) == 1, f"tool_choice {choice['type']!r} gives {len(calls)} calls for one")
            require(calls[0]["name"] == "set_lamp" and calls[0]["id"], f"a call of {calls[0]['name']!r}")
            require(isinstance(calls[0]["input"], dict), "the input of a call is not an object")
            fits_lamp(calls[0]["input"])
            require(reason == "tool_use", f"a message with a call ends with {reason!r}")
            empty = [block for block in content if block["type"] == "text" and not block["text"]]
            require(not empty, "an empty text block is beside the call")


def _history(target: Target) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "set_lamp", "input": {"on": True, "level": 5}}

    def length(content: Any) -> int:
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        turns = [_ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        return _total(answered(_create(target, messages=turns, tools=[_LAMP]), "the result of a call")["usage"])

    text = "five and a half " * 20
    plain, parts = length(text), length([{"type": "text", "text": text}])
    require(plain > length("5") + 20, "the result of a call is not in the prompt")
    require(plain == parts, f"a result has {plain} tokens as text and {parts} as a block")


def _turns(target: Target) -> None:
    thought = {"type": "thinking", "thinking": "It is calm.", "signature": "bm90IHlvdXJz"}
    said = {"type": "text", "text": "It is calm."}
    again = {"role": "user", "content": "And now?"}
    for what, messages in (
        ("a turn of the role 'system'", [_ASK, {"role": "system", "content": "Be brief."}]),
        ("two turns of the user", [_ASK, again]),
        ("thinking with a foreign signature", [_ASK, {"role": "assistant", "content": [thought, said]}, again]),
        (
            "redacted thinking",
            [_ASK, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "YQ=="}, said]}, again],
        ),
    ):
        answered(_create(target, messages=messages), what)
    for what, fields in (
        (
            "a system prompt in blocks",
            {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        ),
        ("metadata", {"metadata": {"user_id": "u"}}),
        ("max_tokens of 10,000,000, cut short by a client", {"max_tokens": 10_000_000, "stop_sequences": ["e", " "]}),
    ):
        answered(_create(target, **fields), what)


def _silent(target: Target) -> None:
    kinds = [block["type"] for block in answered(_create(target, max_tokens=40))["content"]]
    require("thinking" not in kinds, "a request without 'thinking' is answered with a thinking block")


def _count(target: Target) -> None:
    counts = []
    for content in ("Hi", "Tell me of storms. " * 30):
        body = {"model": target.model, "messages": [{"role": "user", "content": content}], "system": "Be brief."}
        counted = offered(_send(target, "/messages/count_tokens", body), "count_tokens")["input_tokens"]
        used = _total(answered(_create(target, **body))["usage"])
        require(counted == used, f"{counted} tokens are counted, and {used} used")
        counts.append(counted)
    require(counts[1] > counts[0] + 60, f"a long prompt counts {counts[1]} tokens, a short one {counts[0]}")


def _refused(answer: Answer, what: str, status: int = 400, kind: str = "invalid_request_error") -> None:
    require(answer.status == status, f"{what} was answered with {answer.shown()}")
    data = answer.json()
    is_error = isinstance(data, dict) and data.get("type") == "error" and isinstance(data.get("error"), dict)
    require(is_error, f"{what}: the body is not an error of this API: {answer.shown()}")
    require(data["error"].get("type") == kind, f"{what}: the error has the type {data['error'].get('type')!r}")
    require(data["error"].get("message"), f"{what}: the error has no message")


def _errors(target: Target) -> None:
    for what, fields in (
        ("no messages", {"messages": ...}),
        ("no max_tokens", {"max_tokens": ...}),
        ("a block of an unknown type", {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}),
        ("temperature 'hot'", {"temperature": "hot"}),
        ("temperature 'hot', streamed", {"temperature": "hot", "stream": True}),
        ("a choice of a tool that is not there", {"tools": [_LAMP], "tool_choice": {"type": "tool", "name": "x"}}),
    ):
        _refused(_create(target, **fields), what)
    _refused(_send(target, "/messages", b'{"model":'), "a cut body")
    _refused(_create(target, model="no-such-model"), "an unknown model", 404, "not_found_error")


def _clients(target: Target) -> None:
    body = {"model": target.model, "messages": [_ASK], "max_tokens": 2}
    answered(_send(target, "/messages?beta=true", body, anthropic_beta="a-2025-01-01,b"), "the query beta=true")
    if target.key is not None:
        keyed = json.dumps(body).encode()
        answered(target.send("POST", f"{target.root}/messages", keyed, _VERSION), "a key in Authorization")
        wrong = {**_VERSION, "x-api-key": "wrong"}
        answer = target.send("POST", f"{target.root}/messages", keyed, wrong, has_key=False)
        _refused(answer, "a wrong key", 401, "authentication_error")


def _models(target: Target) -> None:
    data = answered(_send(target, "/models", method="GET"))
    require({"data", "has_more", "first_id", "last_id"} <= set(data), "the list of models has not this API's shape")
    one = answered(_send(target, f"/models/{quote(target.model)}", method="GET"), "one model")
    for entry in [*data["data"], one]:
        require(entry.get("type") == "model", f"an entry is a {entry.get('type')!r}")
        wrong = [name for name in ("id", "display_name", "created_at") if not isinstance(entry.get(name), str)]
        require(not wrong, f"an entry lacks {', '.join(wrong)}")
        require("T" in entry["created_at"], f"created_at {entry['created_at']!r} is not a time as in RFC 3339")


def _nonce(target: Target) -> None:
    rules = "You are a coding agent. You and the user share a workspace. " * 20

    def cached(nonce: str) -> int:
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"}
        system = [header, {"type": "text", "text": rules}]
        return int(answered(_create(target, system=system))["usage"].get("cache_read_input_tokens") or 0)

    cached("aaaaa")
    if not cached("aaaaa"):
        raise NotOffered("the server reports no cached tokens for a repeated prompt")
    require(cached("bbbbb") > 0, "the billing block, another one in each request, keeps prompts from the cache")


def _format(target: Target) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    message = offered(_create(target, output_config={"format": form}, max_tokens=200), "output_config.format")
    if message["stop_reason"] == "end_turn":
        value = json.loads(_text(message))
        require(set(value) == {"ok"} and isinstance(value["ok"], bool), f"the text does not fit its schema: {value}")


CHECKS = (
    Check("M01", "A message has every member of its type.", _whole),
    Check("M02", "A stream has message_start once and first, and message_delta and message_stop last.", _lifecycle),
    Check("M03", "Blocks come one after the other, with contiguous indexes and deltas of their type.", _block_order),
    Check("M04", "Streamed and whole messages say the same and count the same.", _same),
    Check("M05", "max_tokens limits the message.", _limits),
    Check("M05", "A stop sequence ends the message, which names it.", _stops),
    Check("M06", "A required or named call is made in one block, and its input fits its schema.", _calls),
    Check("M07", "Results of calls are read, as text and in blocks.", _history),
    Check("M08", "Turns and fields as Claude Code sends them are accepted.", _turns),
    Check("M09", "A model does not think unless it is asked to.", _silent),
    Check("M10", "count_tokens counts what a message uses.", _count),
    Check("M11", "Malformed requests are refused with an error of this API before anything is streamed.", _errors),
    Check("M12", "Keys in both headers, beta headers and the query beta=true are accepted.", _clients),
    Check("M13", "The list of models and a single model have this API's form.", _models),
    Check("M14", "A billing block that changes does not keep prompts from the cache.", _nonce),
    Check("M15", "output_config.format holds.", _format),
)
