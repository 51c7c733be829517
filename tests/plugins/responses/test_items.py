"""Input items as messages, and the paths of what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import MediaPart, Message, ToolCall
from enginehouse_responses.body import ResponsesBody
from enginehouse_responses.conversation import Conversation
from enginehouse_responses.sealed import Seal

SEAL = Seal(b"secret")
CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
CALLED = ToolCall(id="c1", name="now", arguments="{}")
ANSWERED = Message(role="tool", content="noon", tool_call_id="c1", name="now")
REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}
HI = Message(role="user", content="hi")


def _messages(items: Any, **fields: Any) -> tuple[Message, ...]:
    body = ResponsesBody(input=items, **fields)
    return Conversation.of(body).messages(body.instructions, SEAL)


def _said(text: str, **members: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **members}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [HI]),
        ([{"role": "user", "content": "hi"}], [HI]),
        ([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}], [HI]),
        ([{"role": "developer", "content": "be brief"}], [Message(role="developer", content="be brief")]),
        (
            [
                {"role": "system", "content": "A"},
                {"role": "developer", "content": "B"},
                {"role": "user", "content": "hi"},
            ],
            [Message(role="system", content="A\n\nB"), HI],
        ),
        (
            [{"role": "user", "content": "hi"}, {"role": "developer", "content": "B"}],
            [HI, Message(role="developer", content="B")],
        ),
        (
            [_said("yes", id="msg_1", status="completed", phase="final_answer")],
            [Message(role="assistant", content="yes")],
        ),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            [Message(role="assistant", content="no")],
        ),
        ([CALL, OUTPUT], [Message(role="assistant", content="", tool_calls=(CALLED,)), ANSWERED]),
        (
            [_said("wait"), CALL, {**CALL, "call_id": "c2", "namespace": "mcp__x__"}, OUTPUT],
            [
                Message(
                    role="assistant",
                    content="wait",
                    tool_calls=(CALLED, ToolCall(id="c2", name="mcp__x__now", arguments="{}")),
                ),
                ANSWERED,
            ],
        ),
        (
            [CALL, OUTPUT, _said("done"), _said("really")],
            [
                Message(role="assistant", content="", tool_calls=(CALLED,)),
                ANSWERED,
                Message(role="assistant", content="done"),
                Message(role="assistant", content="really"),
            ],
        ),
        (
            [
                {"type": "custom_tool_call", "call_id": "c1", "name": "now", "input": 'a "b"'},
                {**OUTPUT, "type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "noon"}]},
            ],
            [
                Message(
                    role="assistant",
                    content="",
                    tool_calls=(ToolCall(id="c1", name="now", arguments='{"input":"a \\"b\\""}'),),
                ),
                ANSWERED,
            ],
        ),
        (
            [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": SEAL.pack("hm ü")}, _said("yes")],
            [Message(role="assistant", content="yes", reasoning="hm ü")],
        ),
        (
            [{**REASONING, "content": [{"type": "reasoning_text", "text": "hm"}]}, CALL, OUTPUT],
            [Message(role="assistant", content="", reasoning="hm", tool_calls=(CALLED,)), ANSWERED],
        ),
        (  # what another server sealed is not readable, and no reason to refuse
            [{**REASONING, "encrypted_content": Seal(b"other").pack("hm")}, _said("yes")],
            [Message(role="assistant", content="yes")],
        ),
        (
            [
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "in short"}],
                    "encrypted_content": "?",
                }
            ],
            [Message(role="assistant", content="", reasoning="in short")],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "see"},
                        {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "original"},
                    ],
                }
            ],
            [
                Message(
                    role="user",
                    content="see",
                    parts=(
                        "see",
                        MediaPart(
                            kind="image_url",
                            value={"url": "data:image/png;base64,AA==", "detail": "high"},
                            param="input[0].content[1]",
                        ),
                    ),
                )
            ],
        ),
    ],
)
def test_items_become_messages(items: Any, messages: list[Message]) -> None:
    assert list(_messages(items)) == messages


def test_instructions_come_first() -> None:
    items = [{"role": "developer", "content": "B"}, {"role": "user", "content": "hi"}]

    assert _messages(items, instructions="A") == (Message(role="system", content="A\n\nB"), HI)


@pytest.mark.parametrize(
    ("items", "path"),
    [
        (None, "input"),
        ([], "input"),
        (7, "input"),
        (["hi"], "input[0]"),
        ([{"role": "user", "content": "hi"}, {"type": "telepathy"}], "input[1].type"),
        ([{"content": "hi"}], "input[0].type"),
        ([{"role": "wizard", "content": "hi"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], "input[0].content[0].image_url"),
        ([OUTPUT], "input[0].call_id"),
        ([{**CALL, "arguments": 7}], "input[0].arguments"),
        ([{"type": "custom_tool_call", "call_id": "c", "name": "n"}], "input[0].input"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].id"),
        ([{"type": "compaction", "encrypted_content": "?"}], "input[0]"),
        ([{"type": "web_search_call", "id": "ws_1"}], "input[0].type"),
    ],
)
def test_what_is_wrong_is_refused_by_its_path(items: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _messages(items)

    assert refused.value.param == path and str(refused.value).startswith(f"{path}: ")


def test_a_seal_is_opaque_versioned_and_signed() -> None:
    blob = SEAL.pack("plan\n\ud800 A")

    assert SEAL.unpack(blob) == "plan\n\ud800 A" and "plan" not in blob
    for broken in ("", "!", "ü", blob[:-4], blob[4:], blob[:-8] + "AAAAAAA=", blob.swapcase()):
        assert SEAL.unpack(broken) is None
