"""Translates regular expressions of requests to the library's dialect, matching whole texts.

Accepted is the common subset of ECMAScript and Python. Where the two disagree on the members of a class (``\\w``,
``.``), the translation matches only what both match, so that the answer validates with either. Look-ahead whose
remainder extends to the end of the text becomes an intersection with the expression after it (``automata``). Other
look-ahead, look-behind, back-references, word boundaries and flags are refused by name. Called for ``pattern``,
``patternProperties`` and for constraints that are regular expressions.
"""

from __future__ import annotations

from attrs import define, field, frozen

from enginehouse_llguidance.automata import AutomatonError, restricted

__all__ = ["ANY_TEXT", "Pattern", "PatternError", "escape_text", "translate_pattern"]

ANY_TEXT = "(?s:.)*"

_DIGITS, _WORD, _SPACES = "0-9", "0-9A-Za-z_", "\\t\\n\\x{b}\\x{c}\\r\\x{20}"
_WIDE_WORD = "\\p{L}\\p{M}\\p{N}\\p{Pc}"
_WIDE_SPACES = (
    "\\t-\\r\\x{1c}-\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{180e}\\x{2000}-\\x{200b}\\x{2028}\\x{2029}"
    "\\x{202f}\\x{205f}\\x{3000}\\x{feff}"
)
# Characters that both dialects match, and those that either matches.
_NARROW = {"d": _DIGITS, "w": _WORD, "s": _SPACES, "D": "[^\\p{N}]", "W": f"[^{_WIDE_WORD}]", "S": f"[^{_WIDE_SPACES}]"}
_WIDE = {
    "d": "\\p{N}",
    "w": _WIDE_WORD,
    "s": _WIDE_SPACES,
    "D": f"[^{_DIGITS}]",
    "W": f"[^{_WORD}]",
    "S": f"[^{_SPACES}]",
}
_DOT = "[^\\n\\r\\x{2028}\\x{2029}]"
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_CATEGORIES = {
    **{"Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt"},
    **{"Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc"},
    **{"Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl"},
    **{"Other_Number": "No", "Punctuation": "P", "punct": "P", "Connector_Punctuation": "Pc", "Dash_Punctuation": "Pd"},
    **{"Open_Punctuation": "Ps", "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf"},
    **{"Other_Punctuation": "Po", "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Modifier_Symbol": "Sk"},
    **{"Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl"},
    **{"Paragraph_Separator": "Zp"},
}
"""Long names of the general categories, in ECMAScript, and their short ones."""
_MAX_REPETITIONS = 100_000
_MAX_OPTIONS = 10_000
_NOT_ASCII = "\\x{80}-\\x{10ffff}"
# Characters that either dialect may match, used in negations: everything beyond ASCII counts as matching.
_WIDEST = {
    "d": f"{_DIGITS}{_NOT_ASCII}",
    "w": f"{_WORD}{_NOT_ASCII}",
    "s": f"\\t-\\r\\x{{1c}}-\\x{{20}}{_NOT_ASCII}",
    "D": f"\\x{{0}}-\\x{{2f}}\\x{{3a}}-\\x{{7f}}{_NOT_ASCII}",
    "W": f"\\x{{0}}-\\x{{2f}}\\x{{3a}}-\\x{{40}}\\x{{5b}}-\\x{{5e}}\\x{{60}}\\x{{7b}}-\\x{{7f}}{_NOT_ASCII}",
    "S": f"\\x{{0}}-\\x{{8}}\\x{{e}}-\\x{{1b}}\\x{{21}}-\\x{{7f}}{_NOT_ASCII}",
}


class PatternError(ValueError):
    """The expression is malformed or uses an unsupported feature; the message contains the position."""


@frozen
class Pattern:
    """A translated expression.

    Attributes:
        regex: matches the whole text; without anchors.
        depends_on_dialect: dialects disagree on some text with characters other than ASCII letters, digits and
            punctuation, so the *absence* of a match proves nothing.
        is_finite: it matches a finite number of texts.
    """

    regex: str
    depends_on_dialect: bool
    is_finite: bool


def translate_pattern(pattern: str, *, search: bool, max_depth: int = 64, is_widened: bool = False) -> Pattern:
    """Translate an expression.

    Args:
        search: it may match anywhere in the text (JSON Schema); otherwise it must match the whole text.
        is_widened: match what either dialect may match, except before a final line break.

    Raises:
        PatternError: the expression is malformed or not supported.
    """
    parser = _Parser(pattern, max_depth, is_widened=is_widened)
    alternatives = parser.read_alternatives(0)
    if parser.position < len(pattern):
        raise parser.error("unbalanced ')'")
    options = [_whole(option, search) for option in _unwrap(alternatives)]
    regex = options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"
    is_finite = not parser.is_unbounded and not any(ANY_TEXT in option for option in options)
    return Pattern(regex, parser.depends_on_dialect, is_finite)


