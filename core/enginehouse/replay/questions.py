"""Questions to an engine that are no generations: asked again when the worker dies before it has answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from enginehouse.backend import Engine
from enginehouse.errors import EngineDead, ModelLoadError, ModelNotReady, ModelUnloaded, WorkerDied
from enginehouse.models import LoadedModel

__all__ = ["ask"]

_T = TypeVar("_T")

# Between two looks at a worker of which it is not known yet why it closed its link.
_RETRY_S = 0.05


async def ask(model: LoadedModel, question: Callable[[Engine], Awaitable[_T]]) -> _T:
    """What a model's engine answers; a worker that dies over it is forgiven once.

    Raises:
        EngineDead: the next worker died as well, there was none in time, or the model's settings want no replays.
        EnginehouseError: whatever the engine raises.
    """
    try:
        return await question(model.engine)
    except WorkerDied:
        if not model.settings.replay:
            raise
    try:
        async with asyncio.timeout(model.settings.replay_timeout_s):
            return await question(await _next_engine(model))
    except TimeoutError:
        raise EngineDead("The model stopped working and was not back in time; try again later.") from None
    except (ModelLoadError, ModelNotReady, ModelUnloaded) as error:
        raise EngineDead(f"The model stopped working and could not be started again: {error.message}") from error


async def _next_engine(model: LoadedModel) -> Engine:
    while True:
        engine = (await model.served.restarted()).engine
        if engine is not model.engine:
            return engine
        await asyncio.sleep(_RETRY_S)
