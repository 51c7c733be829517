"""Pieces of tool calls as servers write them: as many calls as were made, each with its own arguments, or an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enginehouse.contract.errors import GenerationFailed
from enginehouse.contract.types import CallDelta
from enginehouse_remote.stream import AnswerStream

pytestmark = pytest.mark.remote


def piece(index: Any = None, id: Any = None, name: Any = None, arguments: Any = None) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": id, "function": {key: value for key, value in function.items() if value is not None}}


def calls_of(*deltas: list[dict[str, Any]], finish_reason: str = "tool_calls") -> list[tuple[str, str]]:
    """Name and arguments of each call."""
    stream = AnswerStream(1, None)
    events = [
        event
        for delta in deltas
        for event in stream.push({"choices": [{"index": 0, "delta": {"tool_calls": delta}, "finish_reason": None}]})
    ]
    stream.push({"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]})
    stream.finish(0.0, 0.0)
    found: dict[int, list[str]] = {}
    for event in events:
        assert isinstance(event, CallDelta)
        found.setdefault(event.call, ["", ""])
        found[event.call][0] += event.name or ""
        found[event.call][1] += event.arguments
    return [(name, arguments) for name, arguments in found.values()]


TWO = [("f", '{"x": 1}'), ("g", '{"y": "}{"}')]

SAME_CALLS = {
    "index_0_and_ids_in_one_event": [[piece(0, "a", "f", '{"x": 1}'), piece(0, "b", "g", '{"y": "}{"}')]],
    "index_0_and_ids_in_two_events": [[piece(0, "a", "f", '{"x": 1}')], [piece(0, "b", "g", '{"y": "}{"}')]],
    "no_index": [[piece(None, "a", "f", '{"x": 1}')], [piece(None, "b", "g", '{"y": "}{"}')]],
    "no_index_and_pieces": [
        [piece(None, "a", "f", '{"x"')],
        [piece(arguments=": 1}")],
        [piece(None, "b", "g", "")],
        [piece(arguments='{"y": "}{"}')],
    ],
    "no_index_and_mixed_pieces_with_ids": [
        [piece(None, "a", "f"), piece(None, "b", "g")],
        [piece(None, "b", None, '{"y": ')],
        [piece(None, "a", None, '{"x": 1}')],
        [piece(None, "b", None, '"}{"}')],
    ],
    "neither_index_nor_id": [[piece(name="f", arguments='{"x": 1}'), piece(name="g", arguments='{"y": "}{"}')]],
    "id_in_each_piece": [
        [piece(0, "a", "f", "")],
        [piece(0, "a", None, '{"x": 1}')],
        [piece(1, "b", "g", '{"y": ')],
        [piece(1, "b", None, '"}{"}')],
    ],
    "another_id_in_each_piece": [
        [piece(0, "a1", "f", '{"x"')],
        [piece(0, "a2", None, ": 1}")],
        [piece(1, "b1", "g", '{"y": "}')],
        [piece(1, "b2", None, '{"}')],
    ],
    "id_in_the_first_piece_only": [
        [piece(0, "a", "f", ""), piece(1, "b", "g", '{"y": "}{')],
        [piece(0, "", None, '{"x": 1}')],
        [piece(1, None, "", '"}')],
    ],
    "id_after_the_first_piece": [
        [piece(0, None, "f", "")],
        [piece(0, "a", "f", '{"x": 1}')],
        [piece(0, "b", "g", '{"y": "}{"}')],
    ],
    "indices_out_of_order": [
        [piece(5, "a", "f", '{"x"')],
        [piece(2, "b", "g", '{"y": "}{"}')],
        [piece(5, None, None, ": 1}")],
    ],
    "index_as_text": [
        [piece("0", "a", "f", "")],
        [piece("1", "b", "g", "")],
        [piece(0, None, None, '{"x": 1}')],
        [piece("1", None, None, '{"y": "}{"}')],
    ],
    "name_in_each_piece": [
        [piece(0, "a", "f", '{"x"')],
        [piece(0, "a", "f", ": 1}")],
        [piece(0, None, "f", "")],
        [piece(1, None, "g", '{"y": "}{')],
        [piece(1, None, "g", '"}')],
    ],
    "index_0_and_pieces_of_one_after_the_other": [
        [piece(0, "a", "f", "")],
        [piece(0, None, None, '{"x": 1}')],
        [piece(0, "b", "g", "")],
        [piece(0, None, None, '{"y": "}{"}')],
    ],
    "nothing_but_names_that_differ": [[piece(0, None, "f", '{"x": 1}')], [piece(0, None, "g", '{"y": "}{"}')]],
}


@pytest.mark.parametrize("deltas", SAME_CALLS.values(), ids=SAME_CALLS)
def test_two_calls_are_two(deltas: list[list[dict[str, Any]]]) -> None:
    assert calls_of(*deltas) == TWO


def test_a_function_that_is_called_twice_is_called_twice() -> None:
    deltas = [[piece(0, None, "f", '{"x": 1}')], [piece(0, None, "f", '{"x": 2}')]]

    assert calls_of(*deltas) == [("f", '{"x": 1}'), ("f", '{"x": 2}')]


IN_DOUBT = {
    "arguments_behind_arguments": [[piece(0, "a", "f", '{"x": 1}{}')]],
    "arguments_behind_arguments_in_pieces": [[piece(0, "a", "f", '{"x": 1}')], [piece(0, None, None, "{}")]],
    "an_id_with_two_indices": [[piece(0, "a", "f", "")], [piece(1, "a", None, "{}")]],
    "two_open_calls_of_one_index": [[piece(0, "a", "f"), piece(0, "b", "g")], [piece(0, None, None, "{}")]],
    "two_open_calls_without_index": [[piece(None, "a", "f"), piece(None, "b", "g")], [piece(arguments="{}")]],
    "ids_and_names_in_each_piece": [[piece(0, "a", "f", '{"x"')], [piece(0, "b", "f", ": 1}")]],
    "no_name": [[piece(0, "a", None, "{}")]],
    "an_index_of_another_kind": [[piece(True, "a", "f", "{}")]],
    "an_index_that_is_a_list": [[piece([0], "a", "f", "{}")]],
    "an_id_of_another_kind": [[piece(0, {"a": 1}, "f", "{}")]],
}


@pytest.mark.parametrize("deltas", IN_DOUBT.values(), ids=IN_DOUBT)
def test_calls_that_cannot_be_distinguished_are_an_error(deltas: list[list[dict[str, Any]]]) -> None:
    with pytest.raises(GenerationFailed, match="remote server"):
        calls_of(*deltas)


def test_a_call_that_was_cut_by_its_length_is_told_as_it_is() -> None:
    assert calls_of([piece(0, "a", "f", '{"x": ')], finish_reason="length") == [("f", '{"x": ')]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_arguments_may_be_cut_anywhere(size: int) -> None:
    arguments = json.dumps({"a": 'quote " and \\ and \\" end', "b": [[], {}, {"c": "}]"}], "d": "\n"})
    cuts = [arguments[at : at + size] for at in range(0, len(arguments), size)]

    first, *rest = ([piece(0, "a" if not at else None, "f" if not at else None, cut)] for at, cut in enumerate(cuts))

    assert calls_of(first, *rest, [piece(0, "b", "g", "{}")]) == [("f", arguments), ("g", "{}")]


def test_a_call_in_the_older_form_is_a_call() -> None:
    stream = AnswerStream(1, None, requires_call=True)
    deltas = [{"function_call": {"name": "f", "arguments": ""}}, {"function_call": {"arguments": '{"x": 1}'}}]
    events = [event for delta in deltas for event in stream.push({"choices": [{"index": 0, "delta": delta}]})]
    stream.push({"choices": [{"index": 0, "delta": {}, "finish_reason": "function_call"}]})

    stream.finish(0.0, 0.0)

    assert events == [CallDelta(0, 0, "", "f"), CallDelta(0, 0, '{"x": 1}', None)]