def escape_text(text: str) -> str:
    """Return an expression that matches exactly this text."""
    return "".join(map(_escape, text))


@frozen
class _Anchor:
    is_start: bool


@frozen
class _Class:
    """A named class, such as ``d`` or ``pLu``."""

    name: str


@frozen
class _Group:
    """A group without a quantifier, whose anchors may turn out to be at an edge of the text."""

    alternatives: list[_Sequence]


@frozen
class _LookAhead:
    """A look-ahead assertion, possibly negated."""

    alternatives: list[_Sequence]
    is_negated: bool


_Sequence = list["str | _Anchor | _Group | _LookAhead"]


def _unwrap(alternatives: list[_Sequence]) -> list[_Sequence]:
    """Flatten groups: alternatives that are a single group, or contain one with look-ahead, become several."""
    unwrapped: list[_Sequence] = []
    for option in alternatives:
        place = next((place for place, item in enumerate(option) if _is_divided(item, option)), None)
        if place is None:
            unwrapped.append(option)
            continue
        group = option[place]
        assert isinstance(group, _Group)
        inner = group.alternatives
        if 0 < place == len(option) - 1 and any(ending[-1:] == [_Anchor(False)] for ending in inner):
            # The other alternatives of such a group are also required to reach the end; this matches less, never more.
            inner = [ending if ending[-1:] == [_Anchor(False)] else [*ending, _Anchor(False)] for ending in inner]
        unwrapped += _unwrap([[*option[:place], *ending, *option[place + 1 :]] for ending in inner])
        if len(unwrapped) > _MAX_OPTIONS:
            raise PatternError("too many alternatives beside look-ahead")
    return unwrapped


def _is_divided(item: object, option: _Sequence) -> bool:
    return isinstance(item, _Group) and (len(option) == 1 or _looks_ahead(item.alternatives))


def _looks_ahead(alternatives: list[_Sequence]) -> bool:
    return any(
        isinstance(item, _LookAhead) or (isinstance(item, _Group) and _looks_ahead(item.alternatives))
        for option in alternatives
        for item in option
    )


def _whole(option: _Sequence, search: bool) -> str:
    """Return one alternative as an expression that matches the whole text."""
    start, end = 0, len(option)
    while start < end and option[start] == _Anchor(True):
        start += 1
    while end > start and option[end - 1] == _Anchor(False):
        end -= 1
    before = "" if start or not search else ANY_TEXT
    after = "" if end < len(option) or not search else ANY_TEXT
    if any(isinstance(item, _LookAhead) for item in option):
        return before + _with_look_ahead(option[start:end], after, is_start=not before)
    return before + _inner(option[start:end]) + after if start < end else before or after


def _with_look_ahead(option: _Sequence, after: str, *, is_start: bool) -> str:
    """Return a sequence that extends to the end of the text; ``after`` may follow it."""
    text, conditions = after, list[tuple[str, bool]]()
    for place in range(len(option) - 1, -1, -1):
        item = option[place]
        if isinstance(item, _LookAhead):
            at_start = is_start and all(isinstance(other, _LookAhead) for other in option[:place])
            conditions.append((_condition(item, at_start=at_start), item.is_negated))
            continue
        text, conditions = _inner([item]) + _restricted(text, conditions), []
    return _restricted(text, conditions)


def _restricted(text: str, conditions: list[tuple[str, bool]]) -> str:
    try:
        return restricted(text, conditions) if conditions else text
    except AutomatonError as error:
        raise PatternError(f"this look-ahead is not supported: {error}") from error


def _condition(look: _LookAhead, *, at_start: bool) -> str:
    """Return an expression for the texts that satisfy the assertion."""
    options = []
    for option in _unwrap(look.alternatives):
        rest = list(option)
        while at_start and rest[:1] == [_Anchor(True)]:
            rest.pop(0)
        # In Python, the end also matches before a final line break; a negated assertion must cover both.
        end = "(?s:.)*" if rest[-1:] != [_Anchor(False)] else "\\n?" if look.is_negated else ""
        while rest[-1:] == [_Anchor(False)]:
            rest.pop()
        options.append(_inner(rest) + end)
    return f"(?:{'|'.join(options)})"


