"""Truncation: what goes first, and what goes together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from enginehouse_responses.items import call_of, read_items
from enginehouse_responses.sealed import Seal
from enginehouse_responses.truncation import fitting

SYSTEM = {"role": "system", "content": "S"}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _call(name: str) -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}
    return [call, {"type": "function_call_output", "call_id": name, "output": "o"}]


async def _kept(items: list[dict[str, Any]], most: int) -> list[str]:
    """The items, by short names, when ``most`` of them fit."""

    async def fits(some: Sequence[Any]) -> bool:
        return len(some) <= most

    return [_name(item) for item in await fitting(items, fits)]


def _name(item: Any) -> str:
    return str(item.get("content") or f"{item['type'][-6:]}:{item.get('call_id', '')}")


THREE_TURNS = [SYSTEM, _user("a"), *_call("1"), _user("b"), {"role": "assistant", "content": "B"}, _user("c")]
ONE_TURN = [SYSTEM, _user("a"), *_call("1"), {"type": "reasoning", "summary": []}, *_call("2"), *_call("3")]


@pytest.mark.parametrize(
    ("items", "most", "kept"),
    [
        (THREE_TURNS, 7, ["S", "a", "n_call:1", "output:1", "b", "B", "c"]),
        (THREE_TURNS, 6, ["S", "b", "B", "c"]),
        (THREE_TURNS, 3, ["S", "c"]),
        (THREE_TURNS, 0, ["S", "c"]),
        (ONE_TURN, 8, ["S", "a", "soning:", "n_call:2", "output:2", "n_call:3", "output:3"]),
        (ONE_TURN, 6, ["S", "a", "n_call:3", "output:3"]),
        ([_user("a")], 0, ["a"]),
        ([], 0, []),
    ],
)
async def test_the_oldest_turns_go_first(items: list[dict[str, Any]], most: int, kept: list[str]) -> None:
    assert await _kept(items, most) == kept


@given(st.lists(st.sampled_from(["user", "call", "reasoning", "said", "parallel"]), max_size=12), st.integers(0, 20))
async def test_no_call_is_split_from_its_output(kinds: list[str], most: int) -> None:
    items: list[dict[str, Any]] = [SYSTEM]
    for number, kind in enumerate(kinds):
        first, second = _call(f"{number}a"), _call(f"{number}b")
        items += {
            "user": [_user("u")],
            "call": first,
            "reasoning": [{"type": "reasoning", "summary": []}],
            "said": [{"role": "assistant", "content": "x"}],
            "parallel": [first[0], second[0], first[1], second[1]],
        }[kind]

    async def fits(some: Sequence[Any]) -> bool:
        return len(some) <= most

    kept = await fitting(items, fits)

    ids = [call_of(item) for item in kept if call_of(item)]
    assert all(ids.count(one) == 2 for one in ids)
    read_items(kept, Seal(b""))  # each output still has its call before it
    assert kept[0] is SYSTEM and (not items[1:] or len(kept) > 1 or items[-1].get("type") == "reasoning")
