"""Tool-call and reasoning formats of a model, and the plan they imply for a chat request.

Called by the pipeline. Chooses parsers for a model once, then plans each chat: the template variables, the constraint
the engine must enforce, and the parsing of the answers. Does not know any concrete format and renders nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

from attrs import evolve, field, frozen

from enginehouse.contract.errors import ConfigError, PluginFailed, RequestError, UnsupportedParameter
from enginehouse.contract.parsers import (
    ChatFormat,
    PreparedChat,
    ReasoningFormat,
    ReasoningParser,
    ToolFormat,
    ToolParser,
)
from enginehouse.contract.types import (
    Constraint,
    GenerateRequest,
    Message,
    ReasoningParams,
    Segment,
    Thinking,
    Tool,
    ToolUse,
)
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse.plugins import PluginRegistry, are_foreign, guard_of
from enginehouse.serving.background import run_with_plugins
from enginehouse.settings.config import ModelSettings

_MAX_MODELS = 64
_PROBE = Tool(name="probe", parameters={"type": "object"}, definition={"type": "function"}, strict=True)
_P = TypeVar("_P", ToolParser, ReasoningParser)


@frozen
class ModelFormats:
    """Formats in use for one model; None where no parser applies.

    Attributes:
        tool_parser: name of the parser that implements ``tools``.
        reasoning_parser: name of the parser that implements ``reasoning``.
        template_takes_tools: the chat template renders tools itself; otherwise they are described in the prompt.
        strict_problem: why the format cannot enforce ``strict`` tools in calls that the model makes of its own choice;
            "" if it can.
        failed_parser: the tool parser that suits the model and failed, as in "the tool parser 'x' of the plugin 'y'".
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    template_takes_tools: bool = False
    strict_problem: str = ""
    failed_parser: str = ""

    @property
    def are_foreign(self) -> bool:
        """True if a parser is not our own, so that it is called off the event loop."""
        return are_foreign(self.tools, self.reasoning)


class ChatFormats:
    """Chooses parsers by chat template.

    Args:
        registry: the parsers.
        models: model settings by name; they may name parsers.

    Attributes:
        are_foreign: a parser is not our own, so that :meth:`of` is called off the event loop the first time.

    Raises:
        ConfigError: the settings name a parser that does not exist.
    """

    def __init__(self, registry: PluginRegistry, models: Mapping[str, ModelSettings]) -> None:
        self._tool_parsers = registry.tool_parsers
        self._reasoning_parsers = registry.reasoning_parsers
        self.are_foreign = are_foreign(*self._tool_parsers.values(), *self._reasoning_parsers.values())
        self._models = models
        self._known: OrderedDict[tuple[str, str], ModelFormats] = OrderedDict()
        self._learnt: OrderedDict[str, ChatFormat] = OrderedDict()  # by template
        for name, model in models.items():
            _check_name(registry, "tool parser", f"models.{name}.tool_parser", model.tool_parser)
            _check_name(registry, "reasoning parser", f"models.{name}.reasoning_parser", model.reasoning_parser)

    def learn(self, model: str, chat: ChatFormat) -> None:
        """Remember the examples of a template; formats of the model that were chosen without them are chosen again."""
        self._learnt[chat.template] = chat
        self._known.pop((model, chat.template), None)
        if len(self._learnt) > _MAX_MODELS:
            self._learnt.popitem(last=False)

    async def find(self, model: str, chat: ChatFormat) -> ModelFormats:
        """Return the same as :meth:`of`; the parsers of other distributions are asked off the event loop."""
        is_new = (model, chat.template) not in self._known
        return await run_with_plugins(is_new and self.are_foreign, lambda: self.of(model, chat))

    def of(self, model: str, chat: ChatFormat) -> ModelFormats:
        """Return the formats of a model, chosen at the first call and again when its template changes."""
        key = (model, chat.template)
        if key not in self._known:
            settings = self._models[model]
            learnt = self._learnt.get(chat.template, chat)
            chat = evolve(chat, examples=learnt.examples, failures=learnt.failures)
            tools = _choose(self._tool_parsers, settings.tool_parser, chat)
            reasoning = _choose(self._reasoning_parsers, settings.reasoning_parser, chat)
            self._known[key] = _bind(tools, reasoning, chat)
            if len(self._known) > _MAX_MODELS:
                self._known.popitem(last=False)
        return self._known[key]


