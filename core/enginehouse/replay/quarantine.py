"""Finds the work that kills workers, with certainty, and without refusing any other.

After a death everything that the worker was working on is suspect. Suspects go back one at a time, each alone in the
worker (its *isolation run*), until it has come well past the point where it was; then it steps aside for the next one,
and when all have passed, all go on together. A worker that dies in an isolation run was killed by the work in it.

``TRANSITIONS`` is the table of docs/recovery.md ("Finding the cause"). A death from outside (``kill -9``, with
memory to spare) is held against no work twice; then it is, since a watcher that kills what takes too much memory looks
the same from here.

The first suspects are the likeliest: those of callers whose work has killed before, then those that had come least far,
the latest arrival first. When the culprit is found, the suspicion against the others ends and leaves no trace. Of a
suspect whose client leaves before its isolation run has ended it stays unknown: when no culprit is found, the death is
an offence of its caller.

"Well past" is further each time a suspicion ended without an explanation: work that kills its worker not at once but
again and again, some way on, is alone with it sooner or later.

Pure bookkeeping: knows no event loop and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from enginehouse.replay.culprits import Offences
from enginehouse.replay.work import State, Work

__all__ = ["TRANSITIONS", "Event", "Quarantine"]

_MARGIN_TOKENS = 8
"""How far past its point a suspect must come the first time. Tokens that are drawn but not told of when a worker dies
are few: an unfinished character, the beginning of a stop string."""

_MARGIN_FACTOR = 4
"""How much further it must come each further time."""

_MAX_FORGIVEN = 2
"""Deaths from outside that are not held against work that was in the worker."""


class Event(Enum):
    """What happens to a piece of work."""

    ENTERED = "entered"
    LEFT = "left"  # it stepped aside, and the worker has let it go
    DIED = "died"  # its worker did, of what it did
    LOST = "lost"  # its worker died otherwise
    PASSED = "passed"
    CLEARED = "cleared"
    ENDED = "ended"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.WAITING: {Event.ENTERED: State.RUNNING, Event.ENDED: State.ENDED},
    State.RUNNING: {
        Event.LEFT: State.WAITING,
        Event.DIED: State.SUSPECT,
        Event.LOST: State.WAITING,
        Event.ENDED: State.ENDED,
    },
    State.SUSPECT: {Event.ENTERED: State.ISOLATED, Event.CLEARED: State.WAITING, Event.ENDED: State.ENDED},
    State.ISOLATED: {
        Event.DIED: State.CULPRIT,
        Event.LOST: State.SUSPECT,
        Event.PASSED: State.RUNNING,
        Event.ENDED: State.ENDED,
    },
}


class Quarantine:
    """The work of one model, and who of it is suspect.

    Args:
        offences: the record of callers; deaths are added to it as they are explained.
    """

    def __init__(self, offences: Offences) -> None:
        self._offences = offences
        self._inside: dict[Work, None] = {}  # what the worker holds, also of clients that have left
        self._suspects: list[Work] = []  # the next one first
        self._isolated: Work | None = None
        self._goal = 0
        self._round: list[Work] = []  # all that came under suspicion since there was none
        self._untested: set[str] = set()  # callers of suspects that left before their isolation run had ended

    @property
    def is_active(self) -> bool:
        """Whether there are suspects, so that nothing else may enter the worker."""
        return self._isolated is not None or bool(self._suspects)

    def may_enter(self, work: Work) -> bool:
        """Whether a piece of work that is outside may enter the worker now."""
        if work in self._inside:
            return False
        return not self.is_active or (not self._inside and self._suspects[:1] == [work])

    def entered(self, work: Work) -> None:
        """It may enter, and does."""
        assert self.may_enter(work)
        self._inside[work] = None
        _move(work, Event.ENTERED)
        if work.state is State.ISOLATED:
            self._isolated = self._suspects.pop(0)
            self._goal = work.num_tokens + _MARGIN_TOKENS * _MARGIN_FACTOR ** (work.num_suspicions - 1)

    def progressed(self, work: Work) -> bool:
        """It has come further; True when it has passed its isolation run and must step aside for the next one."""
        if work is not self._isolated or work.num_tokens < self._goal:
            return False
        self._isolated = None
        _move(work, Event.PASSED)
        if not self._suspects:
            self._end_round()
        return bool(self._suspects)

    def over(self, work: Work) -> None:
        """Its client has left, or it has come to its end; harmless when that is known."""
        work.is_over = True
        if work not in self._inside:
            self._end(work)

    def left(self, work: Work) -> None:
        """The worker holds nothing of it any more; harmless when that is known."""
        if work in self._inside:
            del self._inside[work]
            if work.is_over:
                self._end(work)
            elif work.state is State.RUNNING:
                _move(work, Event.LEFT)

    def died(self, working: Sequence[Work], *, from_outside: bool = False) -> Work | None:
        """The worker died while it worked on these; returns the culprit when it is known."""
        blamed = [work for work in working if not (from_outside and _forgive(work))]
        inside, self._inside = self._inside, {}
        isolated, self._isolated = self._isolated, None
        if isolated in blamed:  # which was alone
            _move(isolated, Event.DIED)
            self._offences.add(isolated.caller)
            self._end_round(is_explained=True)
            return isolated
        for work in inside:
            self._lose(work, is_blamed=work in blamed)
        self._suspects.sort(key=lambda one: (-self._offences.count(one.caller), one.num_tokens, -one.arrival))
        if not self.is_active:
            self._end_round()
        return None

    def _lose(self, work: Work, *, is_blamed: bool) -> None:
        """The worker of one of several, or of one that it had not begun with, has died."""
        _move(work, Event.DIED if is_blamed else Event.LOST)
        if is_blamed:
            work.num_suspicions += 1
            self._round.append(work)
        if work.state is State.SUSPECT:
            self._suspects.append(work)
        if work.is_over:
            self._end(work, is_last=False)

    def _end(self, work: Work, *, is_last: bool = True) -> None:
        if work.state in (State.ENDED, State.CULPRIT):
            return
        is_suspect = work.state in (State.SUSPECT, State.ISOLATED)
        _move(work, Event.ENDED)
        if work is self._isolated:
            self._isolated = None
        elif work in self._suspects:
            self._suspects.remove(work)
        if is_suspect and not work.is_answered:
            self._untested.add(work.caller)
        if is_suspect and is_last and not self.is_active:
            self._end_round()

    def _end_round(self, *, is_explained: bool = False) -> None:
        """Suspicion ends: the culprit was found, or all have passed or left."""
        if not is_explained:
            for caller in self._untested:
                self._offences.add(caller)
        if is_explained or self._untested:
            for work in self._round:
                work.num_suspicions -= 1
        for work in self._suspects:
            _move(work, Event.CLEARED)
        self._suspects.clear()
        self._round.clear()
        self._untested.clear()


def _move(work: Work, event: Event) -> None:
    work.state = TRANSITIONS[work.state][event]


def _forgive(work: Work) -> bool:
    """Whether work is not suspected of a death from outside."""
    if work.num_forgiven >= _MAX_FORGIVEN:
        return False
    work.num_forgiven += 1
    return True
