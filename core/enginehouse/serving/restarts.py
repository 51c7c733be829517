"""Restart policy: delays before a model whose worker died is opened again, and the limit of failed starts."""

from __future__ import annotations

from attrs import define, field, frozen

__all__ = ["RestartPolicy", "Restarts"]


@frozen(kw_only=True)
class RestartPolicy:
    """Restart settings; times in seconds.

    Attributes:
        first_delay_s: pause before the second restart in a row; the first restart is immediate, because most deaths are
            single accidents and clients wait for it.
        factor: growth of each further pause.
        max_delay_s: longest pause.
        max_failed_starts: number of starts in a row without becoming ready after which the model is given up. A model
            that does become ready is never given up, however often it dies: in that case only some requests kill it.
        stable_after_s: time ready after which the count of restarts in a row is reset.
    """

    first_delay_s: float = 0.5
    factor: float = 2.0
    max_delay_s: float = 30.0
    max_failed_starts: int = 5
    stable_after_s: float = 60.0


@define
class Restarts:
    """Restart record of one model."""

    policy: RestartPolicy = field(factory=RestartPolicy)
    num_in_a_row: int = 0
    num_failed_starts: int = 0
    total: int = 0

    def died(self, ready_s: float | None, *, is_of_work: bool = False) -> float | None:
        """Record a death and return the delay before the next start; None means to give up.

        Args:
            ready_s: time for which the model was ready; None if it never was.
            is_of_work: True if it died while working and ``replay`` identifies the responsible work: then the pause
                applies to its caller, and other callers are not delayed.
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
        # The exponent is bounded so that a long series of deaths cannot overflow a float.
        exponent = min(self.num_in_a_row - 2, 64)
        return min(self.policy.first_delay_s * self.policy.factor**exponent, self.policy.max_delay_s)
