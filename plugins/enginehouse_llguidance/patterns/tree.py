"""Regular expressions as they are read: alternatives, each a sequence of items."""

from __future__ import annotations

from attrs import evolve, field, frozen

__all__ = [
    "END",
    "START",
    "Anchor",
    "Condition",
    "Group",
    "Item",
    "Look",
    "Reference",
    "Sequence",
    "has_groups",
    "inner",
    "with_wide_end",
]


@frozen
class Anchor:
    """The start or the end of the text."""

    is_start: bool


START, END = Anchor(True), Anchor(False)


@frozen
class Group:
    """Alternatives, possibly repeated.

    Attributes:
        number: of a group that captures what it matches; None for others.
        is_lazy: fewer repetitions are tried first.
        is_atomic: once it has matched, no other way to match it is tried.
    """

    alternatives: list[Sequence]
    quantifier: str = ""
    number: int | None = field(default=None, eq=False)
    is_lazy: bool = field(default=False, eq=False)
    is_atomic: bool = False


@frozen
class Look:
    """An assertion about the text before or after its place."""

    alternatives: list[Sequence]
    is_ahead: bool
    is_negated: bool


@frozen
class Reference:
    """A back-reference: the text that a group has matched.

    Attributes:
        group: its number or name.
        is_early: it is before the end of its group, so that it matches the empty text, also where others fail.
        ignores_case: letters of the other case match as well.
        is_wider: the group itself does not ignore the case.
        is_widened: what any dialect may match is asked for.
    """

    group: int | str
    is_early: bool
    ignores_case: bool
    is_wider: bool
    is_widened: bool


@frozen
class Condition:
    """The first alternatives if a group has matched, otherwise the second ones: ``(?(1)a|b)``."""

    group: int | str
    then: Sequence
    otherwise: Sequence


Item = str | Anchor | Group | Look | Reference | Condition
"""A part of an expression; characters and their quantifier are in the library's dialect."""

Sequence = list[Item]


def inner(item: Item) -> list[Sequence]:
    """Return the sequences within an item."""
    if isinstance(item, Group | Look):
        return item.alternatives
    return [item.then, item.otherwise] if isinstance(item, Condition) else []


def has_groups(item: Item) -> bool:
    """Return True if there are groups that capture what they match."""
    is_group = isinstance(item, Group) and item.number is not None
    return is_group or any(has_groups(one) for option in inner(item) for one in option)


def with_wide_end(option: Sequence, *, is_last: bool) -> Sequence:
    """Return an alternative whose end of the text may come before a final line break, as in Python.

    Where more follows, the end is left out: in a negation, what matches more is safe.
    """
    found: Sequence = []
    for place, item in enumerate(option):
        is_end = is_last and place == len(option) - 1
        if item == END:
            found += ["\\n?", END] if is_end else []
        elif isinstance(item, Group):
            is_open = is_end and not item.quantifier
            found.append(evolve(item, alternatives=[with_wide_end(one, is_last=is_open) for one in item.alternatives]))
        else:
            found.append(item)
    return found
