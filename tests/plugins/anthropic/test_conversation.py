"""Turns of clients become messages that chat templates take; what has no effect is told."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.contract.errors import InvalidRequest, RequestError, UnsupportedParameter
from enginehouse.contract.types import Message
from enginehouse_anthropic.conversation import read_conversation
from enginehouse_anthropic.options import read_output, read_thinking, read_tool_use
from enginehouse_anthropic.signatures import Signatures

from .harness import LOOK, ReadCall, assistant, body, text, tool_result, tool_use, user

SIGNATURES = Signatures()
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
HOSTED = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}


def messages(data: dict[str, Any]) -> tuple[list[Message], ReadCall]:
    call = ReadCall.of(data)
    return list(read_conversation(call, SIGNATURES)), call


def said(data: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages(data)[0]]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (body(user("Hi"), system="Be kind."), [("system", "Be kind."), ("user", "Hi")]),
        (body(user("Hi"), system=[text("One."), text("Two.")]), [("system", "One.\nTwo."), ("user", "Hi")]),
        (body(user("a"), user("b"), assistant("c"), assistant("d")), [("user", "a\nb"), ("assistant", "c\nd")]),
        (  # a leading system turn is part of the system prompt
            body({"role": "system", "content": "Two."}, user("Hi"), system="One."),
            [("system", "One.\nTwo."), ("user", "Hi")],
        ),
        (  # a later one is part of the user's turn, so that the beginning of the prompt stays the same
            body(user("Hi"), {"role": "system", "content": [text("Be brief.")]}, assistant("Yo")),
            [("user", "Hi\n<system>\nBe brief.\n</system>"), ("assistant", "Yo")],
        ),
        (
            body(user("Hi"), assistant("Yo"), {"role": "system", "content": "Stop."}),
            [("user", "Hi"), ("assistant", "Yo"), ("user", "<system>\nStop.\n</system>")],
        ),
        (  # results come before the rest of their turn, also if a system turn is between them and the call
            body(
                user("Hi"),
                assistant(tool_use()),
                {"role": "system", "content": "Hm."},
                user(text("And?"), tool_result("A cat.")),
            ),
            [("user", "Hi"), ("assistant", ""), ("tool", "A cat."), ("user", "<system>\nHm.\n</system>\nAnd?")],
        ),
        (
            body(assistant(tool_use()), user(tool_result([text("One."), text("Two.")]))),
            [("assistant", ""), ("tool", "One.\nTwo.")],
        ),
        (
            body(assistant(tool_use()), user(tool_result("No file.", is_error=True))),
            [("assistant", ""), ("tool", "Error:\nNo file.")],
        ),
        (body(assistant(tool_use()), user(tool_result())), [("assistant", ""), ("tool", "")]),
        (body(user("Say B"), assistant("The answer is ")), [("user", "Say B"), ("assistant", "The answer is ")]),
        (
            body(user({"type": "document", "title": "T", "source": {"type": "text", "data": "Body."}}, text("Sum?"))),
            [("user", "<document>\nT\nBody.\n</document>\nSum?")],
        ),
        (
            body(user({"type": "document", "source": {"type": "content", "content": [text("A"), text("B")]}})),
            [("user", "<document>\nA\nB\n</document>")],
        ),
        (
            body(user({"type": "search_result", "source": "s", "title": "t", "content": [text("Found.")]})),
            [("user", "<search_result>\nt\ns\nFound.\n</search_result>")],
        ),
        (
            body(assistant(tool_use()), user(tool_result([{"type": "tool_reference", "tool_name": "grep"}]))),
            [("assistant", ""), ("tool", "grep")],
        ),
    ],
)
def test_turns(data: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert said(data) == expected


def test_calls_and_results_belong_together() -> None:
    (call, result), _ = messages(body(assistant(text("I look."), tool_use(at="x")), user(tool_result("Seen."))))

    assert call.content == "I look."
    assert [(one.id, one.name, one.arguments) for one in call.tool_calls] == [("toolu_1", "look", '{"at":"x"}')]
    assert (result.role, result.tool_call_id, result.name) == ("tool", "toolu_1", "look")


def test_the_billing_block_is_dropped_and_told() -> None:
    """It differs in every request, so that nothing after it would be found in the prefix cache."""
    nonce = text("x-anthropic-billing-header: cc_version=2.1; cch=1f3a9;")
    (system, _), call = messages(body(user("Hi"), system=[nonce, text("You are an agent.")]))

    assert system.content == "You are an agent."
    assert call.ignored == ["system[0]"]


@pytest.mark.parametrize("signature", [{}, {"signature": ""}, {"signature": "ErUBforeign=="}, {"signature": None}])
def test_reasoning_of_any_origin_is_taken(signature: dict[str, Any]) -> None:
    (turn,), _ = messages(body(assistant({"type": "thinking", "thinking": "Hm.", **signature}, text("Yes."))))

    assert (turn.reasoning, turn.content) == ("Hm.", "Yes.")


def test_sealed_reasoning_is_opened() -> None:
    sealed = {"type": "thinking", "thinking": "", "signature": SIGNATURES.seal("Hm.")}
    redacted = {"type": "redacted_thinking", "data": "abc"}
    (turn,), call = messages(body(assistant(sealed, redacted, text("Yes."))))

    assert turn.reasoning == "Hm."
    assert call.ignored == ["messages[0].content[1]"]


def test_images_are_parts() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    (turn,), _ = messages(body(user(text("What is"), PNG, url)))

    assert turn.content == "What is"
    assert [part.value["url"] for part in turn.parts[1:]] == ["data:image/png;base64,AAAA", "https://a.example/b.png"]
    assert [part.param for part in turn.parts[1:]] == ["messages[0].content[1]", "messages[0].content[2]"]


def test_images_in_results_are_parts() -> None:
    (_, result), _ = messages(body(assistant(tool_use()), user(tool_result([text("See:"), PNG]))))

    assert result.role == "tool" and result.parts[0] == "See:"
    assert result.parts[1].param == "messages[1].content[0].content[1]"


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (body(user({"type": "text"})), "messages[0].content[0]"),
        (body(user({"type": "video", "text": "a"})), "messages[0].content[0].type"),
        (body(user({"type": "text", "text": 1})), "messages[0].content[0].text"),
        (body(user(tool_use())), "messages[0].content[0].type"),
        (body(assistant(PNG)), "messages[0].content[0].type"),
        (body({"role": "tool", "content": "a"}), "messages[0].role"),
        (body({"role": "user"}), "messages[0]"),
        (body({"role": "user", "content": 1}), "messages[0].content"),
        (body({"role": "system", "content": [PNG]}, user("Hi")), "messages[0].content[0].type"),
        (body(system=[{"type": "text"}]), "system[0]"),
        (body(system=1), "system"),
        ({**body(), "messages": []}, "messages"),
    ],
)
def test_what_is_wrong_is_named(data: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        messages(data)

    assert refused.value.param == param and refused.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "messages[0].content[0].source"),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
            "messages[0].content[0].source",
        ),
        ({"type": "document", "source": {"type": "url", "url": "https://a.example"}}, "messages[0].content[0].source"),
    ],
)
def test_what_cannot_be_read_is_refused(block: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        messages(body(user(block)))

    assert refused.value.param == param


def test_blocks_of_hosted_tools_follow_the_settings() -> None:
    data = body(assistant(HOSTED, text("Found.")), user("And?"))
    found, call = messages(data)

    assert found[0].content == "Found." and call.left_out == ["messages[0].content[0]"]
    with pytest.raises(UnsupportedParameter, match=r"messages\[0\].content\[0\]"):
        read_conversation(ReadCall.of(data, rejects=True), SIGNATURES)


def test_unknown_members_are_told() -> None:
    data = body(
        user(text("Hi", cache_control={"type": "ephemeral"}, tone="warm")),
        {**assistant(tool_use()), "mood": 1},
        user(tool_result([text("a", citations=None, x=1)])),
        system=[text("Be kind.", volume=11)],
    )
    _, call = messages(data)

    assert call.ignored == [
        "system[0].volume",
        "messages[0].content[0].tone",
        "messages[1].mood",
        "messages[2].content[0].content[0].x",
    ]


# -- tools and options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None, None)),
        ({"type": "auto"}, ("auto", None, None)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, None)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
        ({"type": "tool", "name": "look"}, ("required", "look", None)),
        ({"type": "none"}, ("none", None, None)),
    ],
)
def test_tool_choice(choice: Any, expected: tuple[Any, ...]) -> None:
    use = read_tool_use(ReadCall.of(body(tools=(LOOK,), tool_choice=choice)))

    assert use is not None and (use.choice, use.only, use.parallel) == expected


def test_tools_are_described_as_templates_take_them() -> None:
    call = ReadCall.of(body(tools=({**LOOK, "strict": True, "input_examples": [{}]},)))
    use = read_tool_use(call)

    assert use is not None and use.tools[0].strict
    assert use.tools[0].definition == {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": LOOK["input_schema"]},
    }
    assert call.ignored == ["tools[0].input_examples"]


def test_hosted_tools_follow_the_settings() -> None:
    tools = ({"type": "web_search_20250305", "name": "web_search"}, {**LOOK, "type": "custom"})
    call = ReadCall.of(body(tools=tools))
    use = read_tool_use(call)

    assert use is not None and [tool.name for tool in use.tools] == ["look"]
    assert call.left_out == ["tools[0]"]
    with pytest.raises(UnsupportedParameter, match=r"tools\[0\]"):
        read_tool_use(ReadCall.of(body(tools=tools), rejects=True))


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, (False, None)),
        ({"type": "disabled"}, (False, None)),
        ({"type": "adaptive"}, (True, None)),
        ({"type": "enabled", "budget_tokens": 2000}, (True, 2000)),
        ({"type": "between_tools"}, (False, None)),
    ],
)
def test_thinking(thinking: Any, expected: tuple[bool, int | None]) -> None:
    read = read_thinking(ReadCall.of(body(thinking=thinking)), "high")

    assert (read.enabled, read.budget, read.effort) == (*expected, "high")


def test_thinking_between_tools() -> None:
    data = body(user("Hi"), assistant(tool_use()), user(tool_result("a")), thinking={"type": "between_tools"})

    assert read_thinking(ReadCall.of(data), None).enabled


def test_output_config() -> None:
    call = ReadCall.of(body(output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"a": None}}}))
    effort, constraint = read_output(call)

    assert effort == "xhigh" and constraint is not None
    assert (constraint.kind, constraint.text, constraint.param) == ("json_schema", '{"a":null}', "output_config.format")
    assert read_output(ReadCall.of(body(output_format={"type": "json_schema", "schema": {}})))[1] is not None
    assert read_output(ReadCall.of(body())) == (None, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": ({"name": "look"},)}, "tools[0]"),
        ({"tools": ({**LOOK, "name": "look at"},)}, "tools[0].name"),
        ({"tools": (LOOK, LOOK)}, "tools[1].name"),
        ({"tools": ({**LOOK, "input_schema": {"type": "array"}},)}, "tools[0].input_schema.type"),
        ({"tools": (LOOK,) * 513}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": (LOOK,), "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": (LOOK,), "tool_choice": {"type": "tool", "name": "hear"}}, "tool_choice.name"),
        ({"tools": (LOOK,), "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": (LOOK,), "tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        ({"thinking": True}, "thinking"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text", "schema": {}}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)
def test_wrong_options_are_named(fields: dict[str, Any], param: str) -> None:
    call = ReadCall.of(body(**fields))
    with pytest.raises(RequestError) as refused:
        read_tool_use(call)
        effort, _ = read_output(call)
        read_thinking(call, effort)

    assert refused.value.param == param
