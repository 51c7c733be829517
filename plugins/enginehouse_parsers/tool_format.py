"""Tool parsers: which format a model has, and what its chats must look like.

A format is derived from the texts that the model's template writes. Named formats serve templates that do not write
calls, and give what was derived a name. ``default`` serves templates without tools.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from attrs import evolve, field, frozen

from enginehouse.contract.parsers import EXAMPLE_TOOLS, RESULTS, ChatFormat, PreparedChat, ToolSession
from enginehouse.contract.types import Constraint, Message, Tool
from enginehouse_parsers.call_session import CallSession
from enginehouse_parsers.calls import Answer, constraint_of
from enginehouse_parsers.derive import NotDerived, derive, read_back
from enginehouse_parsers.described_tools import INSTRUCTING, describe_calls_in_text
from enginehouse_parsers.named import HERMES, NAMED, NamedFormat
from enginehouse_parsers.syntax import ToolSyntax

__all__ = ["SyntaxFormat", "SyntaxToolParser", "default_parser", "takes_tools", "tool_parsers"]

DERIVED, DEFAULT = "template", "default"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}", re.ASCII)


@frozen
class SyntaxFormat:
    """Implements :class:`enginehouse.contract.parsers.ToolFormat`.

    Attributes:
        syntax: how calls are written.
        tools_as_text: the template does not show tools.
        tools_after_system: it shows tools only in a chat that begins with a system message.
        answers_before_questions: it refuses a question after a result without an answer between them.
        calls_as_text: it does not show calls.
        results_as_text: it does not show results.
        explanation: why this format, one sentence per line; the first one describes it.
        control_tokens: the model's control tokens in the syntax.
    """

    syntax: ToolSyntax
    tools_as_text: bool = False
    calls_as_text: bool = False
    results_as_text: bool = False
    explanation: tuple[str, ...] = ()
    control_tokens: tuple[str, ...] = ()
    tools_after_system: bool = False
    answers_before_questions: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """See :class:`enginehouse.contract.parsers.ToolFormat`."""
        syntax = self.syntax
        own = (*syntax.markers, *syntax.after_calls, *syntax.inner_markers, *syntax.ignored, *self.control_tokens)
        return tuple(dict.fromkeys(own))

    def prepare(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> PreparedChat:
        """Return the chat with what the template does not show as text."""
        if self.syntax.is_single and not self.calls_as_text:
            messages = _one_call_each(messages)
        if "<|call|>" in self.syntax.after_calls:
            messages = _with_analysis(messages)
        if "[TOOL_CALLS]" in self.syntax.markers:
            messages = _with_short_ids(messages)
        if self.answers_before_questions:
            messages = _with_answers(messages)
        messages = describe_calls_in_text(
            messages,
            tools if self.tools_as_text else (),
            self.syntax,
            calls=self.calls_as_text,
            results=self.results_as_text,
        )
        if self.tools_after_system and tools and not (messages and messages[0].role in INSTRUCTING):
            messages = (Message(role="system", content=""), *messages)
        return PreparedChat(messages, () if self.tools_as_text else tools)

    def constraint(self, tools: Sequence[Tool], parallel: bool | None, answer: Answer = None) -> Constraint:
        """See ``ToolFormat``. Models not trained to call tools would repeat calls if allowed."""
        return constraint_of(self.syntax, tools, not self.tools_as_text if parallel is None else parallel, answer)

    def open(self, tools: Sequence[Tool]) -> ToolSession:
        """See :class:`enginehouse.contract.parsers.ToolFormat`."""
        return CallSession(self.syntax, tools)


@frozen
class SyntaxToolParser:
    """Implements :class:`enginehouse.contract.parsers.ToolParser`, for one name of a format."""

    name: str
    _named: NamedFormat | None = None
    api_version: int = field(default=1, init=False)

    def match(self, model: ChatFormat) -> float:
        """Full confidence if the template's own texts or its marks are of this format."""
        if self.name == DEFAULT:
            return 0.05
        found = _find(model)
        return 0.9 if found is not None and found[0] == self.name else 0.0

    def bind(self, model: ChatFormat) -> SyntaxFormat:
        """Return the format with the details that this model's template shows."""
        bound = self._bind(model)
        written = bound.syntax.summary
        return evolve(bound, control_tokens=tuple(token for token in model.special_tokens if token in written))

    def _bind(self, model: ChatFormat) -> SyntaxFormat:
        found = _find(model)
        if found is not None and found[0] == self.name:
            return found[1]
        if self._named is not None:
            return _shown(model, self._named.syntax, (f"the settings name the format {self.name!r}",))
        if self.name == DERIVED:
            return _shown(model, HERMES, ("the settings name it, but no format was derived",))
        return SyntaxFormat(HERMES, True, True, True, ("the template does not take tools: they are described in text",))


