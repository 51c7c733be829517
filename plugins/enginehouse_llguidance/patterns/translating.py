"""Translates regular expressions of requests to the library's dialect, matching whole texts.

The library has no assertions, but it intersects expressions. Assertions at the edges of a text become expressions of
their own beside the rest; others are resolved together with what is around them (``intersections``). Where that is too
large, they are left out, and texts are checked when they are complete.
"""

from __future__ import annotations

from attrs import frozen

from enginehouse_llguidance.patterns.automata import AutomatonError, Expression
from enginehouse_llguidance.patterns.backtracking import Backtracker
from enginehouse_llguidance.patterns.characters import EVERY, escape
from enginehouse_llguidance.patterns.intersections import NothingMatches, restricted
from enginehouse_llguidance.patterns.reading import PatternError, Reader
from enginehouse_llguidance.patterns.tree import (
    END,
    START,
    Anchor,
    Condition,
    Group,
    Item,
    Look,
    Reference,
    Sequence,
    inner,
)

__all__ = ["ANY_TEXT", "NO_TEXT", "Pattern", "escape_text", "matcher_of", "translate_pattern"]

ANY_TEXT = f"{EVERY}*"
NO_TEXT = "[^\\x{0}-\\x{10ffff}]"
"""An expression that matches nothing."""

_ANY = Group([[ANY_TEXT]])
_MAX_OPTIONS = 10_000
_MAX_REPEATED = 2000
"""Characters of the expression of a group for a back-reference; a longer one becomes any text."""


@frozen
class Pattern:
    """A translated expression.

    Attributes:
        regex: matches the whole text; without anchors.
        conditions: expressions of the same kind that the text matches as well.
        is_exact: every text that matches these matches the request's expression.
        depends_on_dialect: dialects disagree on some text with characters other than ASCII letters, digits and
            punctuation, so the *absence* of a match proves nothing.
        is_finite: it matches a finite number of texts.
        is_searched: what is matched depends on a search, so that it is not exact.
    """

    regex: str
    conditions: tuple[str, ...]
    is_exact: bool
    depends_on_dialect: bool
    is_finite: bool
    is_searched: bool = False


@frozen
class _Option:
    """An alternative of an expression, without the anchors at its edges."""

    items: Sequence
    is_start: bool
    is_end: bool


def translate_pattern(pattern: str, *, search: bool, max_depth: int = 64) -> Pattern:
    """Translate an expression.

    Args:
        search: it may match anywhere in the text (JSON Schema); otherwise it must match the whole text.

    Raises:
        PatternError: the expression is malformed or not supported.
    """
    reader = Reader(pattern, max_depth)
    alternatives = reader.read()
    if reader.is_searched:
        alternatives = _widened(alternatives, reader)
    options = [_without_anchors(option, search) for option in _unwrap(alternatives)]
    looks, options = _split_off(options)
    is_exact = not reader.is_searched
    regexes, conditions = list[str](), list[str]()
    for option in map(_whole, options):
        try:
            regexes.append(_resolved(option))
        except NothingMatches:
            pass
        except AutomatonError:
            is_exact = False
            regexes.append(_text(option, with_looks=False))
    for look in looks:
        try:
            conditions.append(_resolved(look))
        except NothingMatches:
            conditions.append(NO_TEXT)
        except AutomatonError:
            is_exact = False
    regex = regexes[0] if len(regexes) == 1 else f"(?:{'|'.join(regexes)})" if regexes else NO_TEXT
    is_finite = not reader.is_unbounded and all(option.is_start and option.is_end for option in options)
    return Pattern(regex, tuple(conditions), is_exact, reader.depends_on_dialect, is_finite, reader.is_searched)


def matcher_of(pattern: str, *, is_widened: bool) -> tuple[Expression | Backtracker, bool]:
    """Return what decides whether a pattern is found in a text, and True if that depends on the dialect.

    Args:
        is_widened: it matches what either dialect may match, except before a final line break.

    Raises:
        PatternError: the expression is malformed or not supported.
        AutomatonError: it is too large.
    """
    reader = Reader(pattern, 64, is_widened=is_widened)
    alternatives = reader.read()
    if reader.is_searched:
        return Backtracker(reader, alternatives), reader.depends_on_dialect
    expression = f"{ANY_TEXT}{_group(alternatives, with_looks=True)}{ANY_TEXT}"
    return Expression(expression), reader.depends_on_dialect


def escape_text(text: str) -> str:
    """Return an expression that matches exactly this text."""
    return "".join(map(escape, text))


# -- what a search decides: the grammar allows more ----------------------------------------------------


def _widened(alternatives: list[Sequence], reader: Reader) -> list[Sequence]:
    """Return alternatives without what only a search decides, which match at least the same texts: a back-reference
    becomes the expression of its group, and an assertion that depends on a search is left out.
    """
    texts: dict[int, str] = {}

    def wide(item: Item) -> Sequence:
        if isinstance(item, Reference):
            options: list[Sequence] = [[text_of(one, item)] for one in reader.numbers_of(item.group)]
            return [Group([*options, []] if item.is_early else options)]
        if isinstance(item, Condition):
            return [Group(widened([item.then, item.otherwise]))]
        if isinstance(item, Look):
            return [] if _depends_on_search(item) else [item]
        return [Group(widened(item.alternatives), item.quantifier)] if isinstance(item, Group) else [item]

    def widened(options: list[Sequence]) -> list[Sequence]:
        return [[one for item in option for one in wide(item)] for option in options]

    def text_of(number: int, reference: Reference) -> str:
        if number not in texts:
            texts[number] = ANY_TEXT  # also of a group within itself
            found = _group(widened(reader.groups[number]), with_looks=False)
            texts[number] = found if len(found) <= _MAX_REPEATED else ANY_TEXT
        return ANY_TEXT if reference.is_wider else texts[number]

    return widened(alternatives)


