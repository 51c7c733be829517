"""Time limits of requests, from the settings of the server and the model."""

from __future__ import annotations

from attrs import frozen

from enginehouse.settings.config import LimitsSettings, ModelSettings


@frozen(kw_only=True)
class Timeouts:
    """Time limits of one request in seconds; None means no limit.

    Attributes:
        queue_s: from its acceptance until it is scheduled into the batch.
        first_token_s: from its arrival to its first output.
        total_s: from its arrival to the end of its answer.
    """

    queue_s: float | None
    first_token_s: float | None
    total_s: float | None


def timeouts_of(limits: LimitsSettings, model: ModelSettings) -> Timeouts:
    """Return the time limits for requests to a model: its own settings, else the server's."""

    def either(own: float | None, usual: float | None) -> float | None:
        return usual if own is None else own

    return Timeouts(
        queue_s=either(model.queue_timeout_s, limits.queue_timeout_s),
        first_token_s=either(model.first_token_timeout_s, limits.first_token_timeout_s),
        total_s=either(model.total_timeout_s, limits.total_timeout_s),
    )
