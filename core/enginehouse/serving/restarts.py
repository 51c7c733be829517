"""When a model whose worker died is opened again, and when that is given up."""

from __future__ import annotations

from attrs import define, field, frozen

__all__ = ["RestartPolicy", "Restarts"]


@frozen(kw_only=True)
class RestartPolicy:
    """Times in seconds.

    Attributes:
        first_delay_s: pause before the second restart in a row; the first one happens at once, because most
            deaths are single accidents and clients wait for it.
        factor: each further pause is this many times longer.
        max_delay_s: longest pause.
        max_failed_starts: so many starts in a row that never became ready are the end. A model that does become
            ready is never given up, however often it dies: then requests kill it, and others may not.
        stable_after_s: a model that was ready this long starts with a clean record.
    """

    first_delay_s: float = 0.5
    factor: float = 2.0
    max_delay_s: float = 30.0
    max_failed_starts: int = 5
    stable_after_s: float = 60.0


@define
class Restarts:
    """The record of one model."""

    policy: RestartPolicy = field(factory=RestartPolicy)
    num_in_a_row: int = 0
    num_failed_starts: int = 0
    total: int = 0

    def died(self, ready_s: float | None, *, is_of_work: bool = False) -> float | None:
        """Record a death and say how long to wait before the next start; None is "give up".

        Args:
            ready_s: how long the model was ready; None when it never was.
            is_of_work: it died while it worked, and whose work that was is found out (``replay``): callers pay for
                what they do with waiting of their own, so this death costs others no pause.
        """
        if ready_s is None:
            self.num_failed_starts += 1
            if self.num_failed_starts >= self.policy.max_failed_starts:
                return None
        else:
            self.num_failed_starts = 0
            if ready_s >= self.policy.stable_after_s:
                self.num_in_a_row = 0
        self.total += 1
        if is_of_work:
            return 0.0
        self.num_in_a_row += 1
        if self.num_in_a_row == 1:
            return 0.0
        # The exponent is bounded so that a long row of deaths cannot overflow a float.
        exponent = min(self.num_in_a_row - 2, 64)
        return min(self.policy.first_delay_s * self.policy.factor**exponent, self.policy.max_delay_s)
