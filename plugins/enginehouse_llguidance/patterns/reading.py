"""Reads regular expressions of requests: those of ECMAScript and Python, and forms that people bring from elsewhere.

Where the two disagree on the members of a class (``\\w``, ``.``), only what both match is taken, so that the answer
validates with either; in a negation, what either may match. Expressions for characters are written in the library's
dialect at once. A form that neither of the two has is read as in Java, Go and PCRE if it means one thing there:
``(?i)`` in the middle, ``\\Z``, ``[\\w-.]``.
"""

from __future__ import annotations

import re

from attrs import define, evolve, field, frozen

from enginehouse_llguidance.patterns.characters import (
    DOT,
    EVERY,
    NOT_ASCII,
    SURROGATES,
    complement,
    escape,
    named_class,
    other_case,
    property_of,
)
from enginehouse_llguidance.patterns.tree import (
    END,
    START,
    Condition,
    Group,
    Item,
    Look,
    Reference,
    Sequence,
    has_groups,
    with_wide_end,
)

__all__ = ["PatternError", "Reader"]

_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_COUNTS = re.compile(r"\{([0-9]{1,8})(,([0-9]{0,8}))?\}")
_REFERENCE = re.compile(r"([1-9][0-9]?)|k<([^>]+)>")
_CONDITION = re.compile(r"([1-9][0-9]?|[^\W\d]\w*)\)")
_MAX_REPETITIONS = 100_000
_NO_WORD = "[\\x{0}-\\x{2f}\\x{3a}-\\x{40}\\x{5b}-\\x{5e}\\x{60}\\x{7b}-\\x{7f}]"
_NOTHING = "[^\\x{0}-\\x{10ffff}]"
_SIMILAR = {"s": "\u017f", "k": "\u212a", "i": "\u0130\u0131"}
"""Characters that some dialects take for a letter whose case is ignored."""


class PatternError(ValueError):
    """The expression is malformed or uses an unsupported feature; the message contains the position."""


@frozen
class _Class:
    """The contents of the brackets for a class, such as ``\\d``."""

    members: str


@frozen
class _Flags:
    i: bool = False
    s: bool = False
    m: bool = False
    u: bool = False  # and ``a``: without effect, since only what all agree on is taken
    a: bool = False


