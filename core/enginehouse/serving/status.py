"""What is known about a model, as a value that others may keep and show."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from enginehouse.contract.types import ModelInfo

__all__ = ["ModelState", "ModelStatus"]

ModelState = Literal["unloaded", "loading", "ready", "draining", "restarting", "failed"]


@frozen(kw_only=True)
class ModelStatus:
    """What is known about one model now.

    Attributes:
        instance: number of the model among all that this server has had; a new configuration may replace it by another
            one of the same name.
        created: Unix time in seconds when this server began to serve the model.
        info: of the last successful load; None before it.
        error: why the model failed or could not be loaded, or why it is being restarted.
        progress: share of the current load, 0 to 1; 1 when ready.
        progress_text: what the current load is doing.
        backend: name of the chosen backend; None before the choice.
        reason: why this backend was chosen.
        num_restarts: how often its worker died and was started again.
        on_demand: its load was begun for a request, so requests wait for it.
        num_running: requests that use it.
        num_waiting: requests that wait for it to be loaded.
        idle_s: seconds since its last use; None while it is used or not loaded.
        memory_bytes: memory that it holds by its backend's estimate, on ``device``; None when it holds none.
    """

    name: str
    instance: int
    state: ModelState
    aliases: tuple[str, ...]
    created: int
    info: ModelInfo | None = None
    error: str | None = None
    progress: float = 0.0
    progress_text: str = ""
    backend: str | None = None
    reason: str = ""
    num_restarts: int = 0
    on_demand: bool = False
    num_running: int = 0
    num_waiting: int = 0
    idle_s: float | None = None
    memory_bytes: int | None = None
    device: str | None = None
