"""What a drafter has really gained and lost, so that its losses stay within a small share of the time.

``draft_length`` chooses by estimates, and estimates err: rates change in the middle of a text, steps are slowed down by
others. The ledger counts what came of it, in decode steps: tokens that drafts saved, less the time that they took. A
drafter that has lost all it may pauses, and plain steps earn it another try.
"""

from __future__ import annotations

from attrs import define

__all__ = ["DraftLedger"]

_START_STEPS = 4.0
_MOST_STEPS = 16.0  # what went well long ago pays for no more than this
_LEAST_STEPS = -64.0
_EARNED_PER_STEP = 0.02  # the share of the time that drafts which do not pay may cost
_MAX_SLOWER = 2.0  # a step that took longer than so many times its estimate was disturbed by something else


@define(eq=False)
class DraftLedger:
    """The account of one drafter. Its unit is the time of a decode step without drafts.

    Attributes:
        balance: steps that it may still lose.
    """

    balance: float = _START_STEPS

    @property
    def is_open(self) -> bool:
        """Whether its drafts may be computed."""
        return self.balance > 0.0

    def add_plain(self) -> None:
        """A decode step without drafts of it."""
        self._add(_EARNED_PER_STEP)

    def add_drafted(self, saved_steps: float, share: float, seconds: float, usual_s: float, plain_s: float) -> None:
        """A step with drafts of it.

        Args:
            saved_steps: steps that its accepted tokens would have taken: tokens over running sequences.
            share: of all drafted tokens of the step, that are its own.
            seconds: that the step took.
            usual_s: that a step of so many tokens usually takes.
            plain_s: that the step would have taken without drafts.
        """
        lasted_s = min(seconds, _MAX_SLOWER * usual_s)
        self._add(saved_steps - share * (lasted_s - plain_s) / plain_s)

    def add_proposing(self, seconds: float, plain_s: float) -> None:
        """Proposing took so long."""
        self._add(-seconds / plain_s)

    def _add(self, steps: float) -> None:
        self.balance = min(_MOST_STEPS, max(_LEAST_STEPS, self.balance + steps))
