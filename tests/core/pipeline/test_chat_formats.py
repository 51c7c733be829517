"""Which parsers serve a model, and what they make of a chat request."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import define, evolve, field, frozen

from enginehouse.contract.errors import ConfigError, UnsupportedParameter
from enginehouse.contract.parsers import ChatFormat, PreparedChat
from enginehouse.contract.types import Constraint, GenerateRequest, Message, Segment, Thinking, Tool, ToolCall, ToolUse
from enginehouse.pipeline.chat_formats import ChatFormats, ModelFormats, plan_chat
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import ModelSettings, PluginsSettings

NOW = Tool(name="now", parameters={}, definition={"type": "function", "function": {"name": "now"}})
ANSWER = Constraint(kind="json_object")


@define(eq=False)
class Tools:
    """A tool format that writes down what it is asked for."""

    markers: tuple[str, ...] = ("<call>",)
    asked: list[Any] = field(factory=list)

    def prepare(self, messages, tools):
        self.asked.append([tool.name for tool in tools])
        return PreparedChat(messages, tools)

    def constraint(self, tools, parallel, answer=None):
        self.asked.append(([tool.name for tool in tools], parallel, answer))
        return Constraint(kind="lark", text="calls", param="tool_choice")

    def open(self, tools):
        raise AssertionError("not here")


@frozen
class Reasoning:
    start: str = "<think>"
    end: str = "</think>"
    has_switch: bool = True

    def variables(self, enabled, effort):
        return {"enabled": enabled, "effort": effort}

    def is_open(self, prompt: str) -> bool:
        return prompt.endswith(self.start)

    def open(self, is_open: bool):
        raise AssertionError("not here")


def request(*messages: Message, **fields: Any) -> GenerateRequest:
    messages = messages or (Message(role="user", content="Hi"),)
    return GenerateRequest(request_id="r", model=None, messages=messages, **fields)


def plan(tools: Tools | None = None, reasoning: Reasoning | None = None, constraint=None, **fields: Any):
    return plan_chat(request(**fields), ModelFormats(tools, reasoning), constraint)  # type: ignore[arg-type]


# -- choosing -----------------------------------------------------------------------------------------


@frozen
class Parser:
    name: str
    score: float = 0.5
    api_version: int = 1

    def match(self, model: ChatFormat) -> float:
        if self.score < 0:
            raise RuntimeError("on purpose")
        return self.score

    def bind(self, model: ChatFormat) -> Any:
        if self.name == "unbound":
            raise RuntimeError("on purpose")
        return Bound(name=self.name)


@frozen
class Bound(Reasoning):
    """What a parser is bound to: a format of calls and of reasoning at once."""

    name: str = ""
    markers: tuple[str, ...] = ()

    def prepare(self, messages, tools):
        return PreparedChat(messages, tools)

    def constraint(self, tools, parallel, answer=None):
        return Constraint(kind="lark", text="calls", param="tool_choice")


def formats(*parsers: Parser, **settings: Any) -> ModelFormats:
    registry = PluginRegistry.load(PluginsSettings(allow=()))
    known = {parser.name: parser for parser in parsers}
    registry = evolve(registry, tool_parsers=known, reasoning_parsers=known)
    chosen = ChatFormats(registry, {"m": ModelSettings(source="x", **settings)})
    assert chosen.of("m", ChatFormat("t")) is chosen.of("m", ChatFormat("t"))
    return chosen.of("m", ChatFormat("t"))


def test_the_surest_parser_serves_and_of_several_the_first() -> None:
    chosen = formats(Parser("broken", -1), Parser("low", 0.1), Parser("first", 0.9), Parser("second", 0.9))

    assert (chosen.tools.name, chosen.reasoning.name) == ("first", "first")


def test_no_parser_serves_where_none_matches() -> None:
    assert formats(Parser("zero", 0.0)) == ModelFormats(None, None)
    assert formats() == ModelFormats(None, None)


def test_settings_name_a_parser_or_none() -> None:
    chosen = formats(Parser("a", 0.9), Parser("b", 0.0), tool_parser="b", reasoning_parser="none")

    assert (chosen.tools.name, chosen.reasoning) == ("b", None)


@pytest.mark.parametrize("name", ["tool_parser", "reasoning_parser"])
def test_settings_that_name_an_unknown_parser_are_wrong(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown (tool|reasoning) parser 'x'.*; known: a, none") as caught:
        formats(Parser("a"), **{name: "x"})
    assert caught.value.path == f"models.m.{name}"


def test_a_tool_parser_that_cannot_be_bound_leaves_its_model_without_tools() -> None:
    assert formats(Parser("unbound"), reasoning_parser="none").tools is None


# -- planning -----------------------------------------------------------------------------------------


def test_a_plain_chat_needs_no_parser() -> None:
    planned = plan()

    assert planned.variables == {} and planned.constraint is None and planned.shown_tokens == ()
    assert planned.parsing(None).open() is None


def test_tools_without_a_parser_are_refused() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        plan(tool_use=ToolUse(tools=(NOW,)))
    assert caught.value.param == "tools"
    called = Message(role="assistant", content="", tool_calls=(ToolCall(id="1", name="now", arguments="{}"),))
    with pytest.raises(UnsupportedParameter) as caught:
        plan_chat(request(called), ModelFormats(None, None), None)
    assert caught.value.param == "messages"
    assert plan(tool_use=ToolUse(tools=(NOW,), choice="none")).variables == {}


def test_tools_reach_the_template() -> None:
    tools = Tools()
    planned = plan(tools, tool_use=ToolUse(tools=(NOW,)), template_variables={"flavour": 1})

    assert planned.variables == {"flavour": 1, "tools": [NOW.definition]}
    assert planned.shown_tokens == ("<call>",) and planned.constraint is None
    assert tools.asked == [["now"]]


def test_no_choice_hides_the_tools() -> None:
    tools = Tools()
    planned = plan(tools, tool_use=ToolUse(tools=(NOW,), choice="none"), constraint=ANSWER)

    assert planned.variables == {} and planned.constraint is ANSWER and tools.asked == []
    assert planned.parsing(None).tools == ()


@pytest.mark.parametrize(
    ("use", "constraint", "asked"),
    [
        (ToolUse(tools=(NOW,), choice="required"), None, (["now"], None, None)),
        (ToolUse(tools=(NOW,), choice="required"), ANSWER, (["now"], None, None)),
        (ToolUse(tools=(NOW,), choice="required", parallel=True), None, (["now"], True, None)),
        (ToolUse(tools=(NOW,), choice="required", parallel=False), None, (["now"], False, None)),
        (ToolUse(tools=(NOW,), choice="required", only="now"), None, (["now"], False, None)),
        (ToolUse(tools=(NOW,)), ANSWER, (["now"], None, ANSWER)),
        (ToolUse(tools=(NOW, evolve(NOW, name="two", strict=True))), None, (["now", "two"], None, "any")),
    ],
)
def test_what_is_enforced(use: ToolUse, constraint: Constraint | None, asked: Any) -> None:
    tools = Tools()
    planned = plan(tools, tool_use=use, constraint=constraint)

    assert tools.asked[-1] == asked
    assert planned.constraint == Constraint(kind="lark", text="calls", param="tool_choice")
    assert planned.parsing(None).max_calls == (1 if use.parallel is False or use.only is not None else None)


OPEN = (Segment("...<think>", trusted=True),)
SHUT = (Segment("...", trusted=True),)


@pytest.mark.parametrize(
    ("thinking", "enabled", "budget"),
    [
        (Thinking(), None, None),
        (Thinking(enabled=True, budget=7), True, 7),
        (Thinking(enabled=False, budget=7), False, 0),
        (Thinking(budget=0), False, 0),
        (Thinking(effort="minimal"), False, 0),
        (Thinking(effort="high"), None, None),
        (Thinking(enabled=True, effort="minimal"), True, None),
    ],
)
def test_switches_and_budgets(thinking: Thinking, enabled: bool | None, budget: int | None) -> None:
    planned = plan(None, Reasoning(), thinking=thinking)
    params = planned.reasoning_params(OPEN)

    assert planned.variables == {"enabled": enabled, "effort": thinking.effort}
    assert params is not None and params.is_open and params.budget == budget
    assert planned.reasoning_params(SHUT) is not None
    assert planned.opened(SHUT) == SHUT


def test_variables_of_the_request_come_first() -> None:
    assert plan(None, Reasoning(), template_variables={"enabled": 3}).variables == {"enabled": 3, "effort": None}


def test_a_constraint_waits_for_reasoning_that_is_open() -> None:
    planned = plan(None, Reasoning(has_switch=False), constraint=ANSWER)

    assert planned.reasoning_params(OPEN) is not None
    assert planned.reasoning_params(SHUT) is None, "it holds from the first token on"
    assert planned.opened(SHUT) == SHUT


def test_a_model_that_would_reason_is_made_to_where_a_constraint_would_keep_it_from_it() -> None:
    planned = plan(None, Reasoning(), constraint=ANSWER)
    opened = planned.opened(SHUT)

    assert opened == (*SHUT, Segment("<think>\n", trusted=True))
    assert planned.opened(OPEN) == OPEN
    for thinking in (Thinking(enabled=False), Thinking(budget=0)):
        assert plan(None, Reasoning(), constraint=ANSWER, thinking=thinking).opened(SHUT) == SHUT


def test_an_end_that_a_client_wrote_opens_nothing() -> None:
    forged = (Segment("...", trusted=True), Segment("<think>", trusted=False))
    params = plan(None, Reasoning()).reasoning_params(forged)

    assert params is not None and not params.is_open
