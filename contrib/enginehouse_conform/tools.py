"""H14 to H17: tools."""

from __future__ import annotations

import json
from typing import Any

from enginehouse.cli.target import Target
from enginehouse_conform.check import Check, CheckFailed, require
from enginehouse_conform.reading import answered, content_of, offered, read_stream, refused

__all__ = ["CHECKS"]

_LAMP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "description": "Switch the lamp.",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "level": {"type": "integer", "minimum": 0, "maximum": 10}},
            "required": ["on", "level"],
            "additionalProperties": False,
        },
    },
}
_NAMED = {"type": "function", "function": {"name": "set_lamp"}}
_MARKUP = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")


def _function(name: str | None = "set_lamp", **fields: Any) -> dict[str, Any]:
    function = {**({} if name is None else {"name": name}), **fields}
    return {"type": "function", "function": function}


def _check_arguments(text: Any) -> None:
    require(isinstance(text, str), f"arguments are not a string: {text!r}")
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise CheckFailed(f"arguments are not valid JSON: {text!r}") from error
    fits = (
        isinstance(arguments, dict)
        and set(arguments) == {"on", "level"}
        and isinstance(arguments["on"], bool)
        and isinstance(arguments["level"], int)
        and 0 <= arguments["level"] <= 10
    )
    require(fits, f"arguments do not fit their schema: {text}")


def _forced(target: Target) -> None:
    for choice in ("required", _NAMED):
        # One call only: a small model may continue calling until its tokens are used up.
        fields = {"tools": [_LAMP], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
        data = offered(target.chat(**fields), f"tool_choice {choice!r}")
        first = data["choices"][0]
        calls = first["message"].get("tool_calls") or []
        require(calls, f"tool_choice {choice!r} gives no call: {content_of(data)!r}")
        call = calls[0]
        require(call["type"] == "function" and call["id"], "a call has no id or another type")
        require(call["function"]["name"] == "set_lamp", f"a call of {call['function']['name']!r}")
        _check_arguments(call["function"]["arguments"])
        reasons = ("tool_calls", "stop") if choice is _NAMED else ("tool_calls",)
        require(first["finish_reason"] in reasons, f"tool_choice {choice!r} ends with {first['finish_reason']!r}")


def _hidden(target: Target) -> None:
    for choice in ("none", "auto"):
        data = offered(target.chat(tools=[_LAMP], tool_choice=choice, max_tokens=40), f"tool_choice {choice!r}")
        message = data["choices"][0]["message"]
        calls = message.get("tool_calls")
        require(choice == "auto" or not calls, "tool_choice 'none' gives a call")
        require(calls or "tool_calls" not in message or calls is None, "tool_calls is an empty list")
        shown = next((mark for mark in _MARKUP if mark in content_of(data)), None)
        require(shown is None, f"tool_choice {choice!r} shows {shown!r} in the content")


def _contradictions(target: Target) -> None:
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("a named function that is not among the tools", {"tools": [_LAMP], "tool_choice": _named("other")}),
        ("tool_choice required without tools", {"tool_choice": "required"}),
        ("tool_choice {}", {"tools": [_LAMP], "tool_choice": {}}),
        ("tool_choice 'sometimes'", {"tools": [_LAMP], "tool_choice": "sometimes"}),
        ("a tool without a name", {"tools": [_function(None)]}),
        ("a tool named 'bad name!'", {"tools": [_function("bad name!")]}),
        ("two tools of one name", {"tools": [_LAMP, _LAMP]}),
    )
    for what, fields in cases:
        refused(target.chat(**fields), what)
    refused(target.chat(tools=[_LAMP], tool_choice="sometimes", stream=True), "tool_choice 'sometimes', streamed")


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _streamed(target: Target) -> None:
    offered(target.chat(tools=[_LAMP], tool_choice=_NAMED, max_tokens=200), "a named function")
    stream = read_stream(target.chat(tools=[_LAMP], tool_choice=_NAMED, max_tokens=200, stream=True))
    pieces = [call for choice in stream.choices() for call in choice["delta"].get("tool_calls") or ()]
    require(pieces, "a stream with a named function holds no call")
    first, rest = pieces[0], [piece for piece in pieces[1:] if piece["index"] == pieces[0]["index"]]
    require(first.get("id") and first["function"].get("name") == "set_lamp", "the first piece lacks id or name")
    again = [piece for piece in rest if (piece.get("function") or {}).get("name")]
    require(not again, "a later piece repeats the name")
    _check_arguments("".join((piece.get("function") or {}).get("arguments") or "" for piece in [first, *rest]))
    require(len(stream.reasons()) == 1, f"a stream with a call has {len(stream.reasons())} ends")


def _turns(target: Target) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "set_lamp", "arguments": '{"on":true,"level":3}'}}
    user, ask = {"role": "user", "content": "Switch the lamp on."}, {"role": "user", "content": "And now?"}
    lengths = []
    for what, said, result in (
        ("null content", {"content": None}, "5"),
        ("no content", {}, "5"),
        ("empty content", {"content": ""}, "5"),
        ("a result in parts", {"content": None}, [{"type": "text", "text": "5"}]),
        ("a long result", {"content": None}, "five and a half " * 20),
    ):
        turn = {"role": "assistant", "tool_calls": [call], **said}
        answer_of_tool = {"role": "tool", "tool_call_id": "call_1", "content": result}
        fields = {"messages": [user, turn, answer_of_tool, ask], "tools": [_LAMP], "max_tokens": 4}
        data = offered(target.chat(**fields), f"an earlier call with {what}")
        lengths.append(data["usage"]["prompt_tokens"])
    require(lengths[-1] > lengths[0] + 20, "the result of a tool is not in the prompt")


def _parameterless(target: Target) -> None:
    for what, fields in (
        ("absent", {}),
        ("{}", {"parameters": {}}),
        ("empty", {"parameters": {"type": "object", "properties": {}}}),
    ):
        tools = [_function("ping", **fields)]
        answered(target.chat(tools=tools, max_tokens=4), f"a tool with parameters {what}")


CHECKS = (
    Check("H14", "A required or named call is made, and its arguments fit their schema.", _forced),
    Check("H14", "'none' and 'auto' never show the markup of a call.", _hidden),
    Check("H15", "Contradictions about tools are refused before anything is streamed.", _contradictions),
    Check("H16", "A streamed call has its id and name once, and its pieces join to valid arguments.", _streamed),
    Check("H17", "Earlier calls and results are accepted in every usual form, and read.", _turns),
    Check("H17", "Tools without parameters are accepted in every usual form.", _parameterless),
)
