"""How much of a sequence can be used by another one that shares only its beginning.

Where a sequence can be cut anywhere, all of that. Sliding windows may have lost what the place of the cut looks back
at, and a recurrent state knows only its end. Knows nothing of who holds sequences, and changes none.
"""

from __future__ import annotations

from enginehouse.contract.backend import CutPlanner, Runner

__all__ = ["Cuts"]


class Cuts:
    """Answers for one runner.

    Attributes:
        anywhere: every cut keeps what is asked for.
        possible: some cuts keep something.
    """

    def __init__(self, runner: Runner) -> None:
        capabilities = runner.capabilities
        self.anywhere = capabilities.truncate == "any"
        # Without forks a cut would be paid for with the rest of the sequence, which may be worth more.
        may_plan = capabilities.truncate == "bounded" and capabilities.fork != "none"
        self._planner = runner if may_plan and isinstance(runner, CutPlanner) else None
        self.possible = self.anywhere or self._planner is not None

    def kept(self, sequence: int, num_held: int, length: int) -> int:
        """Tokens that a fork would start with.

        Args:
            sequence: its handle.
            num_held: tokens that it holds.
            length: where to cut; what lies behind the end keeps it whole.
        """
        if length >= num_held:
            return num_held
        if self.anywhere:
            return length
        return self._planner.kept_length(sequence, length) if self._planner is not None else 0
