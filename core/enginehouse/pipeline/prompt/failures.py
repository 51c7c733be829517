"""Explanation of a template's failure: its place, the message that it was at, and the value that it needed.

Called by the sandbox when a template cannot be compiled or fails. Many templates are one long line, so a place is a tag
(``{{ ... }}`` or ``{% ... %}``): an extension numbers the tags, and Jinja keeps these numbers where it keeps lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any

from attrs import evolve, frozen
from jinja2 import Environment, Template, Undefined, UndefinedError, nodes
from jinja2.ext import Extension
from jinja2.lexer import (
    TOKEN_BLOCK_BEGIN,
    TOKEN_BLOCK_END,
    TOKEN_VARIABLE_BEGIN,
    TOKEN_VARIABLE_END,
    Token,
    TokenStream,
)
from jinja2.utils import missing

_MAX_TAG_CHARS = 100
_MAX_VALUES = 100_000
_LOCAL = re.compile(r"l_(\d+)_(.+)")
_BEGIN = (TOKEN_BLOCK_BEGIN, TOKEN_VARIABLE_BEGIN)
_END = (TOKEN_BLOCK_END, TOKEN_VARIABLE_END)


class NumberedTags(Extension):
    """Replaces the line of each token by the number of its tag: 1 for the text before the first tag, then 2, 3, ..."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Yield the tokens with the numbers of their tags."""
        number = 1
        for token in stream:
            number += token.type in _BEGIN
            yield Token(number, token.type, token.value)


class MissingValue(UndefinedError):
    """An undefined value was used: ``name`` of ``owner``; the variable ``name`` if that is Jinja's ``missing``."""

    def __init__(self, owner: Any, name: Any, message: str) -> None:
        super().__init__(message)
        self.owner, self.name = owner, name


class KnownUndefined(Undefined):
    """An undefined value whose use raises :class:`MissingValue`."""

    __slots__ = ()

    def __init__(
        self, hint: str | None = None, obj: Any = missing, name: str | None = None, exc: Any = UndefinedError
    ) -> None:
        raised: Any = partial(MissingValue, obj, name) if exc is UndefinedError else exc  # called with the message
        super().__init__(hint, obj, name, raised)


@lru_cache(maxsize=8)
def number_tags(environment: Environment, source: str) -> tuple[tuple[int, str], ...]:
    """Return line and text of each tag, in the order of their numbers; the first entry is the text before them.

    Raises:
        TemplateSyntaxError: from Jinja's lexer, with the line.
    """
    found: list[tuple[int, list[str]]] = [(1, [])]
    is_open = False
    for line, kind, value in environment.lex(source):
        if kind in _BEGIN:
            found.append((line, []))
            is_open = True
        if is_open:
            found[-1][1].append(value)
        is_open = is_open and kind not in _END
    return tuple((line, " ".join("".join(text).split())) for line, text in found)


