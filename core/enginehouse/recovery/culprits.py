"""Record of the work that killed workers: the part that caused the death, and its caller.

A *culprit* (poison request) is refused when it is sent again, before it kills two more workers. It is identified by the
stage in which the worker died:

- while tokenizing: the prompt's text, for any kind of request and any API route;
- while compiling a constraint: the constraint;
- later: prompt and constraint together, for any sampling parameters.

A short text, which others may well send too, is refused only to the caller who sent it. So is a culprit of the third
kind, because more than the prompt may be the cause. If the caller wrote exactly one text of the prompt, such as the
only message of a chat, that text is recorded in addition to the whole prompt; with several texts it is unknown which
one was the cause.

An *offence* is a death caused by a caller's work. After it, only that caller's work waits before it may enter a worker,
and longer after each further offence. Culprits and offences expire after a while, because the cause may have been
repaired.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import msgspec

from enginehouse.contract.types import EngineRequest
from enginehouse.recovery.work import Work

__all__ = ["Culprits", "Offences"]

_REMEMBERED_S = 600.0
_MAX_REMEMBERED = 256

_MIN_UNCOMMON_BYTES = 1024
"""Two callers do not write the same text of this length by chance."""

_FIRST_PAUSE_S = 1.0
_PAUSE_FACTOR = 2.0
_MAX_PAUSE_S = 60.0


class Culprits:
    """Culprits of one model.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found_s: dict[bytes, float] = {}  # oldest first

    def add(self, work: Work) -> None:
        """Add a work item: a worker died in its isolation run."""
        for key in _blame(work):
            self._found_s.pop(key, None)
            self._found_s[key] = self._clock()
        while len(self._found_s) > _MAX_REMEMBERED:
            del self._found_s[next(iter(self._found_s))]

    def knows(self, work: Work) -> bool:
        """True if workers are expected to die of this work item."""
        if not self._found_s:
            return False  # the usual case: no keys are computed
        begin_s = self._clock() - _REMEMBERED_S
        return any(self._found_s.get(key, begin_s) > begin_s for key in _keys(work))


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
        yield from (_text_key(text, work.caller) for text in _texts(work))
    elif work.stage == "constraint":
        yield _constraint_key(work)
    elif _prompt(work.request):
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
    return [text for text in (_prompt(work.request), *written) if text]


def _prompt(request: EngineRequest) -> bytes:
    if request.token_ids is not None:
        return msgspec.msgpack.encode(request.token_ids)
    return _plain("".join(segment.text for segment in request.segments))


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
    return _key("whole", _prompt(request) + rest, work.caller)


def _reach(content: bytes, caller: str) -> str | None:
    """Return the caller to whom the content is refused; None refuses it to all callers."""
    return None if len(content) >= _MIN_UNCOMMON_BYTES else caller


def _key(kind: str, content: bytes, reach: str | None) -> bytes:
    digest = hashlib.blake2b(msgspec.msgpack.encode((kind, reach)), digest_size=16)
    digest.update(content)
    return digest.digest()
