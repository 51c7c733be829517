"""What a request uses: the estimate before it runs, and what it used, however it ended."""

import pytest

from enginehouse.api.generation.running_answers import estimate_tokens
from enginehouse.contract.types import GenerateRequest, Message, Tool, ToolUse


def request(**fields) -> GenerateRequest:
    return GenerateRequest(request_id="r", model=None, **fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "x" * 40, "stopping": {"max_tokens": 5}}, 10 + 5),
        ({"text": "", "stopping": {"max_tokens": 5}}, 5),
        ({"text": "x" * 41}, 11 + 256),
        ({"text": "x" * 40, "stopping": {"max_tokens": 5}, "num_choices": 4}, 10 + 4 * 5),
        ({"token_ids": (1, 2, 3), "stopping": {"max_tokens": 0}}, 3),
        ({"text": "ü" * 40, "stopping": {"max_tokens": 0}}, 20),
        ({"text": "\ud800" * 4, "stopping": {"max_tokens": 0}}, 1),
    ],
)
def test_estimates_are_made_of_text(fields: dict, expected: int) -> None:
    assert estimate_tokens([request(**fields)]) == expected


def test_messages_and_tools_count() -> None:
    messages = tuple(Message(role="user", content="x" * 40) for _ in range(3))
    plain = request(messages=messages, stopping={"max_tokens": 1})
    tool = Tool(name="f", parameters={}, definition={"function": {"name": "f", "description": "y" * 400}})
    with_tools = request(messages=messages, tool_use=ToolUse(tools=(tool,)), stopping={"max_tokens": 1})

    assert estimate_tokens([plain]) == 31
    assert estimate_tokens([with_tools]) > 131
    assert estimate_tokens([plain, plain]) == 62