def _inner(option: _Sequence) -> str:
    texts = []
    for item in option:
        if isinstance(item, _LookAhead):
            raise PatternError("look-ahead is only supported where its rest reaches to the end of the text")
        if isinstance(item, _Anchor):
            raise PatternError(f"'{'^' if item.is_start else '$'}' is only supported at the edges of an alternative")
        texts.append(item if isinstance(item, str) else _group(item.alternatives))
    return "".join(texts)


def _group(alternatives: list[_Sequence]) -> str:
    return f"(?:{'|'.join(map(_inner, alternatives))})"


def _escape(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


@define
class _Parser:
    """Recursive descent parser of one expression."""

    text: str
    max_depth: int
    position: int = 0
    is_widened: bool = False  # within a negation: match everything that either dialect may match
    depends_on_dialect: bool = field(default=False)
    is_unbounded: bool = field(default=False)

    def error(self, message: str) -> PatternError:
        """Return an error at the current position."""
        shown = self.text if len(self.text) <= 60 else f"{self.text[:60]}..."
        return PatternError(f"{message} at position {self.position} of {shown!r}")

    def peek(self, length: int = 1) -> str:
        """Return the next characters, "" at the end."""
        return self.text[self.position : self.position + length]

    def take(self) -> str:
        """Consume the next character."""
        if self.position >= len(self.text):
            raise self.error("the expression ends too early")
        self.position += 1
        return self.text[self.position - 1]

    def read_alternatives(self, depth: int) -> list[_Sequence]:
        """Parse alternatives up to the end or the closing parenthesis."""
        if depth > self.max_depth:
            raise self.error(f"groups are nested deeper than {self.max_depth}")
        alternatives: list[_Sequence] = [[]]
        while self.peek() not in ("", ")"):
            if self.peek() == "|":
                self.position += 1
                alternatives.append([])
            else:
                alternatives[-1].append(self._read_item(depth))
        return alternatives

    def _read_item(self, depth: int) -> str | _Anchor | _Group | _LookAhead:
        char = self.take()
        if char in "^$":
            if self.peek() in ("*", "+", "?", "{"):
                raise self.error(f"nothing to repeat after {char!r}")
            self.depends_on_dialect |= char == "$"  # in Python it also matches before a final line break
            return _Anchor(char == "^")
        if char != "(":
            return self._read_atom(char) + self._read_quantifier()
        if self.peek(2) in ("?=", "?!"):
            return self._read_look_ahead(depth)
        alternatives = self._read_group(depth)
        quantifier = self._read_quantifier()
        return _group(alternatives) + quantifier if quantifier else _Group(alternatives)

    def _read_atom(self, char: str) -> str:
        """Parse an expression for one character of the text; ``char`` was already consumed."""
        if char in "*+?":
            raise self.error(f"nothing to repeat before {char!r}")
        if char == "{":
            raise self.error("'{' that does not begin a repetition must be written '\\{'")
        if char == ".":
            self.depends_on_dialect = True
            return "(?s:.)" if self.is_widened else _DOT
        if char == "[":
            return self._read_set()
        if char != "\\":
            return _escape(char)
        member = self._read_escape()
        return (
            _escape(member) if isinstance(member, str) else f"[{self._class(member, self._tables(is_negated=False))}]"
        )

    def _read_look_ahead(self, depth: int) -> _LookAhead:
        self.position += 1
        is_negated, was_widened = self.take() == "!", self.is_widened
        if was_widened:
            raise self.error("look-ahead inside of negated look-ahead is not supported")
        was_unbounded, self.is_widened = self.is_unbounded, is_negated
        alternatives = self._read_to_parenthesis(depth)
        self.is_unbounded, self.is_widened = was_unbounded, was_widened
        if self.peek() in ("*", "+", "?", "{") and self.peek():
            raise self.error("look-ahead cannot be repeated")
        return _LookAhead(alternatives, is_negated)

    def _read_group(self, depth: int) -> list[_Sequence]:
        if self.peek() == "?":
            self.position += 1
            kind = self.take()
            if kind == "P" and self.peek() == "<":
                kind = self.take()
            if kind == "<" and self.peek() not in ("=", "!"):
                while self.take() != ">":
                    pass
            elif kind != ":":
                names = {"<": "look-behind", "P": "a back-reference"}
                raise self.error(f"{names.get(kind, f'the group (?{kind}')} is not supported")
        return self._read_to_parenthesis(depth)

    def _read_to_parenthesis(self, depth: int) -> list[_Sequence]:
        alternatives = self.read_alternatives(depth + 1)
        if self.peek() != ")":
            raise self.error("missing ')'")
        self.position += 1
        return alternatives

    def _read_quantifier(self) -> str:
        char = self.peek()
        if char in ("*", "+", "?"):
            self.position += 1
            self.is_unbounded |= char != "?"
            quantifier = char
        elif char == "{":
            quantifier = self._read_counts()
        else:
            return ""
        if self.peek() == "?":  # lazy: matches the same texts
            self.position += 1
        elif self.peek() in ("+", "*", "{"):
            raise self.error("a repetition cannot be repeated")
        return quantifier

    def _read_counts(self) -> str:
        end = self.text.find("}", self.position)
        low, comma, high = self.text[self.position + 1 : max(end, 0)].partition(",")
        digits = (low, *([high] if high else []))
        if end < 0 or not all(number.isascii() and number.isdecimal() and len(number) < 9 for number in digits):
            raise self.error("'{' that does not begin a repetition must be written '\\{'")
        if max(map(int, digits)) > _MAX_REPETITIONS:
            raise self.error(f"more than {_MAX_REPETITIONS} repetitions are not supported")
        if high and int(low) > int(high):
            raise self.error("the numbers of a repetition are in the wrong order")
        self.position = end + 1
        self.is_unbounded |= bool(comma and not high)
        return f"{{{int(low)}{comma}{int(high) if high else ''}}}"

    def _read_escape(self, in_set: bool = False) -> str | _Class:
        char = self.take()
        if char in "dDwWsSpP":
            return _Class(char + self._read_category() if char in "pP" else char)
        if char in _CONTROLS or not (char.isascii() and char.isalnum()):
            return _CONTROLS.get(char, char)
        if char == "b" and in_set:
            return "\b"
        if char == "0" and not self.peek().isdecimal():
            return "\0"
        if char in "xu":
            return chr(self._read_hex(2)) if char == "x" else self._read_unicode()
        names = {"b": "a word boundary", "B": "a word boundary", "k": "a back-reference"}
        name = "a back-reference" if char.isdecimal() else names.get(char, "this escape")
        raise self.error(f"\\{char}: {name} is not supported")

    def _read_category(self) -> str:
        end = self.text.find("}", self.position)
        name = self.text[self.position + 1 : max(end, 0)]
        name = _CATEGORIES.get(name, name)
        if self.peek() != "{" or name not in _CATEGORIES.values():
            raise self.error("only general categories such as \\p{Lu} are supported")
        self.position = end + 1
        return name

    def _read_hex(self, length: int) -> int:
        digits = self.peek(length)
        if len(digits) < length or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise self.error(f"{length} hexadecimal digits are missing")
        self.position += length
        return int(digits, 16)

    def _read_unicode(self) -> str:
        code = self._read_hex(4)
        if 0xD800 <= code < 0xDC00 and self.peek(2) == "\\u":
            self.position += 2
            low = self._read_hex(4)
            if 0xDC00 <= low < 0xE000:
                return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
            code = low
        if 0xD800 <= code < 0xE000:
            raise self.error("a lone surrogate matches no text")
        return chr(code)

    def _class(self, item: _Class, tables: dict[str, str]) -> str:
        """Return the contents of the brackets for a class."""
        if item.name[0] in "pP":
            return f"\\{item.name[0]}{{{item.name[1:]}}}"
        self.depends_on_dialect = True
        return tables[item.name]

    def _tables(self, *, is_negated: bool) -> dict[str, str]:
        if self.is_widened:
            return _NARROW if is_negated else _WIDEST
        return _WIDE if is_negated else _NARROW

    def _read_set(self) -> str:
        """Parse a character set. In a negated one, classes are widened: the complement is what both dialects match."""
        is_negated = self.peek() == "^"
        self.position += is_negated
        if self.peek() == "]":
            raise self.error("an empty set; write '\\]' for a bracket")
        tables, parts = self._tables(is_negated=is_negated), []
        while self.peek() != "]":
            low = self._read_member()
            if self.peek() == "-" and self.peek(2)[1:] not in ("]", ""):
                self.position += 1
                high = self._read_member()
                if isinstance(low, _Class) or isinstance(high, _Class):
                    raise self.error("a class cannot be the end of a range")
                if low > high:
                    raise self.error("the ends of a range are in the wrong order")
                parts.append(f"{_escape(low)}-{_escape(high)}")
            else:
                parts.append(self._class(low, tables) if isinstance(low, _Class) else _escape(low))
        self.position += 1
        return f"[{'^' * is_negated}{''.join(parts)}]"

    def _read_member(self) -> str | _Class:
        char = self.take()
        return self._read_escape(in_set=True) if char == "\\" else char