@frozen
class Tag:
    """A place in a template. ``text`` is shortened; empty for the text before the first tag."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.text}" if self.text else f"line {self.line}"


def find_tag(environment: Environment, source: str, number: int) -> Tag:
    """Return the tag with a number."""
    line, text = number_tags(environment, source)[max(number, 1) - 1]
    return Tag(line, text if len(text) <= _MAX_TAG_CHARS else f"{text[:_MAX_TAG_CHARS]}...")


@frozen(kw_only=True)
class Failure:
    """Place of a failure, and its cause if that is a missing value.

    Attributes:
        tag: None if the template was not running.
        message: index of the message that the template was at.
        needed: path of a value that is missing or None, as in ``tools`` or ``messages[1].name``.
        is_variable: ``needed`` is a variable of the template that the request does not define.
    """

    tag: Tag | None = None
    message: int | None = None
    needed: str = ""
    is_variable: bool = False


def find_failure(
    error: Exception, template: Template, source: str, variables: Mapping[str, Any], paths: Sequence[str]
) -> Failure:
    """Return what can be said about an exception that came out of a running template.

    Args:
        template: the compiled form of ``source``.
        variables: given to the template.
        paths: of each of the messages in ``variables``, in the request.
    """
    running = _frames(error.__traceback__, template)
    if not running:
        return Failure()
    numbers = (template.get_corresponding_lineno(line) for _, line in running)
    number = next((number for number in numbers if number > 1), 1)  # the code of an unknown filter is before all tags
    scope = _Scope([frame for frame, _ in running], variables)
    place = Failure(tag=find_tag(template.environment, source, number), message=scope.index_in(variables["messages"]))
    known = _Paths(variables, paths)
    if isinstance(error, MissingValue) and error.owner is missing:
        return evolve(place, needed=str(error.name), is_variable=True)
    if isinstance(error, MissingValue) and error.owner is not None:
        return evolve(place, needed=known.of(error.owner, error.name))
    if isinstance(error, MissingValue) or "NoneType" in str(error):
        nones = _nones(template.environment.parse(source), number, scope, known)
        return evolve(place, needed=next(nones, ""))
    return place


def _frames(traceback: TracebackType | None, template: Template) -> list[tuple[FrameType, int]]:
    """Return the frames of a template with their lines, innermost first."""
    found = [
        (frame, line) for frame, line in walk_tb(traceback) if frame.f_globals.get("__jinja_template__") is template
    ]
    return found[::-1]


class _Scope:
    """The variables of a running template."""

    def __init__(self, frames: Sequence[FrameType], variables: Mapping[str, Any]) -> None:
        self._variables = variables
        self._locals = [
            sorted(
                (
                    (int(match[1]), match[2], value)
                    for name, value in dict(frame.f_locals).items()
                    if (match := _LOCAL.fullmatch(name))
                ),
                key=lambda local: -local[0],
            )
            for frame in frames
        ]

    def value(self, name: str) -> Any:
        """Return the value of a variable in the innermost scope that has it; Jinja's ``missing`` if it has none."""
        for found in self._locals:
            for _, local, value in found:
                if local == name and value is not missing:
                    return value
        return self._variables.get(name, missing)

    def index_in(self, messages: Sequence[Any]) -> int | None:
        """Return the index of the message that a variable of the innermost scope holds."""
        indices = {id(message): index for index, message in enumerate(messages)}
        held = (indices.get(id(value)) for found in self._locals for _, _, value in found)
        return next((index for index in held if index is not None), None)


class _Paths:
    """The paths of all objects and lists among the variables, by identity."""

    def __init__(self, variables: Mapping[str, Any], of_messages: Sequence[str]) -> None:
        self._paths: dict[int, str] = {}
        waiting = [
            (value, name if name in ("messages", "tools") else f"chat_template_kwargs.{name}")
            for name, value in variables.items()
            if name != "messages"
        ]
        waiting += zip(variables["messages"], of_messages, strict=True)
        while waiting and len(self._paths) < _MAX_VALUES:
            value, path = waiting.pop()
            if isinstance(value, dict | list):
                self._paths.setdefault(id(value), path)
            if isinstance(value, dict):
                waiting += [(item, f"{path}.{key}") for key, item in value.items()]
            elif isinstance(value, list):
                waiting += [(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def of(self, value: Any, key: Any) -> str:
        """Return the path of an item of an object or a list; empty if that is not among the variables."""
        path = self._paths.get(id(value))
        return "" if path is None else f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"


def _nones(tree: nodes.Template, number: int, scope: _Scope, paths: _Paths) -> Iterator[str]:
    """Yield the paths of values in a tag that are None."""
    for node in tree.find_all(nodes.Expr):
        if node.lineno != number or _value(node, scope) is not None:
            continue
        if isinstance(node, nodes.Name):
            yield node.name if node.name in ("messages", "tools") else f"chat_template_kwargs.{node.name}"
        elif isinstance(node, nodes.Getattr | nodes.Getitem) and (
            path := paths.of(_value(node.node, scope), _key(node))
        ):
            yield path


def _value(node: nodes.Node, scope: _Scope) -> Any:
    """Return the value of a variable or of a path from it; Jinja's ``missing`` for all other expressions."""
    if isinstance(node, nodes.Name):
        return scope.value(node.name)
    if not isinstance(node, nodes.Getattr | nodes.Getitem):
        return missing
    owner, key = _value(node.node, scope), _key(node)
    if isinstance(owner, dict):
        return owner.get(key, missing)
    if isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
        return owner[key]
    return missing


def _key(node: nodes.Getattr | nodes.Getitem) -> Any:
    """Return the constant by which a value is selected; None if it is computed."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    key = node.arg.value if isinstance(node.arg, nodes.Const) else None
    return key if isinstance(key, str | int) else None
