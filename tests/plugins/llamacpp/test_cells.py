"""The account of KV cells, against a slow copy of llama.cpp's rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse_llamacpp.cells import CellMap, HeldCells

pytestmark = pytest.mark.llamacpp


class SlowCells:
    """Cell by cell what llama.cpp does: a set of holders per cell and a head."""

    def __init__(self, num_cells: int) -> None:
        self.holders: list[set[int]] = [set() for _ in range(num_cells)]
        self.head = 0

    def place(self, sequence: int, count: int) -> list[int]:
        used = sum(1 for holders in self.holders if holders)
        at = 0 if self.head > used + 2 * count else self.head
        found: list[int] = []
        while len(found) < count:
            at = 0 if at >= len(self.holders) else at
            if not self.holders[at]:
                found.append(at)
            at += 1
        for cell in found:
            self.holders[cell] = {sequence}
        self.head = found[-1] + 1
        return found

    def remove(self, sequence: int, cells: list[int]) -> None:
        freed = [cell for cell in sorted(cells) if self.holders[cell] == {sequence}]
        for cell in cells:
            self.holders[cell].discard(sequence)
        if freed:
            self.head = min(self.head, freed[0])


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "truncate", "fork", "free"]), st.integers(0, 99), st.integers(0, 20)
    ),
    max_size=60,
)


@given(_STEPS)
def test_cells_equal_llama_cpps_choice(steps: list[tuple[str, int, int]]) -> None:
    """The same cells are taken, whatever was shared, cut and freed before."""
    cells, slow = CellMap(64, chunk_tokens=64), SlowCells(64)
    held: dict[int, HeldCells] = {}
    for number, (action, pick, size) in enumerate(steps):
        sequence = list(held)[pick % len(held)] if held else None
        if action == "append" and sequence is not None and 0 < size <= cells.num_empty:
            taken = cells.allocate(size)
            held[sequence].append(taken)
            assert list(taken) == slow.place(sequence, size)
        elif action == "fork" and sequence is not None:
            length = min(size, held[sequence].length)
            held[number] = cells.share(held[sequence], length)
            for cell in held[number].cells:
                slow.holders[cell].add(number)
        elif action in ("truncate", "free") and sequence is not None:
            length = min(size, held[sequence].length) if action == "truncate" else 0
            slow.remove(sequence, [int(cell) for cell in held[sequence].cells[length:]])
            cells.empty(cells.release(held[sequence], length))
            if action == "free":
                del held[sequence]
        elif action == "append":
            held[number] = HeldCells()
        assert cells.num_empty == sum(1 for holders in slow.holders if not holders)
        assert cells.num_dead == 0


def test_dead_cells_are_not_reused_until_emptied() -> None:
    """They stay occupied, so new tokens go above them."""
    cells = CellMap(16, chunk_tokens=16)
    first, second = HeldCells(), HeldCells()
    first.append(cells.allocate(4))
    second.append(cells.allocate(4))
    dead = cells.release(first, 1)
    second.append(cells.allocate(2))

    assert list(dead) == list(cells.dead_cells()) == [1, 2, 3]
    assert list(second.cells) == [4, 5, 6, 7, 8, 9]
    assert (cells.num_live, cells.num_dead, cells.num_empty) == (7, 3, 6)
    cells.empty(dead)
    assert (cells.first_empty(), cells.head, cells.num_dead) == (1, 1, 0)


def test_large_batches_are_placed_in_chunks() -> None:
    """llama.cpp looks for cells once per physical batch."""
    cells = CellMap(16, chunk_tokens=4)

    assert list(cells.allocate(10)) == list(range(10))


def test_held_cells_grow() -> None:
    held = HeldCells()
    held.append(np.arange(60, dtype=np.int32))
    held.append(np.arange(60, 400, dtype=np.int32))

    assert list(held.cells) == list(range(400))
    assert held.is_below(400)
    assert not held.is_below(399)
