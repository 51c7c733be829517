"""Order of adapter sets where a forward pass has one of them. Used by the scheduler; does not know sequences."""

from __future__ import annotations

from collections.abc import Collection

from enginehouse.contract.adapters import AdapterSet

__all__ = ["AdapterTurns"]


class AdapterTurns:
    """Turns of sets of adapters, in rounds: each set with work has one pass of a round.

    A round begins with the set of the pass before, because runners pay for each change of the set, and goes on with
    those that have waited longest. With k sets at work, k - 1 of k passes change the set, and each set has its next
    pass after at most k + 1.
    """

    def __init__(self) -> None:
        self._last: list[AdapterSet] = []  # sets with work, by their last pass, the newest at the end
        self._served: set[AdapterSet] = set()  # those that have had their pass of this round

    def next(self, present: Collection[AdapterSet]) -> AdapterSet:
        """Return the set whose pass is next.

        Args:
            present: the sets with work. Without any, the result is the empty set.
        """
        if not present:
            return ()
        waiting = [one for one in present if one not in self._served]
        if not waiting:
            self._served.clear()
            waiting = [one for one in self._last[-1:] if one in present] or list(present)
        last = [one for one in self._last if one in present]
        turn = min(waiting, key=lambda one: last.index(one) if one in last else -1)
        self._served.add(turn)
        self._last = [*(one for one in last if one != turn), turn]
        return turn