def tool_parsers() -> tuple[SyntaxToolParser, ...]:
    """Return one parser per named format, one for formats without a name, and the default."""
    named = (SyntaxToolParser(one.name, one) for one in NAMED)
    return (*named, SyntaxToolParser(DERIVED), default_parser())


def default_parser() -> SyntaxToolParser:
    """Return the parser of models whose templates do not take tools."""
    return SyntaxToolParser(DEFAULT)


def takes_tools(model: ChatFormat) -> bool:
    """True if the template shows tools."""
    if "open with tools" not in model.examples:
        return re.search(r"\btools\b", model.template) is not None
    return any(_shows(model, example, EXAMPLE_TOOLS[0].name) for example in ("open with tools", "system and tools"))


def _find(model: ChatFormat) -> tuple[str, SyntaxFormat] | None:
    """Return the name of the model's format and the format; None if its template knows neither tools nor calls."""
    return _find_once(model.template, tuple(model.examples.items()), tuple(model.failures.items()))


@lru_cache(maxsize=32)
def _find_once(
    template: str, examples: tuple[tuple[str, str], ...], failures: tuple[tuple[str, str], ...]
) -> tuple[str, SyntaxFormat] | None:
    model = ChatFormat(template, {}, dict(examples), dict(failures))
    knows_tools = takes_tools(model)
    marked = next((one for one in NAMED if one.marks.search(template)), None)
    if marked is not None and marked.is_fixed:
        lines = (f"the template has the marks of {marked.name!r} ({marked.families}), of which nothing is derived",)
        return marked.name, _shown(model, marked.syntax, lines)
    try:
        syntax = derive(model.examples)
    except NotDerived as error:
        problem = dict(failures).get("call", str(error)) if examples or failures else "the model is not loaded"
        reason = f"no format was derived: {problem}"
    else:
        return _named_after(syntax, marked, model)
    if not knows_tools:
        return None
    if marked is not None:
        lines = (reason, f"the template has the marks of {marked.name!r} ({marked.families})")
        problem = read_back(marked.syntax, model.examples) if "call" in model.examples else ""
        if problem and not _shows(model, "call", "wert_a"):
            problem = ""
        warning = (f"warning: {problem}",) if problem else ()
        return marked.name, _shown(model, marked.syntax, (*lines, *warning))
    lines = (reason, "the template takes tools, but says nowhere how calls are written: JSON between tags is expected")
    return DERIVED, _shown(model, HERMES, lines)


def _named_after(syntax: ToolSyntax, marked: NamedFormat | None, model: ChatFormat) -> tuple[str, SyntaxFormat]:
    """Return a derived format under the name of the known format that has its markers."""
    lines = ["derived from the calls that the template writes"]
    same = next((one for one in NAMED if _is_same(one.syntax, syntax)), None)
    if syntax.is_untyped:
        lines.append("the template writes all values as texts: they are read with the types of the schema")
    if same is not None:
        lines.append(f"this is the format {same.name!r} ({same.families})")
        syntax = evolve(syntax, ignored=same.syntax.ignored, name_extras=same.syntax.name_extras)
        if not syntax.before_calls:
            syntax = evolve(syntax, openers=same.syntax.openers, closers=same.syntax.closers)
    if marked is not None and marked is not same:
        lines.append(f"warning: the template has the marks of {marked.name!r}, but writes calls in another format")
    return (same.name if same is not None else DERIVED), _shown(model, syntax, tuple(lines))


