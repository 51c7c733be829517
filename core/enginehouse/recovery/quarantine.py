"""Identifies the work items that kill workers, with certainty and without refusing any other.

After a death, everything on which the worker was working is quarantined, or all that it held if it was working on none.
Such items return one at a time, each alone in the worker (its *isolation run*), until one has progressed well past the
point where it was. It then leaves the worker to the next item; when all have passed, all continue together. If a worker
dies in an isolation run, the item in it is the culprit.

``TRANSITIONS`` is the table of docs/recovery.md ("Finding the cause"). A work item is excused from its first two
deaths from outside (``kill -9`` without a shortage of memory); after that it is quarantined, because a watcher that
kills processes using too much memory looks the same from here.

The likeliest culprits run first: those of callers with offences, then those with the least progress, the latest arrival
first. When the culprit is found, the others are cleared and this quarantine does not count. If an item's client leaves
before its isolation run has ended, it remains untested: if no culprit is found, the death counts as an offence of its
caller.

"Well past" is further each time a quarantine ended without an explanation, so that an item which kills its worker
repeatedly but only after some progress is eventually alone with it.

Pure bookkeeping: does not know the event loop or the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

from enginehouse.recovery.work import Offences, State, Work

_MARGIN_TOKENS = 8
"""Tokens past its last point that an item must reach in its first isolation run.

Only a few sampled tokens can be unreported when a worker dies: an incomplete character, the start of a stop string.
"""

_MARGIN_FACTOR = 4
"""Factor by which the margin grows with each further quarantine."""

_MAX_EXCUSED = 2
"""Number of deaths from outside from which a work item in the worker is excused."""


class Event(Enum):
    """Events of a work item."""

    ENTERED = "entered"
    LEFT = "left"  # it left, and the worker has dropped it
    DIED = "died"  # its worker died while working on it
    LOST = "lost"  # its worker died otherwise
    PASSED = "passed"
    CLEARED = "cleared"
    ENDED = "ended"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.WAITING: {Event.ENTERED: State.RUNNING, Event.ENDED: State.ENDED},
    State.RUNNING: {
        Event.LEFT: State.WAITING,
        Event.DIED: State.QUARANTINED,
        Event.LOST: State.WAITING,
        Event.ENDED: State.ENDED,
    },
    State.QUARANTINED: {Event.ENTERED: State.ISOLATED, Event.CLEARED: State.WAITING, Event.ENDED: State.ENDED},
    State.ISOLATED: {
        Event.DIED: State.CULPRIT,
        Event.LOST: State.QUARANTINED,
        Event.PASSED: State.RUNNING,
        Event.ENDED: State.ENDED,
    },
}


class HeldWork(ABC):
    """Work items that workers hold, including those whose client has left: what both kinds of quarantine share."""

    def __init__(self) -> None:
        self._inside: dict[Work, None] = {}

    def over(self, work: Work) -> None:
        """The item's client has left, or it has ended; a repeated call has no effect."""
        work.is_over = True
        if work not in self._inside:
            self._end(work)

    def left(self, work: Work) -> None:
        """A worker no longer holds the item; a repeated call has no effect."""
        if work in self._inside:
            del self._inside[work]
            if work.is_over:
                self._end(work)
            elif work.state is State.RUNNING:
                move(work, Event.LEFT)

    @abstractmethod
    def _end(self, work: Work) -> None:
        """Handle the end of an item that no worker holds."""


class Quarantine(HeldWork):
    """Work items of one model, and the quarantined ones among them.

    Args:
        offences: offences of callers; deaths are added to it when they are explained.
    """

    def __init__(self, offences: Offences) -> None:
        super().__init__()
        self._offences = offences
        self._quarantined: list[Work] = []  # next one first
        self._isolated: Work | None = None
        self._goal = 0
        self._round: list[Work] = []  # all that were quarantined since no item was
        self._untested: set[str] = set()  # callers of items that left before the end of their isolation run

    @property
    def is_active(self) -> bool:
        """True if items are quarantined, so that no other work may enter the worker."""
        return self._isolated is not None or bool(self._quarantined)

    def may_enter(self, work: Work) -> bool:
        """True if a work item that is outside may enter the worker now."""
        if work in self._inside:
            return False
        return not self.is_active or (not self._inside and self._quarantined[:1] == [work])

    def entered(self, work: Work) -> None:
        """The item enters the worker; it must be allowed to."""
        assert self.may_enter(work)
        self._inside[work] = None
        move(work, Event.ENTERED)
        if work.state is State.ISOLATED:
            self._isolated = self._quarantined.pop(0)
            self._goal = work.num_tokens + margin_tokens(work.num_quarantines)

    def progressed(self, work: Work) -> bool:
        """The item has made progress; returns True if it has passed its isolation run and must leave the worker."""
        if work is not self._isolated or work.num_tokens < self._goal:
            return False
        self._isolated = None
        move(work, Event.PASSED)
        if not self._quarantined:
            self._end_round()
        return bool(self._quarantined)

    def died(self, working: Sequence[Work], *, from_outside: bool = False) -> Work | None:
        """The worker died while it worked on these items; returns the culprit if it is known."""
        blamed = [work for work in working if not (from_outside and excuse(work))]
        inside, self._inside = self._inside, {}
        isolated, self._isolated = self._isolated, None
        if isolated in blamed:  # it was alone
            move(isolated, Event.DIED)
            self._offences.add(isolated.caller)
            self._end_round(is_explained=True)
            return isolated
        for work in inside:
            self._lose(work, is_blamed=work in blamed)
        self._quarantined.sort(key=lambda one: (-self._offences.count(one.caller), one.num_tokens, -one.arrival))
        if not self.is_active:
            self._end_round()
        return None

    def _lose(self, work: Work, *, is_blamed: bool) -> None:
        """Handle the loss of an item's worker when the item is not the culprit."""
        move(work, Event.DIED if is_blamed else Event.LOST)
        if is_blamed:
            work.num_quarantines += 1
            self._round.append(work)
        if work.state is State.QUARANTINED:
            self._quarantined.append(work)
        if work.is_over:
            self._end(work, is_last=False)

    def _end(self, work: Work, *, is_last: bool = True) -> None:
        if work.state in (State.ENDED, State.CULPRIT):
            return
        is_quarantined = work.state in (State.QUARANTINED, State.ISOLATED)
        move(work, Event.ENDED)
        if work is self._isolated:
            self._isolated = None
        elif work in self._quarantined:
            self._quarantined.remove(work)
        if is_quarantined and not work.is_answered:
            self._untested.add(work.caller)
        if is_quarantined and is_last and not self.is_active:
            self._end_round()

    def _end_round(self, *, is_explained: bool = False) -> None:
        """End the quarantine: the culprit was found, or all items have passed or left."""
        if not is_explained:
            for caller in self._untested:
                self._offences.add(caller)
        if is_explained or self._untested:
            for work in self._round:
                work.num_quarantines -= 1
        for work in self._quarantined:
            move(work, Event.CLEARED)
        self._quarantined.clear()
        self._round.clear()
        self._untested.clear()


def move(work: Work, event: Event) -> None:
    """Change the state of a work item as the table says."""
    work.state = TRANSITIONS[work.state][event]


def margin_tokens(num_quarantines: int) -> int:
    """Tokens past its last point that an item must reach when it was quarantined that often."""
    return _MARGIN_TOKENS * int(_MARGIN_FACTOR ** (num_quarantines - 1))


def excuse(work: Work) -> bool:
    """True if the item is excused from a death from outside, which is then counted."""
    if work.num_excused >= _MAX_EXCUSED:
        return False
    work.num_excused += 1
    return True
