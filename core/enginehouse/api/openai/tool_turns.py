"""Tool calls and results in earlier messages on the wire, as forgiving as clients and models need it.

Clients send back what a model wrote. Arguments may be no JSON, ids may be missing or unknown, and a result
may stand where none was asked for: all of that is passed on. Only what has the wrong type is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from attrs import evolve

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import Message, ToolCall

__all__ = ["find_ignored_in_calls", "read_tool_calls", "with_function_names"]


def read_tool_calls(calls: Any, path: str) -> tuple[ToolCall, ...]:
    """The calls of an assistant's message.

    Raises:
        InvalidRequest: they are no list of function calls.
    """
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise InvalidRequest(f"{path}: must be a list", path)
    return tuple(_read_call(call, index, f"{path}[{index}]") for index, call in enumerate(calls))


def find_ignored_in_calls(calls: Any, path: str) -> Iterator[str]:
    """Paths of fields in calls that nobody knows; ``index`` is a place in a stream that clients have put together."""
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, Mapping):
            yield from (f"{path}[{number}].{key}" for key in call if key not in ("id", "type", "function", "index"))
            function = call.get("function")
            if isinstance(function, Mapping):
                inner = f"{path}[{number}].function"
                yield from (f"{inner}.{key}" for key in function if key not in ("name", "arguments"))


def with_function_names(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Results with the name of the function that was called, as some templates want it."""
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool" and message.name is None and message.tool_call_id in names:
            named.append(evolve(message, name=names[message.tool_call_id]))
        else:
            named.append(message)
    return tuple(named)


def _read_call(call: Any, index: int, path: str) -> ToolCall:
    if not isinstance(call, dict):
        raise InvalidRequest(f"{path}: must be an object", path)
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{path}.type: must be 'function'", f"{path}.type")
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{path}.function: must be an object", f"{path}.function")
    name, call_id = function.get("name"), call.get("id", f"call_{index}")
    if not isinstance(name, str):
        raise InvalidRequest(f"{path}.function.name: must be a string", f"{path}.function.name")
    if not isinstance(call_id, str):
        raise InvalidRequest(f"{path}.id: must be a string", f"{path}.id")
    return ToolCall(id=call_id, name=name, arguments=_read_arguments(function.get("arguments"), path))


def _read_arguments(arguments: Any, path: str) -> str:
    """The JSON text; an object in its place, which some clients send, is written as one."""
    if arguments is None:
        return "{}"
    if isinstance(arguments, str):
        return arguments
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    where = f"{path}.function.arguments"
    raise InvalidRequest(f"{where}: must be a string that holds JSON", where)
