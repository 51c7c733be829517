r"""Converts a Lark grammar that describes a regular language to one regular expression.

The input of a custom tool is a string inside the JSON of its call, where only a ``pattern`` can be enforced, with its
characters escaped. Most grammars of tools (OpenAI's ``apply_patch``, command lines, dates) are regular. A rule may
refer to itself at the beginning or at the end of an alternative, as lists do; nested structures are refused.

Source: the grammar of Lark's own grammar files, https://lark-parser.readthedocs.io/en/stable/grammar.html; rules that
refer to themselves are solved with Arden's rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import frozen

from enginehouse.contract.errors import quoted

__all__ = ["LarkProblem", "regex_of_lark"]

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f]+|\\\n|(?://|\#)[^\n]*)
    |(?P<line>\n\s*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<directive>%[a-z]+)
    |(?P<name>[!?]*_?[A-Za-z][A-Za-z0-9_]*)
    |(?P<number>\d+)
    |(?P<sign>\.\.|->|[:|()\[\]?*+~.,{}])""",
    re.VERBOSE,
)
_COMMON = {
    "CNAME": r"[A-Za-z_][A-Za-z0-9_]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": r"[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "LCASE_LETTER": r"[a-z]",
    "LETTER": r"[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "0": "\0"}
_META = frozenset(".^$*+?()[]{}|\\/")
_MAX_TOKENS = 5_000
_MAX_DEPTH = 64


class LarkProblem(ValueError):
    """The grammar is malformed, or not regular."""


@frozen
class _Leaf:
    """A terminal as a regular expression."""

    regex: str


@frozen
class _Ref:
    name: str


@frozen
class _Chain:
    parts: tuple[_Node, ...]


@frozen
class _Either:
    options: tuple[_Node, ...]


@frozen
class _Many:
    """A repetition; ``times`` is the quantifier of a regular expression."""

    part: _Node
    times: str


_Node = _Leaf | _Ref | _Chain | _Either | _Many


def regex_of_lark(text: str, max_chars: int) -> str:
    """Return a regular expression that matches exactly what the rule ``start`` matches.

    Raises:
        LarkProblem: says what is wrong with the grammar, or that it is not regular.
    """
    grammar = _Grammar(_Reader(text))
    return grammar.regex("start", max_chars)


class _Reader:
    """Reads the rules of a grammar file.

    Attributes:
        rules: by name, terminals too.
        ignored: what may be between two terminals.
    """

    def __init__(self, text: str) -> None:
        self.rules: dict[str, _Node] = {}
        self.ignored: list[_Node] = []
        self._tokens = list(_tokens(text))
        self._at = 0
        while self._kind != "end":
            if self._kind == "line":
                self._at += 1
            elif self._kind == "directive":
                self._directive()
            else:
                self._rule()

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def _value(self) -> str:
        return self._tokens[self._at][1]

    def _take(self, *values: str) -> str | None:
        """Return the next token if it is one of ``values``."""
        if self._kind == "sign" and self._value in values:
            self._at += 1
            return self._tokens[self._at - 1][1]
        return None

    def _need(self, kind: str, what: str) -> str:
        if self._kind != kind:
            raise LarkProblem(f"line {self._line}: expected {what}, not {quoted(self._value.strip(), 40)}")
        self._at += 1
        return self._tokens[self._at - 1][1]

    @property
    def _line(self) -> int:
        return 1 + sum(value.count("\n") for _, value in self._tokens[: self._at])

    def _directive(self) -> None:
        name = self._need("directive", "a directive")
        if name == "%ignore":
            self.ignored.append(self._alternatives(0))
        elif name == "%import":
            self._import()
        else:
            raise LarkProblem(f"line {self._line}: the directive {name} is not supported")

    def _import(self) -> None:
        module = self._need("name", "a module")
        if module != "common" or self._take(".") is None:
            raise LarkProblem(f"line {self._line}: only 'common' can be imported")
        names = []
        if self._take("("):
            names.append(self._need("name", "a terminal"))
            while self._take(","):
                names.append(self._need("name", "a terminal"))
            self._take(")")
        else:
            names.append(self._need("name", "a terminal"))
        alias = self._need("name", "a name") if self._take("->") else None
        for name in names:
            if name not in _COMMON:
                raise LarkProblem(f"line {self._line}: unknown terminal common.{name}")
            self.rules[alias or name] = _Leaf(_COMMON[name])

    def _rule(self) -> None:
        name = self._need("name", "a rule").lstrip("!?")
        if self._take("."):
            self._need("number", "a priority")
        if self._take(":") is None:
            raise LarkProblem(
                f"line {self._line}: expected ':' after {name!r}; rules with parameters are not supported"
            )
        if name in self.rules:
            raise LarkProblem(f"the rule {name!r} is defined twice")
        self.rules[name] = self._alternatives(0)

    def _alternatives(self, depth: int) -> _Node:
        if depth > _MAX_DEPTH:
            raise LarkProblem("brackets are nested too deeply")
        options = [self._chain(depth)]
        while self._bar():
            options.append(self._chain(depth))
        return options[0] if len(options) == 1 else _Either(tuple(options))

    def _bar(self) -> bool:
        """Take ``|``, also at the beginning of the next line."""
        if self._kind == "line" and self._tokens[self._at + 1] == ("sign", "|"):
            self._at += 1
        return self._take("|") is not None

    def _chain(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while (part := self._part(depth)) is not None:
            parts.append(part)
        if self._take("->"):
            self._need("name", "an alias")
        return parts[0] if len(parts) == 1 else _Chain(tuple(parts))

    def _part(self, depth: int) -> _Node | None:
        atom = self._atom(depth)
        if atom is None:
            return None
        if sign := self._take("?", "*", "+"):
            return _Many(atom, sign)
        if self._take("~"):
            least = self._need("number", "a count")
            most = self._need("number", "a count") if self._take("..") else None
            return _Many(atom, f"{{{least}}}" if most is None else f"{{{least},{most}}}")
        return atom

    def _atom(self, depth: int) -> _Node | None:
        if self._kind == "text":
            first = self._need("text", "a string")
            if self._take(".."):
                return _Leaf(f"[{_of_class(_literal(first))}-{_of_class(_literal(self._need('text', 'a string')))}]")
            return _Leaf(_exactly(first))
        if self._kind == "regex":
            return _Leaf(_expression(self._need("regex", "an expression")))
        if self._kind == "name":
            return _Ref(self._need("name", "a name"))
        if opening := self._take("(", "["):
            inner = self._alternatives(depth + 1)
            while self._kind == "line":
                self._at += 1
            if self._take(")" if opening == "(" else "]") is None:
                raise LarkProblem(f"line {self._line}: unbalanced {opening!r}")
            return inner if opening == "(" else _Many(inner, "?")
        return None


class _Grammar:
    """Puts the rules into each other."""

    def __init__(self, reader: _Reader) -> None:
        self._rules = reader.rules
        self._done: dict[str, str] = {}
        self._open: list[str] = []
        self._max_chars = 0
        self._gap = ""
        self._ignored = reader.ignored

    def regex(self, start: str, max_chars: int) -> str:
        """Return the expression of a rule."""
        self._max_chars = max_chars
        if self._ignored:
            gap = "|".join(self._write(node, is_terminal=True) for node in self._ignored)
            self._gap = f"(?:{gap})*"
        return self._gap + self._rule(start)

    def _rule(self, name: str) -> str:
        if name in self._done:
            return self._done[name]
        if name not in self._rules:
            raise LarkProblem(f"unknown rule {name!r}")
        if name in self._open:
            raise LarkProblem(
                f"the rule {name!r} refers to itself: only regular grammars can be enforced in a call, in which a rule "
                "refers to itself at most at the beginning or the end of an alternative"
            )
        self._open.append(name)
        node = self._rules[name]
        is_terminal = name.lstrip("_").isupper()
        if len(self._open) > _MAX_DEPTH:
            raise LarkProblem(f"more than {_MAX_DEPTH} rules refer to each other in a row")
        regex = self._write(node, is_terminal) if is_terminal else self._solved(name, node)
        if is_terminal:
            regex += self._gap
        self._open.pop()
        if len(regex) > self._max_chars:
            raise LarkProblem(f"it becomes an expression of more than {self._max_chars} characters")
        self._done[name] = f"(?:{regex})"
        return self._done[name]

    def _solved(self, name: str, node: _Node) -> str:
        """Write a rule, which may refer to itself at one end of its alternatives: ``X: X a | b`` is ``b a*``."""
        options = node.options if isinstance(node, _Either) else (node,)
        before, after, others = [], [], []
        for option in options:
            parts = option.parts if isinstance(option, _Chain) else (option,)
            if len(parts) > 1 and parts[0] == _Ref(name):
                after.append(self._write(_Chain(parts[1:]), is_terminal=False))
            elif len(parts) > 1 and parts[-1] == _Ref(name):
                before.append(self._write(_Chain(parts[:-1]), is_terminal=False))
            else:
                others.append(self._write(option, is_terminal=False))
        if not others:
            raise LarkProblem(f"the rule {name!r} never ends")
        regex = "|".join(others)
        if before or after:
            head = f"(?:{'|'.join(before)})*" if before else ""
            tail = f"(?:{'|'.join(after)})*" if after else ""
            regex = f"{head}(?:{regex}){tail}"
        return regex

    def _write(self, node: _Node, is_terminal: bool) -> str:
        """Return the expression of a part of a rule; ignored text may follow each terminal outside of terminals."""
        match node:
            case _Leaf(regex):
                return regex if is_terminal else regex + self._gap
            case _Ref(name):
                return self._rule(name)
            case _Chain(parts):
                return self._join("", parts, is_terminal)
            case _Either(options):
                return f"(?:{self._join('|', options, is_terminal)})"
            case _Many(part, times):
                return f"(?:{self._write(part, is_terminal)}){times}"

    def _join(self, between: str, parts: tuple[_Node, ...], is_terminal: bool) -> str:
        written, num_chars = [], 0
        for part in parts:
            written.append(self._write(part, is_terminal))
            num_chars += len(written[-1]) + len(between)
            if num_chars > self._max_chars:
                raise LarkProblem(f"it becomes an expression of more than {self._max_chars} characters")
        return between.join(written)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, count, depth = 0, 0, 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            line = text.count("\n", 0, at) + 1
            raise LarkProblem(f"line {line}: cannot read {text[at : at + 20]!r}")
        at, kind = found.end(), str(found.lastgroup)
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(found[0], 0) if kind == "sign" else 0
        if kind != "space" and not (kind == "line" and depth > 0):
            count += 1
            yield kind, found[0]
        if count > _MAX_TOKENS:
            raise LarkProblem(f"more than {_MAX_TOKENS} tokens are not supported")
    yield "end", ""
    yield "end", ""


def _literal(token: str) -> str:
    """Return the characters of a string in quotes."""
    body = token[1 : token.rindex('"')]

    def plain(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        return chr(int(code, 16)) if code else _ESCAPES.get(found[4], found[4])

    return re.sub(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", plain, body)


def _exactly(token: str) -> str:
    text = _literal(token)
    if not token.endswith("i"):
        return f"(?:{''.join(map(_of_text, text))})" if len(text) != 1 else _of_text(text)
    pairs = ("".join(sorted({char.lower(), char.upper()})) for char in text)
    return f"(?:{''.join(f'[{pair}]' if len(pair) > 1 else _of_text(pair) for pair in pairs)})"


def _of_text(char: str) -> str:
    return f"\\{char}" if char in _META else _of_control(char)


def _of_class(char: str) -> str:
    return f"\\{char}" if char in "\\]^-[" else _of_control(char)


def _of_control(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 32 else char


def _expression(token: str) -> str:
    body, _, flags = token[1:].rpartition("/")
    if flags:
        raise LarkProblem(f"the flags {flags!r} of /{body[:40]}/ are not supported")
    return f"(?:{body})"
