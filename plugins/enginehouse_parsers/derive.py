"""Derives how a model writes calls from what its template writes for the example chats.

The examples differ in one thing at a time, so the text of each part of a call is a difference between two of them. What
was derived is verified: a session with the derived syntax must read the calls in the template's own texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from enginehouse.contract.parsers import AnswerText, CallArguments, CallStarted
from enginehouse.contract.template_examples import ANSWER, CALL_IDS, EXAMPLE_TOOLS, EXAMPLES, QUESTION, RESULTS
from enginehouse_parsers.call_session import CallSession
from enginehouse_parsers.syntax import ID, INDEX, KEY, TYPE, ToolSyntax, distinctive, tokens_of

__all__ = ["NotDerived", "derive", "read_back", "turn_of"]

_FIRST, _SECOND, _THIRD = (tool.name for tool in EXAMPLE_TOOLS)
_A, _G = "key_a", "key_g"
_VALUE_A, _VALUE_G = "wert_a", "wert_g"
_TYPES = ("string", "integer", "boolean", "array", "object", "string")
_CALLING = ("two calls", "call", "values", "no arguments")


class NotDerived(Exception):
    """The examples do not say how calls are written; the message says why."""


def derive(examples: Mapping[str, str]) -> ToolSyntax:
    """Return the syntax of calls.

    Raises:
        NotDerived: no example shows a call, or the calls are in no form that a syntax can describe.
    """
    if "call" not in examples:
        raise NotDerived("the template cannot write a call")
    if _FIRST not in turn_of("call", examples) or _VALUE_A not in turn_of("call", examples):
        raise NotDerived("the template does not write calls")
    syntax = _of_object(examples) or _of_name(examples) or _of_tags(examples)
    problem = read_back(syntax, examples)
    if not problem:
        return syntax
    syntax = evolve(syntax, is_untyped=syntax.kind in ("named", "keywords"))
    if not syntax.is_untyped or read_back(syntax, examples):
        raise NotDerived(problem)
    return syntax


def turn_of(name: str, examples: Mapping[str, str]) -> str:
    """Return the text of the assistant's turn and what follows it up to the first result, ids replaced."""
    text = examples.get(name, "")
    start = text.rfind(QUESTION) + len(QUESTION)
    end = text.find(RESULTS[0], start)
    text = text[start : end if end >= 0 else len(text)]
    for call_id in CALL_IDS:
        text = text.replace(call_id, ID)
    return text


def read_back(syntax: ToolSyntax, examples: Mapping[str, str]) -> str:
    """Return what a session does not read of the calls in the examples; "" if it reads all of them."""
    for name in _CALLING:
        if name not in examples or (name == "two calls" and syntax.is_single):
            continue
        turn = _calls_of(name, examples, syntax)
        session = CallSession(syntax, EXAMPLE_TOOLS)
        parts = [*session.push(turn), *session.flush(is_cut=False)]
        expected = [(call.name, json.loads(call.arguments)) for call in EXAMPLES[name].messages[1].tool_calls]
        found: list[tuple[str, str]] = []
        for part in parts:
            if isinstance(part, CallStarted):
                found.append((part.name, ""))
            elif isinstance(part, CallArguments):
                found[-1] = (found[-1][0], found[-1][1] + part.text)
        if [(called, json.loads(text)) for called, text in found] != expected:
            shown = "".join(part.text for part in parts if isinstance(part, AnswerText))
            return f"what it writes for {name!r} is not read: {turn!r} gives {found or shown!r}"
    return ""


def _calls_of(name: str, examples: Mapping[str, str], syntax: ToolSyntax) -> str:
    """Return the part of a turn that the model itself would write, from its first marker on."""
    text = examples[name]
    start = text.rfind(QUESTION) + len(QUESTION)
    end = text.find(RESULTS[0], start)
    turn = text[start : end if end >= 0 else len(text)]
    called = EXAMPLES[name].messages[1].tool_calls[0].name
    place = turn.find(called)
    places = [turn.rfind(marker, 0, place) for marker in syntax.before_calls if distinctive(marker)]
    found = [position for position in places if position >= 0]
    if found:
        first = turn.find(syntax.markers[0], 0, place)
        return turn[first if first >= 0 else min(found) :]
    opening = [turn.rfind(bracket, 0, place) for bracket in ("[", "{")]
    return turn[max(opening) if syntax.kind == "object" else opening[0] if opening[0] >= 0 else place :]


# -- the text around calls ------------------------------------------------------------------------


