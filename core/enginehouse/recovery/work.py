"""Work items, and the record of those that killed workers: the part that caused the death, and its caller.

Everything that runs in a worker on behalf of a caller is a work item: requests, tokenize and detokenize calls, engine
snapshots. Modified by :class:`enginehouse.recovery.quarantine.Quarantine` and by messages of its worker.

A *culprit* (poison request) is refused when it is sent again, before it kills two more workers. It is identified by the
stage in which the worker died:

- while tokenizing: the prompt's text, for any kind of request and any API route;
- while compiling a constraint: the constraint;
- later: prompt and constraint together, for any sampling parameters.

A short text, which others may well send too, is refused only to the caller who sent it. So is a culprit of the third
kind, because more than the prompt may be the cause. If the caller wrote exactly one text of the prompt, such as the
only message of a chat, that text is recorded in addition to the whole prompt; with several texts, or with images, it is
unknown which one was the cause.

An *offence* is a death caused by a caller's work. After it, only that caller's work waits before it may enter a worker,
and longer after each further offence. Culprits and offences expire after a while, because the cause may have been
repaired.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from enum import Enum

import msgspec

from enginehouse.contract.engine import Placement
from enginehouse.contract.errors import PluginFailed, RequestKillsWorker, WorkerNotBack
from enginehouse.contract.types import EngineRequest
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.messages import Stage
from enginehouse.workers.request_table import WorkObserver

Refusal = RequestKillsWorker | PluginFailed


class State(Enum):
    """State of a work item; see ``TRANSITIONS`` in :mod:`enginehouse.recovery.quarantine`."""

    WAITING = "waiting"  # outside
    RUNNING = "running"  # in a worker, together with others
    QUARANTINED = "quarantined"  # outside: a worker died while it worked on this
    ISOLATED = "isolated"  # alone in a worker: its isolation run
    CULPRIT = "culprit"  # a worker died in its isolation run
    ENDED = "ended"


class Work(WorkObserver):
    """One work item. It observes the worker's work on it.

    Args:
        caller: the caller; all callers without API keys are one.
        arrival: arrival number, increasing.
        request: the engine's input; for a call, its text or token ids.
        written: the texts of its prompt that its caller wrote, by which it is recognised on other API routes.
        timeout_s: maximum time without a worker.

    Attributes:
        state: current state.
        stage: the part of it on which its worker is working.
        engine: the worker that holds it, even after its client has left; None while it is outside.
        num_quarantines: number of times it was quarantined without an explanation being found.
        num_excused: number of deaths from outside from which it was excused.
        died_at: place of the last worker of several that died while it worked on this.
        placement: why it is in its worker, if there are several.
        is_over: True if its client expects nothing more.
        is_answered: True if it ended by itself, whether its client waited for that or not.
        num_plugin_deaths: number of workers that ended in a call of a plugin while they worked on it.
        refusal: reason why it may not enter a worker again.
    """

    def __init__(
        self, caller: str, arrival: int, request: EngineRequest, timeout_s: float, written: Sequence[str] = ()
    ) -> None:
        self.caller = caller
        self.arrival = arrival
        self.request = request
        self.written = tuple(written)
        self.state = State.WAITING
        self.stage: Stage = "waiting"
        self.engine: WorkerEngine | None = None
        self.num_quarantines = 0
        self.num_excused = 0
        self.died_at = ""
        self.placement: Placement | None = None
        self.is_over = False
        self.is_answered = False
        self.num_plugin_deaths = 0
        self.refusal: Refusal | None = None
        self._timeout_s = timeout_s
        self._limit: asyncio.Timeout | None = None

    @property
    def num_tokens(self) -> int:
        """Progress: number of tokens of its answer."""
        return 0

    def content(self) -> bytes:
        """Return its whole prompt, by which it is recognised; empty for a call without one."""
        return _prompt(self.request)

    def stage_began(self, stage: Stage) -> None:
        """The worker starts a stage of it."""
        self.stage = stage

    def lost(self) -> None:
        """The worker has died: the item must find another one."""

    def leave_worker(self) -> None:
        """The item has passed its isolation run: it must leave the worker to the next item, and return later."""

    # -- time without a worker ---------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def bounded(self, *, from_now: bool) -> AsyncIterator[None]:
        """A context in which the item waits for workers, limited in time.

        Args:
            from_now: True if the time limit starts now; otherwise it starts with :meth:`start_limit`.

        Raises:
            EngineDead: it took too long.
        """
        try:
            async with asyncio.timeout(self._timeout_s if from_now else None) as self._limit:
                yield
        except TimeoutError:
            message = f"The model stopped working and was not back within {self._timeout_s:g} s; try again later."
            raise WorkerNotBack(message) from None
        finally:
            self._limit = None

    @property
    def is_bounded(self) -> bool:
        """True if it is waiting for a worker, or was just submitted to one."""
        return self._limit is not None

    def start_limit(self) -> None:
        """Start the time limit for waiting; a repeated call has no effect."""
        if self._limit is not None and self._limit.when() is None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)


_KNOWN = "An equal request has killed this model's worker before; it is refused. Please do not send it again."
_REMEMBERED_S = 600.0
_MAX_REMEMBERED = 256

_MIN_UNCOMMON_BYTES = 1024
"""Two callers do not write the same text of this length by chance."""

_FIRST_PAUSE_S = 1.0
_PAUSE_FACTOR = 2.0
_MAX_PAUSE_S = 60.0


def _known() -> Refusal:
    return RequestKillsWorker(_KNOWN)


class Culprits:
    """Culprits of one model.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[bytes, tuple[float, Callable[[], Refusal]]] = {}  # oldest first

    def add(self, work: Work, refuse: Callable[[], Refusal] = _known) -> None:
        """Add a work item: a worker died in its isolation run.

        Args:
            refuse: creates the error of an equal one; each gets its own, as a raised error keeps its frames.
        """
        for key in _blame(work):
            self._found.pop(key, None)
            self._found[key] = self._clock(), refuse
        while len(self._found) > _MAX_REMEMBERED:
            del self._found[next(iter(self._found))]

    def refusal(self, work: Work) -> Refusal | None:
        """Return the error of a work item of which workers are expected to die; None for any other."""
        if not self._found:
            return None  # the usual case: no keys are computed
        begin_s = self._clock() - _REMEMBERED_S
        found = (self._found[key] for key in _keys(work) if key in self._found)
        return next((refuse() for found_s, refuse in found if found_s > begin_s), None)


