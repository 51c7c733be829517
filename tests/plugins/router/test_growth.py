"""Time to look at a request grows no faster than it does."""

from __future__ import annotations

import pytest

from enginehouse.contract.types import GenerateRequest, Message
from enginehouse_router.features import features_of, has_code, read_request
from enginehouse_testkit.growth import assert_near_linear
from enginehouse_testkit.hostile_texts import HOSTILE_UNITS, hostile_text


def request(texts: list[str]) -> GenerateRequest:
    messages = tuple(Message(role="user", content=text) for text in texts)
    return GenerateRequest(request_id="r", model="auto", messages=messages)


@pytest.mark.parametrize(
    "unit", [*HOSTILE_UNITS.values(), "def a", "return ", "SELECT ", "class a", "{ ", ";\t", "step by "], ids=repr
)
def test_features(unit: str) -> None:
    """Of one long message, and of many."""

    def read(asked: GenerateRequest) -> None:
        features_of(read_request(asked))

    assert_near_linear(lambda size: request([hostile_text(unit, size)]), read, 20_000)
    assert_near_linear(lambda size: request([hostile_text(unit, 50)] * (size // 50)), read, 20_000)
    assert_near_linear(lambda size: hostile_text(unit, size), has_code, 20_000)