def _before_first(examples: Mapping[str, str], name: str, place: int) -> str:
    """Return the text of a turn before its first call, without what precedes any answer."""
    turn = turn_of(name, examples)[:place]
    leads = [examples[key] for key in ("open with tools", "open", "open, reasoning off") if key in examples]
    leads = [lead[lead.rfind(QUESTION) + len(QUESTION) :] for lead in leads]
    if "answer" in examples and ANSWER in examples["answer"]:
        text = examples["answer"]
        leads.append(text[text.rfind(QUESTION) + len(QUESTION) : text.rfind(ANSWER)])
    longest = max((_common_start(turn, lead) for lead in leads), default=0)
    start = _token_start(turn, longest)
    rest = turn[start:]
    closed = max((rest.rfind(tag) + len(tag) for tag in re.findall(r"</[\w:]*think[\w:]*>", rest)), default=0)
    return rest[closed:]


def _common_start(one: str, other: str) -> int:
    return next(
        (size for size, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _token_start(text: str, end: int) -> int:
    """Return ``end``, or the beginning of the marker that it is inside of."""
    begin = max(text.rfind("<", 0, end), text.rfind("[", 0, end))
    if begin >= 0 and not re.search(r"[>\]]", text[begin:end]) and "\n" not in text[begin:end]:
        return begin
    return end


def _common_end(one: str, other: str) -> str:
    size = _common_start(one[::-1], other[::-1])
    return one[len(one) - size :]


def _end_of_turn(examples: Mapping[str, str]) -> str:
    """Return the first marker after an answer."""
    text = examples.get("answer", "")
    found = tokens_of(text[text.rfind(ANSWER) + len(ANSWER) :]) if ANSWER in text else ()
    return found[0] if found else ""


@frozen
class _Around:
    """The parts of two calls: texts before the first one's name, between the calls, and after the second one."""

    before: str
    between: str | None
    after: str


def _framed(syntax: ToolSyntax, around: _Around, examples: Mapping[str, str]) -> ToolSyntax:
    """Return the syntax with what is around calls: sections, the beginnings and ends of calls, separators."""
    end_of_turn = _end_of_turn(examples)
    if around.between is None:
        call_end = _first_tokens(around.after, len(tokens_of(_without_object(around.before))) or 0, end_of_turn)
        brackets = _list_end(around.before, around.after)
        return evolve(syntax, call_start=around.before, call_end=call_end or brackets, is_single=True)
    call_start = _common_end(around.before, around.between)
    call_start = call_start[_begin_of_marker(around.before, len(around.before) - len(call_start), call_start) :]
    section_start = around.before[: len(around.before) - len(call_start)]
    rest = around.between[: len(around.between) - len(call_start)]
    size = _common_start(rest, around.after)
    if size < len(rest):
        size = _token_start(rest, size)
    call_end, separator = rest[:size], rest[size:]
    kept = len(call_end.rstrip())
    tail = around.after[size:]
    if not separator:
        call_end, separator = call_end[:kept], call_end[kept:]
        tail = around.after[kept:]
    section_end = ""
    if section_start.strip():
        wanted = len(tokens_of(section_start))
        section_end = _list_end(section_start, tail)
        section_end += _first_tokens(tail[len(section_end) :], wanted, end_of_turn)
        if not section_end:
            call_start, section_start = section_start + call_start, ""
    return evolve(
        syntax,
        section_start=section_start,
        section_end=section_end,
        call_start=call_start,
        call_end=call_end,
        separator=separator,
    )


def _without_object(text: str) -> str:
    return re.split(r'[\[{]*\{\s*"', text)[0]


def _list_end(start: str, end: str) -> str:
    """Return the bracket that closes a list which ``start`` opens."""
    if not re.search(r"\[\s*$", start) and not re.search(r"\[\s*(?=\{)", start):
        return ""
    found = re.match(r"\s*\]", end)
    return found[0] if found else ""


def _begin_of_marker(text: str, position: int, suffix: str) -> int:
    """Return where in ``suffix`` its first whole marker or white space begins."""
    if not suffix or position == 0 or text[position - 1].isspace() or suffix[0] in "<[{":
        return 0
    if text[position - 1] in ">]" and not suffix[0].isalnum():
        return 0
    found = re.search(r"\s|<|\[|\{", suffix)
    if found is not None and not re.search(r"<[^<>]*$", text[:position]):
        return 0
    return found.start() if found else len(suffix)


def _first_tokens(text: str, count: int, end_of_turn: str) -> str:
    """Return the beginning of a text with at most ``count`` markers, up to the end of the turn."""
    position = 0
    for _ in range(count):
        found = re.compile(r"\s*(<[^<>\s]*>|\[/?[A-Z_]+\])").match(text, position)
        if found is None or found[1] == end_of_turn or end_of_turn.startswith(found[1]):
            break
        position = found.end()
    return text[:position]


# -- calls that are objects -----------------------------------------------------------------------


def _of_object(examples: Mapping[str, str]) -> ToolSyntax | None:
    """Return the syntax if a call is a JSON object that holds its name."""
    turn = turn_of("two calls", examples) if _shows_two(examples) else turn_of("call", examples)
    first = _object_with(turn, 0, _FIRST)
    if first is None:
        return None
    start, end, value = first
    inner = turn[start:end]
    place = inner.find(f'"{_FIRST}"') + 1
    arguments = _arguments_in(inner)
    if arguments is None or place == 0:
        return None
    if arguments[0] > place:
        call_start, name_end = inner[:place], inner[place + len(_FIRST) : arguments[0]]
        tail = inner[arguments[1] :]
    else:  # arguments come first: the name, which a constraint needs first, can come first as well
        key = next((key for key, item in value.items() if isinstance(item, dict)), "arguments")
        call_start, name_end, tail = '{"name": "', f'", "{key}": ', "}"
    tail = re.sub(r',\s*"[\w]+":\s*"\{id\}"', "", tail)
    call_start = re.sub(r'"(\w*id)": "\d+"', rf'"\1": "{INDEX}"', call_start)
    before = _before_first(examples, "two calls" if _shows_two(examples) else "call", start)
    second = _object_with(turn, end, _SECOND) if _shows_two(examples) else None
    between, after = None, turn[end:]
    if second is not None:
        between, after = turn[end : second[0]], turn[second[1] :]
    syntax = ToolSyntax(kind="object", name_end=name_end)
    framed = _framed(syntax, _Around(before, between, after), examples)
    framed = evolve(framed, call_start=framed.call_start + call_start, call_end=tail + framed.call_end)
    lead = framed.section_start.strip().removesuffix("[").rstrip()
    if not framed.markers and lead.endswith("```json"):  # words before a fence, which mark calls only together
        framed = evolve(framed, openers=(lead,))
    return framed


def _shows_two(examples: Mapping[str, str]) -> bool:
    turn = turn_of("two calls", examples)
    return _FIRST in turn and _SECOND in turn and _VALUE_G in turn


def _object_with(text: str, position: int, name: str) -> tuple[int, int, dict[str, Any]] | None:
    """Return the span and the value of the first object from a position on that holds a name and an object."""
    while (start := text.find("{", position)) >= 0:
        position = start + 1
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        if isinstance(value, dict) and (name in value or name in map(_text, value.values())):
            return start, end, value
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _arguments_in(inner: str) -> tuple[int, int] | None:
    """Return the span of the arguments in the text of a call."""
    for found in re.finditer(r"\{", inner):
        try:
            value, end = json.JSONDecoder().raw_decode(inner, found.start())
        except ValueError:
            continue
        if value == {_A: _VALUE_A}:
            return found.start(), end
    return None


# -- calls that begin with a name ------------------------------------------------------------------


def _parts(examples: Mapping[str, str]) -> tuple[str, str, int, int]:
    """Return the example with the most calls, its turn, and where its first name and first argument begin."""
    name = "two calls" if _shows_two(examples) else "call"
    turn = turn_of(name, examples)
    key = turn.find(_A)
    place = turn.rfind(_FIRST, 0, key)
    if place < 0 or key < 0:
        raise NotDerived("its calls begin with their arguments")
    return name, turn, place, key


def _of_name(examples: Mapping[str, str]) -> ToolSyntax | None:
    """Return the syntax if an object or keyword arguments follow the name."""
    name, turn, place, key = _parts(examples)
    after_name = turn[place + len(_FIRST) : key]
    opening = max(after_name.rfind("{"), after_name.rfind("("))
    if opening < 0 or after_name[opening + 1 :].strip("\"' ") or "<" in after_name[opening:]:
        return None
    between_key = turn[key + len(_A) : turn.find(_VALUE_A, key)]
    if not re.fullmatch(r"[\"']?\s*[:=]\s*(.*)", between_key, re.DOTALL):
        return None
    quote = re.sub(r"^[\"']?\s*[:=]\s*", "", between_key)
    closer = {"{": "}", "(": ")"}[after_name[opening]]
    first_end = turn.find(closer, turn.find(_VALUE_A, key)) + 1
    name_end = after_name[:opening]
    between, after = None, turn[first_end:]
    if name == "two calls":
        second = turn.find(_SECOND, first_end)
        between = turn[first_end:second]
        after = turn[turn.find(closer, turn.find(_VALUE_G, second)) + 1 :]
    number = re.search(r"\d+", name_end)
    if number is not None and ID not in name_end:
        name_end = name_end.replace(number[0], INDEX, 1)
    kind = "keywords" if closer == ")" else "named"
    quotes = (quote,) if quote not in ("'", '"', "") else ()
    syntax = ToolSyntax(kind=kind, name_end=name_end, quotes=quotes)  # type: ignore[arg-type] # one of two
    return _framed(syntax, _Around(_before_first(examples, name, place), between, after), examples)


# -- calls whose arguments are between tags --------------------------------------------------------


def _of_tags(examples: Mapping[str, str]) -> ToolSyntax:
    """Return the syntax if each argument is between tags of its own."""
    if "values" not in examples:
        raise NotDerived("its arguments are between tags, and it cannot write all types of them")
    turn = turn_of("values", examples)
    keys = [f"key_{letter}" for letter in "abcdef"]
    place = turn.rfind(_FIRST, 0, turn.find(keys[0]))
    starts = _places(turn, keys, place)
    value_places = [turn.find(text, start) for text, start in zip(("wert_a", "31415"), starts[:2], strict=True)]
    if min(value_places) < 0:
        raise NotDerived("its arguments are not written one after the other")
    head = turn[place + len(_FIRST) : starts[0]]
    first_end = value_places[0] + len(_VALUE_A)
    between = turn[first_end : starts[1]]
    start = _common_end(head, between)
    start = start[_begin_of_tag(start) :]
    name_end = head[: len(head) - len(start)]
    value_end = between[: len(between) - len(start)]
    number_end = turn[value_places[1] + len("31415") : starts[2]]
    value_end = _with_key(value_end, number_end[: len(number_end) - len(start)], keys)
    key_ends = [turn[starts[0] + len(keys[0]) : value_places[0]], turn[starts[1] + len(keys[1]) : value_places[1]]]
    key_end, words = _typed_key_end(key_ends, turn, starts, keys)
    if not start.strip() or not value_end.strip():
        raise NotDerived(f"its arguments are not between tags: {turn[place:]!r}")
    syntax = ToolSyntax(
        kind="tagged", name_end=name_end, parameter_start=start, key_end=key_end, value_end=value_end, type_words=words
    )
    return _around_tags(syntax, examples)


def _places(turn: str, keys: Sequence[str], position: int) -> list[int]:
    places = []
    for key in keys:
        position = turn.find(key, position)
        if position < 0:
            raise NotDerived(f"it does not write the argument {key!r}")
        places.append(position)
        position += len(key)
        if (repeated := re.match(rf"[^\n]*?</{key}>", turn[position:])) is not None:  # the key is in the end tag too
            position += repeated.end()
    return places


def _begin_of_tag(text: str) -> int:
    found = re.search(r"\s*<|\s*\[|\s*\]<", text)
    return found.start() if found else 0


def _with_key(first: str, second: str, keys: Sequence[str]) -> str:
    """Return the text after values, with a placeholder where it holds the argument's name."""
    if first == second or keys[0] not in first:
        return first
    return first.replace(keys[0], KEY)


def _typed_key_end(
    key_ends: Sequence[str], turn: str, starts: Sequence[int], keys: Sequence[str]
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the text between a name and its value, and the words for types in it."""
    text, number = key_ends
    if text == number:
        return text, ()
    size = _common_start(text, number)
    end = len(_common_end(text[size:], number[size:]))
    before = re.sub(r"[\w-]+$", "", text[:size])  # words for types may begin or end alike
    after = re.sub(r"^[\w-]+", "", text[len(text) - end :])
    words: dict[str, str] = {}
    for kind, start, key in zip(_TYPES, starts, keys, strict=True):
        found = re.compile(rf"{re.escape(before)}([\w-]+){re.escape(after)}").match(turn, start + len(key))
        if found is None:
            raise NotDerived("it writes the types of arguments in different places")
        words.setdefault(kind, found[1])
    others = {word for kind, word in words.items() if kind != "string"}
    if len(others) == 1:
        words = {"string": words["string"], "": others.pop()}
    return f"{before}{TYPE}{after}", tuple(words.items())


def _around_tags(syntax: ToolSyntax, examples: Mapping[str, str]) -> ToolSyntax:
    name, turn, place, _ = _parts(examples)
    last_end = syntax.value_end.strip()
    ends = [turn.find(last_end.replace(KEY, key), turn.find(value)) for key, value in ((_A, _VALUE_A), (_G, _VALUE_G))]
    after_first = ends[0] + len(last_end.replace(KEY, _A))
    tail = syntax.value_end[len(syntax.value_end.rstrip()) :]
    between, after = None, turn[after_first:]
    if name == "two calls":
        second = turn.find(_SECOND, after_first)
        between = turn[after_first:second]
        after = turn[ends[1] + len(last_end.replace(KEY, _G)) :]
    framed = _framed(syntax, _Around(_before_first(examples, name, place), between, after), examples)
    if tail and framed.call_end.startswith(tail):
        framed = evolve(framed, call_end=framed.call_end[len(tail) :])
    return framed
