"""What is remembered of work that killed workers: what of it killed, and whose it was.

A *culprit* is refused when it comes again, before it costs two more workers. It is known by what the worker died of:

- a death while it tokenized: the prompt's text, whatever is asked about it and by which address;
- a death while a constraint was compiled: the constraint;
- a death later on: prompt and constraint together, whatever the sampling.

A text that others may well write too, as it is short, is refused to the caller only whose work it was, and so is what
died later on, as more than the prompt may have been to blame. Where all that the caller has written of a prompt is one
text, such as the one message of a chat, it is remembered besides the whole; of several it is not known which it was.

An *offence* is a death that a caller's work has caused. After it that caller's work waits before it may enter a worker,
longer from offence to offence; no other's does. Both are forgotten after a while, since what killed may have been
repaired.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import msgspec

from enginehouse.contract.types import EngineRequest
from enginehouse.replay.work import Work

__all__ = ["Culprits", "Offences"]

_REMEMBERED_S = 600.0
_MAX_REMEMBERED = 256

_MIN_UNCOMMON_BYTES = 1024
"""Two callers do not write the same text of this length by chance."""

_FIRST_PAUSE_S = 1.0
_PAUSE_FACTOR = 2.0
_MAX_PAUSE_S = 60.0


class Culprits:
    """Those of one model.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found_s: dict[bytes, float] = {}  # the oldest first

    def add(self, work: Work) -> None:
        """A worker died in the isolation run of this."""
        for key in _blame(work):
            self._found_s.pop(key, None)
            self._found_s[key] = self._clock()
        while len(self._found_s) > _MAX_REMEMBERED:
            del self._found_s[next(iter(self._found_s))]

    def knows(self, work: Work) -> bool:
        """Whether workers would die of this."""
        if not self._found_s:
            return False  # as nearly always: nothing is computed
        begin_s = self._clock() - _REMEMBERED_S
        return any(self._found_s.get(key, begin_s) > begin_s for key in _keys(work))


class Offences:
    """The record of callers, on one model.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._record: dict[str, tuple[int, float]] = {}  # how many, and when the last one was

    def add(self, caller: str) -> None:
        """A worker died of work of this caller."""
        count = self.count(caller) + 1
        self._record.pop(caller, None)
        self._record[caller] = count, self._clock()
        if len(self._record) > _MAX_REMEMBERED:
            del self._record[next(iter(self._record))]

    def count(self, caller: str) -> int:
        """How many are remembered."""
        count, last_s = self._record.get(caller, (0, 0.0))
        return count if self._clock() - last_s < _REMEMBERED_S else 0

    def pause_s(self, caller: str) -> float:
        """Seconds that the caller's work has still to wait."""
        count = self.count(caller)
        if not count:
            return 0.0
        pause_s = min(_FIRST_PAUSE_S * _PAUSE_FACTOR ** (count - 1), _MAX_PAUSE_S)
        return max(0.0, self._record[caller][1] + pause_s - self._clock())


def _blame(work: Work) -> Iterator[bytes]:
    """Names of what a worker died of in the isolation run of this."""
    if work.stage == "text":
        yield from (_text_key(text, work.caller) for text in _texts(work))
    elif work.stage == "constraint":
        yield _constraint_key(work)
    elif _prompt(work.request):
        yield _whole_key(work)


def _keys(work: Work) -> Iterator[bytes]:
    """Names under which a culprit like this may be remembered."""
    long = [text for text in map(_plain, work.written) if len(text) >= _MIN_UNCOMMON_BYTES]
    yield from (_text_key(text, work.caller) for text in (*_texts(work), *long))
    yield _constraint_key(work)
    yield _whole_key(work)


def _texts(work: Work) -> list[bytes]:
    """What is tokenized: the whole prompt, and what its caller has written of it, if that is one text."""
    written = [_plain(text) for text in work.written] if len(work.written) == 1 else []
    return [text for text in (_prompt(work.request), *written) if text]


def _prompt(request: EngineRequest) -> bytes:
    if request.token_ids is not None:
        return msgspec.msgpack.encode(request.token_ids)
    return _plain("".join(segment.text for segment in request.segments))


def _plain(text: str) -> bytes:
    """A text as it is compared: templates strip what surrounds it."""
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
    """To whom it is refused: to its caller; None is everybody."""
    return None if len(content) >= _MIN_UNCOMMON_BYTES else caller


def _key(kind: str, content: bytes, reach: str | None) -> bytes:
    digest = hashlib.blake2b(msgspec.msgpack.encode((kind, reach)), digest_size=16)
    digest.update(content)
    return digest.digest()