def _is_same(one: ToolSyntax, other: ToolSyntax) -> bool:
    """True if two syntaxes differ at most in white space, separators and markers that may be missing."""
    if one.kind != other.kind or one.parameter_start.strip() != other.parameter_start.strip():
        return False
    if one.kind == "object" and one.name_end != other.name_end:
        return False
    if not other.markers:
        return not one.first_marker and one.section_start.strip() == other.section_start.strip()
    return set(other.markers) <= set(one.markers) and set(other.after_name) <= {*one.after_name}


def _shown(model: ChatFormat, syntax: ToolSyntax, lines: tuple[str, ...]) -> SyntaxFormat:
    """Return the format; what the examples do not show of calls and results is written as text."""
    if not model.examples:
        is_mistral = "[TOOL_CALLS]" in syntax.markers
        return SyntaxFormat(syntax, explanation=(syntax.summary, *lines), answers_before_questions=is_mistral)
    tools_as_text = not takes_tools(model)
    after_system = not tools_as_text and not _shows(model, "open with tools", EXAMPLE_TOOLS[0].name)
    calls_as_text = not _shows(model, "call", "wert_a")
    results_as_text = not _shows(model, "call", RESULTS[0])
    hidden = (("tools", tools_as_text), ("calls", calls_as_text), ("results", results_as_text))
    told = [f"the template does not show {what}: they are written as text" for what, is_hidden in hidden if is_hidden]
    told += ["the template shows tools only after a system message: an empty one is added"] if after_system else []
    refuses = "call" in model.examples and "question after a result" not in model.examples
    told += ["the template refuses a question after a result: an answer is put between them"] if refuses else []
    is_single = syntax.is_single or (not calls_as_text and not _shows(model, "two calls", "wert_g"))
    syntax = evolve(syntax, is_single=is_single)
    return SyntaxFormat(
        syntax,
        tools_as_text,
        calls_as_text,
        results_as_text,
        (syntax.summary, *lines, *told),
        tools_after_system=after_system,
        answers_before_questions=refuses,
    )


def _shows(model: ChatFormat, example: str, text: str) -> bool:
    return text in model.examples.get(example, "")


def _one_call_each(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Split messages with several calls into one turn per call, each before its result."""
    prepared: list[Message] = []
    results: Mapping[str | None, Message] = {one.tool_call_id: one for one in messages if one.role == "tool"}
    moved: set[str] = set()
    for message in messages:
        if message.role == "tool" and message.tool_call_id in moved:
            continue
        if len(message.tool_calls) < 2:
            prepared.append(message)
            continue
        for number, call in enumerate(message.tool_calls):
            prepared.append(evolve(message, content="" if number else message.content, tool_calls=(call,)))
            if call.id in results:
                prepared.append(results[call.id])
                moved.add(call.id)
    return tuple(prepared)


def _with_analysis(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Show the reasoning before a call, which the template of gpt-oss takes from the content."""
    return tuple(
        evolve(one, content=one.reasoning) if one.tool_calls and one.reasoning and not one.content else one
        for one in messages
    )


def _with_answers(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Put an answer between a result and a question."""
    prepared: list[Message] = []
    for message in messages:
        if prepared and prepared[-1].role == "tool" and message.role == "user":
            prepared.append(Message(role="assistant", content="OK."))
        prepared.append(message)
    return tuple(prepared)


def _with_short_ids(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Replace ids by those of nine letters and digits, which Mistral's templates require."""
    prepared: list[Message] = []
    for message in messages:
        calls = tuple(evolve(call, id=_short(call.id)) for call in message.tool_calls)
        call_id = _short(message.tool_call_id or "") if message.role == "tool" else None
        prepared.append(evolve(message, tool_calls=calls, tool_call_id=call_id))
    return tuple(prepared)


def _short(call_id: str) -> str:
    """Return a deterministic id of nine characters."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]
