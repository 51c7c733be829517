"""``truncation: auto``: leaves out the oldest items of a conversation that does not fit the context.

A call and its output go together, and so does the reasoning before an item. Instructions at the beginning and the last
item stay.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from enginehouse_responses.items import call_of

__all__ = ["droppable_units", "fitting"]

_Item = Mapping[str, Any]


def droppable_units(items: Sequence[_Item]) -> list[list[int]]:
    """Return the indexes of items that can be left out, oldest first; those of one list only together.

    What remains after any number of them begins with a message of a user, if there is one.
    """
    first = next((index for index, item in enumerate(items) if not _instructs(item)), len(items))
    units: list[list[int]] = []
    by_call: dict[str, list[int]] = {}
    waiting: list[int] = []  # reasoning before the next item
    for index in range(first, len(items)):
        item = items[index]
        if item.get("type") == "reasoning":
            waiting.append(index)
            continue
        call_id = call_of(item)
        unit = by_call.get(call_id) if call_id is not None else None
        if unit is None:
            unit = []
            units.append(unit)
            if call_id is not None:
                by_call[call_id] = unit
        unit += [*waiting, index]
        waiting = []
    turns: list[list[int]] = []
    for unit in units:
        if not turns or _is_users(items[unit[0]]):
            turns.append([])
        turns[-1] += unit
    # A long last turn (an agent's) loses its own oldest items when everything before it is gone.
    return [*turns[:-1], *_inner(units, turns[-1] if turns else [], items)]


def _inner(units: Sequence[list[int]], turn: list[int], items: Sequence[_Item]) -> list[list[int]]:
    members = set(turn)
    of_turn = [unit for unit in units if unit[0] in members]
    kept = of_turn[0] if of_turn and _is_users(items[of_turn[0][0]]) else None
    return [unit for unit in of_turn[:-1] if unit is not kept]


async def fitting(items: Sequence[_Item], fits: Callable[[Sequence[_Item]], Awaitable[bool]]) -> list[_Item]:
    """Return the items without as few of the oldest as possible, so that they fit.

    Args:
        fits: tells whether items fit; asked a logarithmic number of times.

    Returns:
        Whatever is left if nothing fits.
    """
    units = droppable_units(items)

    def without(num_units: int) -> list[_Item]:
        dropped = {index for unit in units[:num_units] for index in unit}
        return [item for index, item in enumerate(items) if index not in dropped]

    if await fits(items):
        return list(items)
    least, most = 1, len(units)
    while least < most:
        middle = (least + most) // 2
        if await fits(without(middle)):
            most = middle
        else:
            least = middle + 1
    return without(most)


def _instructs(item: _Item) -> bool:
    return item.get("role") in ("system", "developer")


def _is_users(item: _Item) -> bool:
    return item.get("role") == "user"