@define
class Reader:
    """Recursive descent parser of one expression.

    Args:
        is_widened: read for a negation.

    Attributes:
        depends_on_dialect: dialects disagree on some text with characters other than printable ones of ASCII.
        is_unbounded: texts of any length match.
        groups: alternatives of the groups that capture what they match, by number.
        names: numbers of the groups that have a name.
        is_searched: what is matched depends on a search, as with back-references, so that no automaton decides.
    """

    text: str
    max_depth: int
    is_widened: bool = False
    position: int = 0
    depends_on_dialect: bool = field(default=False)
    is_unbounded: bool = field(default=False)
    is_searched: bool = field(default=False)
    flags: _Flags = field(factory=_Flags)
    groups: dict[int, list[Sequence]] = field(factory=dict)
    names: dict[str, list[int]] = field(factory=dict)
    num_groups: int = 0
    referred: dict[int | str, int] = field(factory=dict)  # groups and the positions of their references
    with_case: set[int] = field(factory=set)  # groups that do not ignore the case

    def read(self) -> list[Sequence]:
        """Parse all of the expression. Raises PatternError."""
        alternatives = self._read_alternatives(0)
        if self.position < len(self.text):
            raise self._error("unbalanced ')'")
        for group, position in self.referred.items():
            if not self.numbers_of(group):
                self.position = position
                raise self._error(f"there is no group {group}")
        return alternatives

    def numbers_of(self, group: int | str) -> list[int]:
        """Return the numbers of the groups that a number or a name means."""
        if isinstance(group, str):
            return self.names.get(group, [])
        return [group] if group <= self.num_groups else []

    def _error(self, message: str) -> PatternError:
        shown = self.text if len(self.text) <= 60 else f"{self.text[:60]}..."
        return PatternError(f"{message} at position {self.position} of {shown!r}")

    def _peek(self, length: int = 1) -> str:
        """Return the next characters, "" at the end."""
        return self.text[self.position : self.position + length]

    def _take(self) -> str:
        if self.position >= len(self.text):
            raise self._error("the expression ends too early")
        self.position += 1
        return self.text[self.position - 1]

    def _read_alternatives(self, depth: int) -> list[Sequence]:
        """Parse alternatives up to the end or the closing parenthesis; flags are changed up to there."""
        if depth > self.max_depth:
            raise self._error(f"groups are nested deeper than {self.max_depth}")
        flags = self.flags
        alternatives: list[Sequence] = [[]]
        while self._peek() not in ("", ")"):
            if self._peek() == "|":
                self.position += 1
                alternatives.append([])
            else:
                alternatives[-1] += self._read_item(depth)
        self.flags = flags
        return alternatives

    def _read_item(self, depth: int) -> Sequence:
        char = self._take()
        found = self._read_assertion(char, depth)
        if found is not None:
            quantifier, _ = self._read_quantifier()
            if quantifier and not isinstance(found, Look):
                raise self._error("nothing to repeat")
            if not quantifier.startswith(("*", "?", "{0,", "{0}")):
                return [found]  # it says the same again
            return [Group([[found]], "?")] if has_groups(found) else []
        if char == "(":
            return self._read_group(depth)
        if char == "\\" and (reference := _REFERENCE.match(self.text, self.position)):
            self.position = reference.end()
            return self._repeated(self._reference(int(reference[1]) if reference[1] else reference[2]))
        return self._repeated(self._read_atom(char))

    def _repeated(self, item: Item) -> Sequence:
        """Return an item with the quantifier that follows."""
        quantifier, mode = self._read_quantifier()
        if isinstance(item, str) and not mode:
            return [item + quantifier]
        if not quantifier:
            return [item]
        whole = item if isinstance(item, Group) else Group([[item]])
        whole = evolve(whole, quantifier=quantifier, is_lazy=mode == "?")
        if mode != "+":
            return [whole]
        self.is_searched = True
        return [Group([[whole]], is_atomic=True)]

    def _reference(self, group: int | str) -> Reference:
        self.is_searched = True
        self.depends_on_dialect |= self.flags.i
        self.referred.setdefault(group, self.position)
        numbers = self.numbers_of(group)
        is_early = not numbers or not all(one in self.groups for one in numbers)
        is_wider = self.flags.i and not self.with_case.isdisjoint(numbers)
        return Reference(group, is_early, self.flags.i, is_wider, self.is_widened)

    # -- assertions and groups ---------------------------------------------------------------------

    def _read_assertion(self, char: str, depth: int) -> Item | None:
        """Return the assertion that begins with a character that was already consumed, if one does."""
        if char == "(" and (self._peek(2) in ("?=", "?!") or self._peek(3) in ("?<=", "?<!")):
            return self._read_look(depth)
        if char in "^$":
            self.depends_on_dialect |= char == "$"  # in Python it also matches before a final line break
            if self.flags.m:
                return Look([["[^\\n]"]], is_ahead=char == "$", is_negated=True)
            return START if char == "^" else END
        if char != "\\" or self._peek() not in ("A", "Z", "z", "b", "B"):
            return None
        name = self._take()
        return self._boundary(name == "b") if name in "bB" else START if name == "A" else END

    def _boundary(self, is_boundary: bool) -> Group:
        """Return the assertion that one of two neighbours belongs to a word, or that both or none do.

        What is not a word is a character of ASCII, on which dialects agree, or the end of the text.
        """
        self.depends_on_dialect = True
        word = f"[{named_class('w', is_negated=False, is_widened=self.is_widened)}]"
        before, after = (Look([[word]], is_ahead, False) for is_ahead in (False, True))
        if self.is_widened:
            narrow = f"[{named_class('w', is_negated=True, is_widened=True)}]"
            not_before, not_after = (Look([[narrow]], is_ahead, True) for is_ahead in (False, True))
        else:
            not_before, not_after = Look([[START], [_NO_WORD]], False, False), Look([[END], [_NO_WORD]], True, False)
        if is_boundary:
            return Group([[before, not_after], [not_before, after]])
        if self.is_widened:
            return Group([[before, after], [not_before, not_after]])
        # In Python up to 3.13, the empty text has no such place.
        no_before, no_after = (Look([[_NO_WORD]], is_ahead, False) for is_ahead in (False, True))
        return Group([[before, after], [START, no_after], [no_before, not_after]])

    def _read_look(self, depth: int) -> Look:
        self.position += 1
        is_ahead = self._peek() != "<"
        self.position += not is_ahead
        is_negated, was_widened, was_unbounded = self._take() == "!", self.is_widened, self.is_unbounded
        self.is_widened = was_widened != is_negated
        alternatives = self._read_to_parenthesis(depth)
        if self.is_widened:
            alternatives = [with_wide_end(option, is_last=is_ahead) for option in alternatives]
        self.is_widened, self.is_unbounded = was_widened, was_unbounded
        return Look(alternatives, is_ahead, is_negated)

    def _read_group(self, depth: int) -> Sequence:
        flags, number, kind = self.flags, None, ""
        if self._peek() == "?":
            self.position += 1
            kind = self._take()
            kind += self._take() if kind == "P" and self._peek() in ("<", "=") else ""
        if kind == "P=":
            return self._repeated(self._reference(self._read_name(")")))
        if kind == "(":
            return self._read_condition(depth)
        if kind in ("", "<", "P<"):
            self.num_groups = number = self.num_groups + 1
            if kind:
                self.names.setdefault(self._read_name(">"), []).append(number)
        elif kind not in (":", ">") and self._read_flags(kind):
            return []
        alternatives = self._read_to_parenthesis(depth)
        if number is not None:
            self.groups[number] = alternatives
            self.with_case |= set() if self.flags.i else {number}
        self.flags = flags
        self.is_searched |= kind == ">"
        return self._repeated(Group(alternatives, number=number, is_atomic=kind == ">"))

    def _read_name(self, end: str) -> str:
        found = ""
        while (char := self._take()) != end:
            found += char
        return found

    def _read_condition(self, depth: int) -> Sequence:
        found = _CONDITION.match(self.text, self.position)
        if found is None:
            raise self._error("only the number or the name of a group is supported as a condition")
        self.position, self.is_searched = found.end(), True
        group: int | str = int(found[1]) if found[1].isdecimal() else found[1]
        self.referred.setdefault(group, self.position)
        options = self._read_to_parenthesis(depth)
        if len(options) > 2:
            raise self._error("a condition has more than two alternatives")
        return self._repeated(Group([[Condition(group, options[0], options[1] if len(options) > 1 else [])]]))

    def _read_flags(self, char: str) -> bool:
        """Set flags; True if up to the end of the group around, False if for the group that they begin."""
        is_set, found = True, char
        while char not in (":", ")"):
            if char not in "ismua-" or not char:
                raise self._error(f"the group (?{found} is not supported")
            if char == "-":
                is_set = False
            else:
                self.flags = evolve(self.flags, **{char: is_set})
            char = self._take()
            found += char
        return char == ")"

    def _read_to_parenthesis(self, depth: int) -> list[Sequence]:
        alternatives = self._read_alternatives(depth + 1)
        if self._peek() != ")":
            raise self._error("missing ')'")
        self.position += 1
        return alternatives

    # -- repetitions -------------------------------------------------------------------------------

    def _read_quantifier(self) -> tuple[str, str]:
        """Return a quantifier, and ``?`` if it is lazy, ``+`` if it is possessive; both empty if there is none."""
        char = self._peek()
        if char in ("*", "+", "?"):
            self.position += 1
            self.is_unbounded |= char != "?"
            quantifier = char
        elif self._is_counted():
            quantifier = self._read_counts()
        else:
            return "", ""
        mode = self._peek() if self._peek() in ("?", "+") else ""
        self.position += len(mode)
        if not mode and (self._peek() == "*" or self._is_counted()):
            raise self._error("a repetition cannot be repeated")
        return quantifier, mode

    def _is_counted(self) -> bool:
        """Return True if counts follow; other braces are characters, but Python reads ``{,3}`` as counts."""
        if self._peek(2) == "{," and re.match(r"\{,[0-9]+\}", self.text[self.position :]):
            raise self._error("write '{0,' for '{,'")
        return self._peek() == "{" and _COUNTS.match(self.text, self.position) is not None

    def _read_counts(self) -> str:
        found = _COUNTS.match(self.text, self.position)
        assert found is not None
        low, high = int(found[1]), int(found[3]) if found[3] else None
        if max(low, high or 0) > _MAX_REPETITIONS:
            raise self._error(f"more than {_MAX_REPETITIONS} repetitions are not supported")
        if high is not None and low > high:
            raise self._error("the numbers of a repetition are in the wrong order")
        self.position = found.end()
        self.is_unbounded |= bool(found[2]) and high is None
        return f"{{{low}{',' if found[2] else ''}{'' if high is None else high}}}"

    # -- characters --------------------------------------------------------------------------------

    def _read_atom(self, char: str) -> str:
        """Parse an expression for one character of the text; ``char`` was already consumed."""
        if char in "*+?":
            raise self._error(f"nothing to repeat before {char!r}")
        if char == "{":
            self.position -= 1
            if self._is_counted():
                raise self._error("nothing to repeat before '{'")
            self.position += 1
        if char == ".":
            self.depends_on_dialect |= not self.flags.s
            return EVERY if self.is_widened or self.flags.s else DOT
        if char == "[":
            return self._read_set()
        member = self._read_escape() if char == "\\" else char
        if isinstance(member, str) and not self._is_ambiguous(member):
            return escape(member)
        return f"[{self._contents(member, is_negated=False)}]" if self._is_any(member) else _NOTHING

    def _is_ambiguous(self, char: str) -> bool:
        return _is_surrogate(char) or (self.flags.i and char.lower() != char.upper())

    def _is_any(self, member: str | _Class) -> bool:
        return not (isinstance(member, str) and _is_surrogate(member)) or self.is_widened

    def _contents(self, member: str | _Class, *, is_negated: bool) -> str:
        """Return the contents of the brackets for a character or a class."""
        if isinstance(member, _Class):
            return member.members
        return self._range(member, member, is_negated=is_negated)

    def _range(self, low: str, high: str, *, is_negated: bool) -> str:
        """Return the contents of the brackets for a range of characters; surrogates are not characters."""
        is_wide = self.is_widened != is_negated
        ranges = [(ord(low), ord(high))]
        if self.flags.i:
            ranges += other_case(ord(low), ord(high))
            others = "".join(other for letter, other in _SIMILAR.items() if _has(ranges, letter)) if is_wide else ""
            ranges += [(ord(char), ord(char)) for char in others]
            if not (low + high).isascii() or others:
                self.depends_on_dialect = True
                ranges += [(0x80, 0x10FFFF)] if is_wide and low != high else []
        ((first_half, last_half),) = SURROGATES
        if any(first <= last_half and first_half <= last for first, last in ranges):
            self.depends_on_dialect = True  # one of two units, in some dialects
            ranges += [(0x10000, 0x10FFFF)] if is_wide else []
        kept = complement((*complement(tuple(ranges)), *SURROGATES))
        return "".join(_written(first, last) for first, last in kept)

    def _read_escape(  # noqa: PLR0911 - one per kind
        self, *, in_set: bool = False, is_negated: bool = False
    ) -> str | _Class:
        char = self._take()
        if char in "dDwWsS":
            self.depends_on_dialect = True
            return _Class(named_class(char, is_negated=is_negated, is_widened=self.is_widened))
        if char in "pP":
            return self._read_property(is_inside=char == "p")
        if char in _CONTROLS or not (char.isascii() and char.isalnum()):
            return _CONTROLS.get(char, char)
        if char == "b" and in_set:
            return "\b"
        if char == "0" and not self._peek().isdecimal():
            return "\0"
        if char == "c" and self._peek().isascii() and self._peek().isalpha():
            return chr(ord(self._take()) & 31)
        if char in "xu":
            return chr(self._read_hex(2)) if char == "x" else self._read_unicode(is_wide=self.is_widened != is_negated)
        raise self._error(f"\\{char}: this escape is not supported")

    def _read_property(self, *, is_inside: bool) -> _Class:
        end = self.text.find("}", self.position)
        name = self.text[self.position + 1 : max(end, 0)]
        members = property_of(name, is_inside=is_inside)
        if self._peek() != "{" or members is None:
            raise self._error("only properties such as \\p{Lu} and \\p{Script=Greek} are supported")
        self.position = end + 1
        return _Class(f"\\x{{0}}-\\x{{7f}}{NOT_ASCII}" if self.flags.i and self.is_widened else members)

    def _read_hex(self, length: int) -> int:
        digits = self._peek(length)
        if len(digits) < length or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise self._error(f"{length} hexadecimal digits are missing")
        self.position += length
        return int(digits, 16)

    def _read_unicode(self, *, is_wide: bool) -> str:
        if self._peek() == "{":
            return self._read_code_point()
        code = self._read_hex(4)
        if 0xD800 <= code < 0xDC00 and self._peek(2) == "\\u" and (low := self._low_surrogate()) is not None:
            self.depends_on_dialect = True  # in Python two characters, which no text has
            self.position += 6
            if not is_wide:
                return chr(code)
            return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
        return chr(code)

    def _low_surrogate(self) -> int | None:
        """Return the second half of a pair if it follows."""
        found = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.text, self.position)
        return int(found[1], 16) if found else None

    def _read_code_point(self) -> str:
        found = re.compile(r"\{([0-9a-fA-F]{1,6})\}").match(self.text, self.position)
        if found is None or int(found[1], 16) > 0x10FFFF:
            raise self._error("'\\u{' needs a code point in hexadecimal digits")
        self.position = found.end()
        return chr(int(found[1], 16))

    def _read_set(self) -> str:
        """Parse a character set. In a negated one, classes are widened: the complement is what both dialects match."""
        is_negated = self._peek() == "^"
        self.position += is_negated
        if self._peek() == "]":
            raise self._error("an empty set; write '\\]' for a bracket")
        parts: list[str] = []
        while self._peek() != "]":
            low = self._read_member(is_negated)
            if isinstance(low, _Class) or self._peek() != "-" or self._peek(2)[1:] in ("]", ""):
                parts.append(self._contents(low, is_negated=is_negated))
                continue
            self.position += 1
            high = self._read_member(is_negated)
            if isinstance(high, _Class):
                parts += [self._contents(one, is_negated=is_negated) for one in (low, "-", high)]
            elif low > high:
                raise self._error("the ends of a range are in the wrong order")
            else:
                parts.append(self._range(low, high, is_negated=is_negated))
        self.position += 1
        contents = "".join(parts)
        if not contents:
            return EVERY if is_negated else _NOTHING
        return f"[{'^' * is_negated}{contents}]"

    def _read_member(self, is_negated: bool) -> str | _Class:
        char = self._take()
        return self._read_escape(in_set=True, is_negated=is_negated) if char == "\\" else char


def _is_surrogate(char: str) -> bool:
    return "\ud800" <= char <= "\udfff"


def _has(ranges: list[tuple[int, int]], letter: str) -> bool:
    return any(low <= ord(letter) <= high for low, high in ranges)


def _written(low: int, high: int) -> str:
    return escape(chr(low)) if low == high else f"{escape(chr(low))}-{escape(chr(high))}"