def _depends_on_search(item: Item) -> bool:
    is_search = isinstance(item, Reference | Condition) or (isinstance(item, Group) and item.is_atomic)
    return is_search or any(_depends_on_search(one) for option in inner(item) for one in option)


# -- what a grammar decides ----------------------------------------------------------------------------


def _unwrap(alternatives: list[Sequence]) -> list[Sequence]:
    """Flatten groups: alternatives that are a single group, or contain one with assertions, become several."""
    unwrapped: list[Sequence] = []
    for option in alternatives:
        place = next((place for place, item in enumerate(option) if _is_divided(item, option)), None)
        if place is None:
            unwrapped.append(option)
            continue
        group = option[place]
        assert isinstance(group, Group)
        inner = group.alternatives
        if 0 < place == len(option) - 1 and any(ending[-1:] == [END] for ending in inner):
            # The other alternatives of such a group are also required to reach the end; this matches less, never more.
            inner = [ending if ending[-1:] == [END] else [*ending, END] for ending in inner]
        unwrapped += _unwrap([[*option[:place], *ending, *option[place + 1 :]] for ending in inner])
        if len(unwrapped) > _MAX_OPTIONS:
            raise PatternError("too many alternatives beside assertions")
    return unwrapped


def _is_divided(item: Item, option: Sequence) -> bool:
    is_group = isinstance(item, Group) and not item.quantifier
    return is_group and (len(option) == 1 or _asserts([item]))


def _asserts(items: Sequence) -> bool:
    """Return True if there are assertions."""
    return any(
        isinstance(item, Look | Anchor)
        or (isinstance(item, Group) and any(_asserts(option) for option in item.alternatives))
        for item in items
    )


def _without_anchors(option: Sequence, search: bool) -> _Option:
    items = list(option)
    for place in range(len(items) - 1, 0, -1):  # any text before the start is empty, as one after the end
        if items[place - 1] == _ANY and items[place] == START:
            del items[place - 1]
        elif items[place - 1] == END and items[place] == _ANY:
            del items[place]
    first = _num_assertions(items)
    begin, items = items[:first], items[first:]
    last = len(items) - _num_assertions(items[::-1])
    items, end = items[:last], items[last:]
    kept = [*(item for item in begin if item != START), *items, *(item for item in end if item != END)]
    return _Option(kept, START in begin or not search, END in [*begin, *end] or not search)


def _num_assertions(items: Sequence) -> int:
    """Return the number of assertions that a sequence begins with."""
    return next((place for place, item in enumerate(items) if not isinstance(item, Look | Anchor)), len(items))


def _split_off(options: list[_Option]) -> tuple[list[Sequence], list[_Option]]:
    """Return what all options assert at the edges of the text, as expressions of whole texts, and the options."""
    looks: list[Sequence] = []
    while all(one.is_start and isinstance(_at(one.items, 0), Look) for one in options) and _agree(options, 0):
        looks.append([options[0].items[0], ANY_TEXT])
        options = [_Option(one.items[1:], one.is_start, one.is_end) for one in options]
    while all(one.is_end and isinstance(_at(one.items, -1), Look) for one in options) and _agree(options, -1):
        looks.append([ANY_TEXT, options[0].items[-1]])
        options = [_Option(one.items[:-1], one.is_start, one.is_end) for one in options]
    return looks, options


def _at(items: Sequence, place: int) -> Item | None:
    return items[place] if items else None


def _agree(options: list[_Option], place: int) -> bool:
    return all(one.items[place] == options[0].items[place] for one in options)


def _whole(option: _Option) -> Sequence:
    """Return one alternative for the whole text."""
    if not option.items:
        return [] if option.is_start and option.is_end else [ANY_TEXT]
    before: Sequence = [] if option.is_start else [ANY_TEXT]
    return [*before, *option.items, *([] if option.is_end else [ANY_TEXT])]


def _resolved(items: Sequence) -> str:
    """Return an expression without assertions. Raises AutomatonError."""
    text = _text(items, with_looks=True)
    return restricted(text, []) if _asserts(items) else text


def _text(items: Sequence, *, with_looks: bool) -> str:
    return "".join(_item(item, with_looks=with_looks) for item in items)


def _item(item: Item, *, with_looks: bool) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, Group):
        return _group(item.alternatives, with_looks=with_looks) + item.quantifier
    if not with_looks:
        return ""
    if isinstance(item, Anchor):
        return "^" if item.is_start else "$"
    opening = f"(?{'' if item.is_ahead else '<'}{'!' if item.is_negated else '='}"
    return f"{opening}{_group(item.alternatives, with_looks=True)[3:]}"


def _group(alternatives: list[Sequence], *, with_looks: bool) -> str:
    return f"(?:{'|'.join(_text(option, with_looks=with_looks) for option in alternatives)})"
