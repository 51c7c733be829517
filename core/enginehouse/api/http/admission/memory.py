"""Account of the memory held on behalf of clients: data they send, and responses they do not read.

A :class:`Reservation` is the memory of one connection or one request. Its bytes belong to an owner: a key, or all
unauthenticated callers. Each owner's share is limited, and so is the total. A request that does not fit is refused
before its data is kept. Responses already written cannot be refused: if they exceed the limit, connections are closed,
starting with those that have not read for the longest time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from attrs import define

from enginehouse.contract.errors import EnginehouseError, RateLimited, ServerOverloaded
from enginehouse.settings.config import LimitsSettings

EVERYBODY = None
"""Owner for callers of a server without keys: only the total limit applies to it."""

NOT_RECOGNISED = ""
"""Owner of the bytes of connections before a request on them is authenticated; no key has this name."""


@define(eq=False)
class Reservation:
    """Bytes of one connection or one request; created by :meth:`MemoryAccount.open`, must always be closed.

    Attributes:
        owner: the name of a key, ``NOT_RECOGNISED`` or ``EVERYBODY``.
        num_bytes: bytes currently held.
        num_in_front: for connections, returns the bytes of a response that wait until the written ones are read.
    """

    _account: MemoryAccount
    owner: str | None
    num_bytes: int = 0
    num_in_front: Callable[[], int] | None = None

    def check(self, num_more: int) -> None:
        """Raise as :meth:`take` would, without taking anything."""
        self._account.check(self.owner, num_more)

    def take(self, num_more: int) -> None:
        """Hold ``num_more`` bytes more.

        Raises:
            RateLimited: the owner's share is used up.
            ServerOverloaded: the total limit of all owners is used up.
        """
        self._account.check(self.owner, num_more)
        self._account.add(self, num_more)

    def give_back(self, num_bytes: int) -> None:
        """Release up to ``num_bytes`` bytes."""
        self._account.add(self, -min(num_bytes, self.num_bytes))

    def resize(self, num_bytes: int) -> None:
        """Hold exactly ``num_bytes``. Raises like :meth:`take`, leaving the size unchanged."""
        if num_bytes > self.num_bytes:
            self.take(num_bytes - self.num_bytes)
        else:
            self.give_back(self.num_bytes - num_bytes)

    def move(self, owner: str | None) -> None:
        """Transfer the bytes to another owner. Raises like :meth:`take`, leaving the owner unchanged."""
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
        """Hold ``num_bytes`` of an unread response; above the limit, the connections that stalled first are closed.

        Args:
            end: ends the connection, which then closes its reservation or resumes reading.
        """
        self._account.stall(self, num_bytes, end)

    def go_on(self, num_bytes: int) -> None:
        """Hold ``num_bytes``, as the response is being read again."""
        self._account.forget_stalled(self)
        self._account.add(self, num_bytes - self.num_bytes)

    def close(self) -> None:
        """Release everything; no effect if already closed."""
        self._account.forget_stalled(self)
        self._account.add(self, -self.num_bytes)


class MemoryAccount:
    """Owns the counters of all reservations. Used on one event loop.

    Attributes:
        num_bytes: total bytes held.
        refusals: number of refusals by exhausted limit: ``key`` or ``server``; ``unread`` counts connections that were
            closed because of unread responses.
    """

    def __init__(self, settings: LimitsSettings) -> None:
        self.num_bytes = 0
        self.refusals: Counter[str] = Counter()
        self._settings = settings
        self._of_owner: Counter[str | None] = Counter()
        self._stalled: dict[Reservation, Callable[[], None]] = {}  # oldest stall first

    def change(self, settings: LimitsSettings) -> None:
        """Apply new limits; bytes already held are kept."""
        self._settings = settings

    def open(self, owner: str | None = NOT_RECOGNISED) -> Reservation:
        """Return an empty reservation."""
        return Reservation(self, owner)

    def share(self, owner: str | None) -> int:
        """Maximum number of bytes that one owner may hold."""
        limits = self._settings
        if owner is EVERYBODY:
            return limits.max_client_bytes
        return limits.max_client_bytes_per_key or limits.max_client_bytes // 2

    def held_by(self, owner: str | None) -> int:
        """Number of bytes that one owner holds."""
        return self._of_owner[owner]

    def check(self, owner: str | None, num_more: int) -> None:
        """Check that an owner may hold ``num_more`` bytes more.

        Raises:
            RateLimited: its share is used up.
            ServerOverloaded: the total limit of all owners is used up.
        """
        error = self._refusal(owner, num_more)
        if error is not None:
            self.refusals["key" if isinstance(error, RateLimited) else "server"] += 1
            raise error

    def add(self, reservation: Reservation, num_more: int) -> None:
        """Add bytes to a reservation without a check; used by :class:`Reservation`."""
        if num_more:
            reservation.num_bytes += num_more
            self.num_bytes += num_more
            self._of_owner[reservation.owner] += num_more
            if not self._of_owner[reservation.owner]:
                del self._of_owner[reservation.owner]  # bounds the counter, as keys come and go

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
        """Mark a reservation as not stalled; no effect if it was not."""
        self._stalled.pop(reservation, None)

    def _stalled_longest(self, owner: str | None) -> Reservation | None:
        """Return the longest-stalled reservation to end: of this owner if its share is exceeded, else of any owner."""
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