@frozen(kw_only=True)
class ChatPlan:
    """Plan for one chat request.

    Attributes:
        messages: in the form that the template can render.
        variables: template variables besides the messages.
        constraint: constraint on the form of the answers.
        shown_tokens: control tokens whose text the parser must see.
        forces_reasoning: the model would start reasoning by itself, but a constraint would prevent it; the prompt must
            open the reasoning.
        budget: maximum number of reasoning tokens; None means no limit.
    """

    messages: tuple[Message, ...]
    variables: dict[str, Any] = field(factory=dict)
    constraint: Constraint | None = None
    shown_tokens: tuple[str, ...] = ()
    forces_reasoning: bool = False
    budget: int | None = None
    _formats: ModelFormats
    _request: GenerateRequest

    @property
    def are_foreign(self) -> bool:
        """True if a parser is not our own, so that the methods of this plan are called off the event loop."""
        return self._formats.are_foreign

    def opened(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Return the rendered prompt, with reasoning opened if required."""
        reasoning = self._formats.reasoning
        if reasoning is None or not self.forces_reasoning or _is_open(reasoning, segments):
            return segments
        return (*segments, Segment(f"{reasoning.start}\n", trusted=True))

    def reasoning_params(self, segments: tuple[Segment, ...]) -> ReasoningParams | None:
        """Return the reasoning parameters for the engine; ``segments`` is the whole prompt."""
        reasoning = self._formats.reasoning
        if reasoning is None:
            return None
        is_open = _is_open(reasoning, segments)
        if self.constraint is not None and not is_open:
            return None  # the constraint applies from the first token on
        return ReasoningParams(start=reasoning.start, end=reasoning.end, is_open=is_open, budget=self.budget)

    def parsing(self, reasoning: ReasoningParams | None) -> AnswerParsing:
        """Return the parser configuration for the answers."""
        use = self._request.tool_use
        max_calls = 1 if use is not None and (use.parallel is False or use.only is not None) else None
        return AnswerParsing(
            reasoning=self._formats.reasoning if reasoning is not None else None,
            reasoning_is_open=reasoning is not None and reasoning.is_open,
            tool_format=self._formats.tools if use is not None else None,
            tools=use.callable if use is not None else (),
            max_calls=max_calls,
        )


def plan_chat(request: GenerateRequest, formats: ModelFormats, constraint: Constraint | None) -> ChatPlan:
    """Plan a request with messages.

    Args:
        constraint: constraint that the request puts on its answers, tool calls excluded.

    Raises:
        RequestError: this model's format cannot do what the request asks for.
    """
    assert request.messages is not None
    use, thinking, reasoning = request.tool_use, request.thinking, formats.reasoning
    prepared = _prepare(request.messages, use, formats)
    variables = dict(request.template_variables)
    enabled = _is_enabled(thinking, reasoning)
    if reasoning is not None:
        variables = {**reasoning.variables(enabled, thinking.effort), **variables}
    if prepared.tools:
        variables["tools"] = [tool.definition for tool in prepared.tools]
    if use is not None and formats.tools is not None:
        constraint = _constraint(use, formats.tools, constraint)
    reasons = reasoning is not None and reasoning.has_switch and enabled is not False
    return ChatPlan(
        messages=prepared.messages,
        variables=variables,
        constraint=constraint,
        shown_tokens=formats.tools.markers if formats.tools is not None and use is not None else (),
        forces_reasoning=reasons and constraint is not None and thinking.budget != 0,
        budget=0 if enabled is False else thinking.budget,
        formats=formats,
        request=request,
    )


def _constraint(use: ToolUse, tools: ToolFormat, answer: Constraint | None) -> Constraint | None:
    """Return the constraint on the answers, tool calls included."""
    parallel = use.parallel if use.only is None else False
    if use.choice == "required":
        return tools.constraint(use.callable, parallel)
    if use.choice == "none":
        return answer
    if answer is not None:
        return tools.constraint(use.callable, parallel, answer)
    is_checked = any(tool.strict for tool in use.callable)
    return tools.constraint(use.callable, parallel, "any") if is_checked else None


def _prepare(messages: tuple[Message, ...], use: ToolUse | None, formats: ModelFormats) -> PreparedChat:
    wanted = use.callable if use is not None else ()
    if not wanted and not any(message.tool_calls or message.role == "tool" for message in messages):
        return PreparedChat(messages)
    if formats.tools is None:
        param = "tools" if wanted else "messages"
        reason = "no loaded plugin knows how this model calls tools"
        if formats.failed_parser:
            reason = f"{formats.failed_parser} failed for this model; the server's log says how"
        raise UnsupportedParameter(f"{param}: {reason}", param)
    return formats.tools.prepare(messages, wanted)


def _is_enabled(thinking: Thinking, reasoning: ReasoningFormat | None) -> bool | None:
    """Return the reasoning switch; minimal effort disables reasoning where the template has a switch."""
    if thinking.enabled is None and thinking.effort == "minimal" and reasoning is not None and reasoning.has_switch:
        return False
    return False if thinking.budget == 0 else thinking.enabled


def _is_open(reasoning: ReasoningFormat, segments: tuple[Segment, ...]) -> bool:
    # An untrusted end marker was written by a client; it does not open anything.
    return bool(segments) and segments[-1].trusted and reasoning.is_open("".join(segment.text for segment in segments))


def _choose(parsers: Mapping[str, _P], wanted: str | None, chat: ChatFormat) -> _P | None:
    """Return the parser named in the settings, or the one with the highest confidence; ties go to the first."""
    if wanted is not None:
        return None if wanted == "none" else parsers[wanted]
    best, score = None, 0.0
    for parser in parsers.values():
        match = _match(parser, chat)
        if match > score:
            best, score = parser, match
    return best


def _match(parser: ToolParser | ReasoningParser, chat: ChatFormat) -> float:
    try:
        return parser.match(chat)
    except (PluginFailed, RequestError):  # a parser that fails on a template is not used for it
        return 0.0


def _bind(tools: ToolParser | None, reasoning: ReasoningParser | None, chat: ChatFormat) -> ModelFormats:
    bound = _bind_one(reasoning, chat)
    tool_format = _bind_one(tools, chat)
    failed = tools if tool_format is None else None
    return ModelFormats(
        tool_format,
        bound,
        tool_parser=tools.name if tools is not None and tool_format is not None else None,
        reasoning_parser=reasoning.name if reasoning is not None and bound is not None else None,
        template_takes_tools=tool_format is not None and _leaves_tools_to_template(tool_format),
        strict_problem=_strict_problem(tool_format) if tool_format is not None else "",
        failed_parser=str(guard_of(failed, "tool parser")) if failed is not None else "",
    )


def _bind_one(parser: Any, chat: ChatFormat) -> Any:
    """Return the format of a parser; None if it failed, as requests without tools and reasoning can be served."""
    try:
        return parser.bind(chat) if parser is not None else None
    except (PluginFailed, RequestError):
        return None


def _leaves_tools_to_template(tools: ToolFormat) -> bool:
    try:
        return bool(tools.prepare((Message(role="user", content=""),), (_PROBE,)).tools)
    except (PluginFailed, RequestError):  # for display only; requests with tools fail by themselves
        return False


def _strict_problem(tools: ToolFormat) -> str:
    try:
        tools.constraint((_PROBE,), None, "any")
    except UnsupportedParameter as error:
        return error.message.partition(": ")[2]
    except (PluginFailed, RequestError):  # requests with strict tools fail by themselves
        pass
    return ""


def _check_name(registry: PluginRegistry, noun: str, path: str, name: str | None) -> None:
    known = registry.tool_parsers if noun == "tool parser" else registry.reasoning_parsers
    if name is not None and name != "none" and name not in known:
        listed = ", ".join(sorted((*known, "none")))
        raise ConfigError(f"{path}: {registry.missing(noun, name, known)}; known: {listed}", path)
