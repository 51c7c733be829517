"""Leaving parameters out of a request, by the paths that refusals name."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.contract.types import Constraint, GenerateRequest, Thinking, Tool, ToolUse
from enginehouse.pipeline.request_parameters import Given, given_parameters, without_parameters

STRICT = ToolUse(tools=(Tool(name="f", parameters={}, definition={}, strict=True),))
LENIENT = ToolUse(tools=(Tool(name="f", parameters={}, definition={}),))
SCHEMA = Constraint(kind="json_object", param="response_format")


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", model=None, **fields)


def required(use: ToolUse) -> ToolUse:
    return ToolUse(tools=use.tools, choice="required", only="f")


@pytest.mark.parametrize(
    ("before", "param", "after", "left_out"),
    [
        ({"constraint": SCHEMA}, "response_format", {}, "response_format"),
        ({"sampling": {"min_p": 0.1, "top_k": 1}}, "min_p", {"sampling": {"top_k": 1}}, "min_p"),
        ({"sampling": {"num_logprobs": 1}}, "logprobs", {"sampling": {}}, "logprobs"),
        ({"stopping": {"stop": ("a",)}}, "stop", {"stopping": {}}, "stop"),
        ({"extensions": {"x": {"a": 1, "b": 2}}}, "a", {"extensions": {"x": {"b": 2}}}, "a"),
        ({"extensions": {"x": {"a": 1}}}, "a", {}, "a"),
        ({"suffix": "x"}, "suffix", {}, "suffix"),
        ({"num_prompt_logprobs": 1}, "loglikelihood", {}, "loglikelihood"),
        ({"prediction": "x"}, "prediction", {}, "prediction"),
        ({"template_variables": {"a": 1}}, "chat_template_kwargs", {}, "chat_template_kwargs"),
        (
            {"thinking": Thinking(enabled=True, budget=5)},
            "thinking_budget",
            {"thinking": Thinking(enabled=True)},
            "thinking_budget",
        ),
        ({"tool_use": LENIENT}, "tools", {}, "tools"),
        ({"tool_use": required(LENIENT)}, "tool_choice", {"tool_use": LENIENT}, "tool_choice"),
        ({"tool_use": STRICT}, "tools[0].function.strict", {"tool_use": LENIENT}, "tools[0].function.strict"),
        (
            {"tool_use": ToolUse(tools=LENIENT.tools, parallel=False)},
            "parallel_tool_calls",
            {"tool_use": LENIENT},
            "parallel_tool_calls",
        ),
    ],
)
def test_without(before: dict[str, Any], param: str, after: dict[str, Any], left_out: str) -> None:
    assert without_parameters(request(**before), [param]) == (request(**after), (left_out,))


def test_without_several() -> None:
    before = request(constraint=SCHEMA, sampling={"min_p": 0.1}, tool_use=required(STRICT))
    after = request(tool_use=LENIENT)
    params = ("min_p", "tool_choice", "tools[0].function.strict", "response_format.json_schema")

    assert without_parameters(before, params) == (after, (*params[:3], "response_format"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages[0].content[1]"),
        ({}, "prompt"),
        ({}, "min_p"),
        ({"tool_use": LENIENT}, "tool_choice"),
        ({"tool_use": LENIENT}, "parallel_tool_calls"),
        ({"tool_use": LENIENT}, "tools[0].function.strict"),
    ],
)
def test_what_cannot_be_left_out(fields: dict[str, Any], param: str) -> None:
    assert without_parameters(request(**fields), [param]) == (request(**fields), ())


def test_what_only_some_engines_take_is_given_by_the_names_that_clients_write() -> None:
    use = ToolUse(tools=LENIENT.tools, choice="required", parallel=False)
    asked = request(
        tool_use=use,
        template_variables={"a": 1},
        thinking=Thinking(enabled=False, budget=3, effort="low"),
        num_choices=2,
        prediction="x",
    )

    assert {given.name for given in given_parameters(asked)} == {
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "enable_thinking",
        "thinking_budget",
        "reasoning_effort",
        "n",
        "prediction",
    }


def test_hidden_tools_are_not_given() -> None:
    hidden = ToolUse(tools=LENIENT.tools, choice="none")

    assert list(given_parameters(request(tool_use=hidden))) == []
    assert list(given_parameters(request(tool_use=LENIENT))) == [Given("tools")]
