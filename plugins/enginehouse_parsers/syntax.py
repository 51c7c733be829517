"""Description of the way in which a model writes calls, as data: for reading, for enforced calls, and for prompts."""

from __future__ import annotations

import re
from typing import Literal

from attrs import frozen

__all__ = ["ID", "INDEX", "KEY", "NAME", "TYPE", "ToolSyntax", "distinctive", "tokens_of"]

ID, INDEX, KEY, NAME, TYPE = "{id}", "{index}", "{key}", "{name}", "{type}"
"""Placeholders in the texts of a syntax: an id, the number of a call, the name of an argument, that of the function
where it is written twice, a word for the type of an argument."""

_OBJECT = re.compile(r"[\[{]*\{\s*\"")
_WHOLE_MARKERS = re.compile(r"<[^<>{}\s]+>|\[[A-Z_]+\]")
_BOUNDARIES = re.compile(
    r"\n|(?<=>)[ \t]+(?=<)|(?<=[>\]])(?=[<\[\w])|(?<=\w)(?=<)|(?=\{(?:id|index)\})|(?<=\{id\})|(?<=\{index\})"
)


@frozen(kw_only=True)
class ToolSyntax:
    r"""The texts around the parts of calls, as a template writes them, white space included.

    An answer with calls is ``section_start``, calls with ``separator`` between them, ``section_end``. A call is
    ``call_start``, its name, ``name_end``, its arguments, ``call_end``.

    Attributes:
        kind: how the arguments are written: ``object``, the call is a JSON object that holds its name and its arguments
            (``call_start`` is then ``<tool_call>\n{"name": "``); ``named``, a JSON object follows the name;
            ``keywords``, as in a call in Python; ``tagged``, each argument between tags.
        parameter_start: text before the name of a tagged argument.
        key_end: text between its name and its value; it may hold :data:`TYPE`.
        value_end: text after its value; it may hold :data:`KEY`.
        type_words: pairs of a JSON type and the word for it at :data:`TYPE`; that of "" is for all other types.
        quotes: quotation marks of texts besides the usual ones.
        is_untyped: all values of ``named`` or ``keywords`` are in quotation marks; their types are those of the schema.
        is_single: a turn has at most one call.
        openers: markers that begin calls; by default those of ``section_start`` and ``call_start``.
        closers: markers after calls; by default those of ``call_end`` and ``section_end``.
        ignored: further markers that are not text.
        name_extras: further markers that may follow a name, before an id or the arguments.
        text_start: text before an answer that is not a call, after the end of the prompt.
    """

    kind: Literal["object", "named", "keywords", "tagged"]
    section_start: str = ""
    section_end: str = ""
    call_start: str = ""
    call_end: str = ""
    separator: str = ""
    name_end: str = ""
    parameter_start: str = ""
    key_end: str = ""
    value_end: str = ""
    type_words: tuple[tuple[str, str], ...] = ()
    quotes: tuple[str, ...] = ()
    is_untyped: bool = False
    is_single: bool = False
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    name_extras: tuple[str, ...] = ()
    text_start: str = ""

    @property
    def before_calls(self) -> tuple[str, ...]:
        """Tokens that may precede a name or an object, in any order."""
        return self.openers or tokens_of(self.section_start + "\n" + _OBJECT.split(self.call_start)[0])

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that begin calls."""
        return tuple(filter(distinctive, self.before_calls))

    @property
    def after_calls(self) -> tuple[str, ...]:
        """Tokens that end calls."""
        if self.closers:
            return self.closers
        return tuple(filter(distinctive, tokens_of(self.call_end + "\n" + self.section_end)))

    @property
    def after_name(self) -> tuple[str, ...]:
        """Tokens after a name, placeholders included; not those of a JSON object."""
        return (
            self.name_extras if self.kind in ("object", "keywords") else (*tokens_of(self.name_end), *self.name_extras)
        )

    @property
    def inner_markers(self) -> tuple[str, ...]:
        """Markers inside calls."""
        texts = (self.parameter_start, self.key_end, self.value_end, *self.after_name)
        found = (marker for text in texts for marker in _WHOLE_MARKERS.findall(text))
        return tuple(dict.fromkeys((*found, *self.quotes)))

    @property
    def first_marker(self) -> str:
        """The marker with which calls begin; "" if the beginning of a call can be text."""
        start = (self.section_start + self.call_start).lstrip()
        if NAME in start:  # a header, which ends with a marker that is not of calls alone
            start = start.partition(NAME)[2].partition(">")[2]
        return max((marker for marker in self.markers if start.startswith(marker)), key=len, default="")

    @property
    def summary(self) -> str:
        """A call as an example."""
        arguments = {"keywords": "(a=1)", "tagged": ""}.get(self.kind, '{"a": 1}')
        if self.kind == "tagged":
            word = dict(self.type_words).get("", "")
            key_end = self.key_end.replace(TYPE, word)
            arguments = f"{self.parameter_start}a{key_end}1{self.value_end.replace(KEY, 'a')}"
        name_end = "" if self.kind == "keywords" else self.name_end
        start = f"{self.section_start}{self.call_start.replace(NAME, 'f')}"
        return f"{start}f{name_end}{arguments}{self.call_end}{self.section_end}"


def tokens_of(text: str) -> tuple[str, ...]:
    """Return the markers and words in a text between calls, without white space, JSON's brackets and duplicates."""
    pieces = (piece.strip() for piece in _BOUNDARIES.split(text.replace("```json", "\n").replace("```", "\n")))
    found = [piece.strip("{}\"',:") if piece not in (ID, INDEX) else piece for piece in pieces]
    kept = (re.sub(r"^\](?=<|$)|(?<=[>\]])\[$|^\[$", "", piece).strip() for piece in found)
    return tuple(dict.fromkeys(piece for piece in kept if piece))


def distinctive(token: str) -> bool:
    """True if a token does not occur in prose."""
    return (any(char in token for char in "<>[|") or "=func" in token or "```" in token) and len(token) > 2
