"""Steps of core's engine until it has no work, with a limit: a plugin that makes no progress fails a test in time."""

from __future__ import annotations

from collections.abc import Iterator

from enginehouse.engine.loop import EngineOutput, StepEngine

__all__ = ["events_of"]

_MAX_STEPS = 20_000


def events_of(engine: StepEngine) -> Iterator[EngineOutput]:
    """Yield request id and event until every request has ended.

    Raises:
        AssertionError: the engine still has work after many more steps than the requests of a suite need.
    """
    for _ in range(_MAX_STEPS):
        if not engine.has_work():
            return
        yield from engine.step()
    raise AssertionError(f"the requests have not ended after {_MAX_STEPS} steps")
