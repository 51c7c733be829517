"""Requests that were refused because workers died of them: sent again, they are refused before they cost two more.

Clients that repeat what failed would otherwise keep a model busy with dying. A request is known by what the engine
computes, so neither another id nor another seed hides it. What was refused is forgotten after a while, since what
killed the worker may have been repaired.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from enginehouse.types import EngineRequest

__all__ = ["Poison"]

_REMEMBERED_S = 600.0
_MAX_REMEMBERED = 256


class Poison:
    """Those of one model.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused_s: dict[bytes, float] = {}  # the oldest first

    def __contains__(self, request: EngineRequest) -> bool:
        if not self._refused_s:
            return False  # as nearly always: nothing is computed
        refused_s = self._refused_s.get(_digest(request))
        return refused_s is not None and self._clock() - refused_s < _REMEMBERED_S

    def add(self, request: EngineRequest) -> None:
        """A worker died of it twice."""
        digest = _digest(request)
        self._refused_s.pop(digest, None)
        self._refused_s[digest] = self._clock()
        while len(self._refused_s) > _MAX_REMEMBERED:
            del self._refused_s[next(iter(self._refused_s))]


def _digest(request: EngineRequest) -> bytes:
    plain = msgspec.structs.replace(
        request,
        request_id="",
        sampling=msgspec.structs.replace(request.sampling, seed=0),
        priority=0,
        namespace="",
        caller="",
        queue_timeout_s=None,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(plain), digest_size=16).digest()