class Offences:
    """Offences of callers, on one model.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._record: dict[str, tuple[int, float]] = {}  # number of offences, and time of the last one

    def add(self, caller: str) -> None:
        """Record that a worker died of this caller's work."""
        count = self.count(caller) + 1
        self._record.pop(caller, None)
        self._record[caller] = count, self._clock()
        if len(self._record) > _MAX_REMEMBERED:
            del self._record[next(iter(self._record))]

    def count(self, caller: str) -> int:
        """Number of offences that have not expired."""
        count, last_s = self._record.get(caller, (0, 0.0))
        return count if self._clock() - last_s < _REMEMBERED_S else 0

    def pause_s(self, caller: str) -> float:
        """Seconds that the caller's work still has to wait."""
        count = self.count(caller)
        if not count:
            return 0.0
        pause_s = min(_FIRST_PAUSE_S * _PAUSE_FACTOR ** (count - 1), _MAX_PAUSE_S)
        return max(0.0, self._record[caller][1] + pause_s - self._clock())


def _blame(work: Work) -> Iterator[bytes]:
    """Yield the keys of the part of the work in whose isolation run the worker died."""
    if work.stage == "text":
        texts = _texts(work)
        if any(segment.media is not None for segment in work.request.segments):
            texts = texts[:1]
        yield from (_text_key(text, work.caller) for text in texts)
    elif work.stage == "constraint":
        yield _constraint_key(work)
    elif work.content():
        yield _whole_key(work)


def _keys(work: Work) -> Iterator[bytes]:
    """Yield the keys under which a culprit like this work item may be recorded."""
    long = [text for text in map(_plain, work.written) if len(text) >= _MIN_UNCOMMON_BYTES]
    yield from (_text_key(text, work.caller) for text in (*_texts(work), *long))
    yield _constraint_key(work)
    yield _whole_key(work)


def _texts(work: Work) -> list[bytes]:
    """Return the tokenized texts: the whole prompt, and the part written by the caller if that is one text."""
    written = [_plain(text) for text in work.written] if len(work.written) == 1 else []
    return [text for text in (work.content(), *written) if text]


def _prompt(request: EngineRequest) -> bytes:
    if request.token_ids is not None:
        return msgspec.msgpack.encode(request.token_ids)
    return _plain("".join(segment.content for segment in request.segments))


def _plain(text: str) -> bytes:
    """Normalise a text for comparison: templates strip surrounding whitespace."""
    return text.strip().encode("utf-8", "surrogatepass")


def _text_key(text: bytes, caller: str) -> bytes:
    return _key("text", text, _reach(text, caller))


def _constraint_key(work: Work) -> bytes:
    constraint = msgspec.msgpack.encode(work.request.constraint)
    return _key("constraint", constraint, _reach(constraint, work.caller))


def _whole_key(work: Work) -> bytes:
    request = work.request
    rest = msgspec.msgpack.encode((request.chat, request.constraint))
    return _key("whole", work.content() + rest, work.caller)


def _reach(content: bytes, caller: str) -> str | None:
    """Return the caller to whom the content is refused; None refuses it to all callers."""
    return None if len(content) >= _MIN_UNCOMMON_BYTES else caller


def _key(kind: str, content: bytes, reach: str | None) -> bytes:
    digest = hashlib.blake2b(msgspec.msgpack.encode((kind, reach)), digest_size=16)
    digest.update(content)
    return digest.digest()
