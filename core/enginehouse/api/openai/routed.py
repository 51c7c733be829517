"""How a request got its model, on the wire: the response header, and the member ``routed`` of an answer's details."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from enginehouse.pipeline.pipeline import RunningRequest
from enginehouse.pipeline.routing import Routed
from enginehouse.settings.profiles import Profile

__all__ = ["routed_headers", "shown_routed"]

_HEADER = "x-octomil-routed-model"


def routed_headers(running: Sequence[RunningRequest], profile: Profile) -> list[tuple[str, str]]:
    """The header that names the model, or of several prompts the models, where there was a choice."""
    names = dict.fromkeys(one.model.name for one in running if one.routed is not None)
    return [(profile.optimization_headers.get("routed_model", _HEADER), ", ".join(names))] if names else []


def shown_routed(routed: Routed | None) -> dict[str, Any] | None:
    """What is told about the choice; None where there was none."""
    if routed is None:
        return None
    return {
        "strategy": routed.strategy,
        "reason": routed.reason,
        "decision_ms": round(1000 * routed.decision_s, 3),
        "tried": [attrs.asdict(failed) for failed in routed.tried],
        "discarded_tokens": routed.num_discarded_tokens,
    }
