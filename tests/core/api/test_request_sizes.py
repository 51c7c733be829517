"""What a small body could make large is refused, whichever surface has made the requests."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from enginehouse.api.generation.running_answers import check_request_sizes
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import Constraint, GenerateRequest, Message
from enginehouse.settings.config import LimitsSettings

LIMITS = LimitsSettings(max_choices=4, max_messages=10, max_queue=100)
HELLO = GenerateRequest(request_id="r", model=None, text="Hi", num_choices=4)
SCHEMA = Constraint(kind="json_schema", text=" " * 2**20, param="format")


@pytest.mark.parametrize(
    ("changes", "num_prompts", "problem"),
    [
        ({"num_choices": 2**31}, 1, "n: this server allows at most 4 choices, not 2147483648"),
        (
            {"messages": (Message(role="user", content="Hi"),) * 11},
            1,
            "messages: this server allows at most 10 messages, not 11",
        ),
        ({}, 101, "prompt: this server allows at most 100 prompts, not 101"),
        ({"constraint": SCHEMA}, 17, "format: with 17 prompts it may have at most 986895 characters, not 1048576"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(2000), 1.0)}}, 100, "logit_bias: with 100 prompts"),
    ],
)
def test_too_much_is_refused(changes: dict[str, Any], num_prompts: int, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_request_sizes([evolve(HELLO, **changes)] * num_prompts, LIMITS)

    assert problem in str(refused.value)


@pytest.mark.parametrize(("changes", "num_prompts"), [({}, 100), ({"constraint": SCHEMA}, 16)])
def test_the_most_is_allowed(changes: dict[str, Any], num_prompts: int) -> None:
    check_request_sizes([evolve(HELLO, **changes)] * num_prompts, LIMITS)
