"""The account of memory that clients make the server keep: what they send, and what they do not read.

A :class:`Reservation` is what one connection or one request holds. Its bytes belong to an owner: a key, or all callers
that are not recognised. The share of an owner is bounded, and so are all shares together. What does not fit is refused
before it is kept. Answers that are written already cannot be refused: where these are too much, connections are ended,
first those that have not read for the longest time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from attrs import define

from enginehouse.contract.errors import EnginehouseError, RateLimited, ServerOverloaded
from enginehouse.settings.config import LimitsSettings

__all__ = ["EVERYBODY", "NOT_RECOGNISED", "MemoryAccount", "Reservation"]

EVERYBODY = None
"""Owner of what callers of a server without keys hold: only the bound on all together holds for it."""

NOT_RECOGNISED = ""
"""Owner of what connections hold before a request on them is recognised; no key has this name."""


@define(eq=False)
class Reservation:
    """Bytes of one connection or one request; made by :meth:`MemoryAccount.open`, closed in any case.

    Attributes:
        owner: the name of a key, ``NOT_RECOGNISED`` or ``EVERYBODY``.
        num_bytes: what is held.
        num_in_front: tells how many bytes of an answer wait until what is written is read; of connections.
    """

    _account: MemoryAccount
    owner: str | None
    num_bytes: int = 0
    num_in_front: Callable[[], int] | None = None

    def check(self, num_more: int) -> None:
        """Raise what :meth:`take` would."""
        self._account.check(self.owner, num_more)

    def take(self, num_more: int) -> None:
        """Hold more.

        Raises:
            RateLimited: the owner's share is used up.
            ServerOverloaded: what all owners may hold is used up.
        """
        self._account.check(self.owner, num_more)
        self._account.add(self, num_more)

    def give_back(self, num_bytes: int) -> None:
        """Hold less; at most what is held is given back."""
        self._account.add(self, -min(num_bytes, self.num_bytes))

    def resize(self, num_bytes: int) -> None:
        """Hold so much from now on; raises like :meth:`take`, and then holds what it held."""
        if num_bytes > self.num_bytes:
            self.take(num_bytes - self.num_bytes)
        else:
            self.give_back(self.num_bytes - num_bytes)

    def move(self, owner: str | None) -> None:
        """Let it belong to another owner; raises like :meth:`take`, and then belongs to the one before."""
        if owner == self.owner:
            return
        held = self.num_bytes
        self.give_back(held)
        try:
            if held:
                self._account.check(owner, held)
            self.owner = owner
        finally:
            self._account.add(self, held)

    def stall(self, num_bytes: int, end: Callable[[], None]) -> None:
        """Hold so much of an answer that is not read; where that is too much, those that stalled first are ended.

        Args:
            end: ends the connection, which then closes its reservation or reads on.
        """
        self._account.stall(self, num_bytes, end)

    def go_on(self, num_bytes: int) -> None:
        """The answer is read again: hold so much."""
        self._account.forget_stalled(self)
        self._account.add(self, num_bytes - self.num_bytes)

    def close(self) -> None:
        """Give everything back; harmless when closed."""
        self._account.forget_stalled(self)
        self._account.add(self, -self.num_bytes)


class MemoryAccount:
    """Owns the counts of all reservations. Used on one event loop.

    Attributes:
        num_bytes: what all hold together.
        refusals: how often something did not fit, by what was used up: ``key`` or ``server``; ``unread`` counts
            connections that were ended for what they did not read.
    """

    def __init__(self, settings: LimitsSettings) -> None:
        self.num_bytes = 0
        self.refusals: Counter[str] = Counter()
        self._settings = settings
        self._of_owner: Counter[str | None] = Counter()
        self._stalled: dict[Reservation, Callable[[], None]] = {}  # the longest first

    def change(self, settings: LimitsSettings) -> None:
        """Let other bounds hold from now on; what is held is kept."""
        self._settings = settings

    def open(self, owner: str | None = NOT_RECOGNISED) -> Reservation:
        """A reservation that holds nothing yet."""
        return Reservation(self, owner)

    def share(self, owner: str | None) -> int:
        """Bytes that one owner may hold."""
        limits = self._settings
        if owner is EVERYBODY:
            return limits.max_client_bytes
        return limits.max_client_bytes_per_key or limits.max_client_bytes // 2

    def held_by(self, owner: str | None) -> int:
        """Bytes that one owner holds."""
        return self._of_owner[owner]

    def check(self, owner: str | None, num_more: int) -> None:
        """Check that an owner may hold more.

        Raises:
            RateLimited: its share is used up.
            ServerOverloaded: what all owners may hold is used up.
        """
        error = self._refusal(owner, num_more)
        if error is not None:
            self.refusals["key" if isinstance(error, RateLimited) else "server"] += 1
            raise error

    def add(self, reservation: Reservation, num_more: int) -> None:
        """Count bytes of a reservation without a check; for :class:`Reservation`."""
        if num_more:
            reservation.num_bytes += num_more
            self.num_bytes += num_more
            self._of_owner[reservation.owner] += num_more
            if not self._of_owner[reservation.owner]:
                del self._of_owner[reservation.owner]  # keys come and go

    def stall(self, reservation: Reservation, num_bytes: int, end: Callable[[], None]) -> None:
        """See :meth:`Reservation.stall`."""
        self.add(reservation, num_bytes - reservation.num_bytes)
        self._stalled.setdefault(reservation, end)
        while self._refusal(reservation.owner, 0) is not None:
            longest = self._stalled_longest(reservation.owner)
            if longest is None:
                return
            self.refusals["unread"] += 1
            end_longest = self._stalled[longest]
            longest.close()
            end_longest()

    def forget_stalled(self, reservation: Reservation) -> None:
        """It is not stalled any more; harmless when it was not."""
        self._stalled.pop(reservation, None)

    def _stalled_longest(self, owner: str | None) -> Reservation | None:
        """Whose end makes room: one of this owner if its share is exceeded, else of any."""
        is_own = self._of_owner[owner] > self.share(owner)
        return next((one for one in self._stalled if one.owner == owner or not is_own), None)

    def _refusal(self, owner: str | None, num_more: int) -> EnginehouseError | None:
        share, limits = self.share(owner), self._settings
        if self._of_owner[owner] + num_more > share and owner is not EVERYBODY:
            whose = "This key's requests hold" if owner else "Callers that are not recognised hold"
            message = f"{whose} {self._of_owner[owner]} of {share} bytes (limits.max_client_bytes_per_key)"
            return RateLimited(f"{message}; try again when some have been answered.", "memory")
        if self.num_bytes + num_more > limits.max_client_bytes:
            message = f"The requests of all callers hold {self.num_bytes} of {limits.max_client_bytes} bytes"
            return ServerOverloaded(f"{message} (limits.max_client_bytes); try again in a moment.")
        return None
