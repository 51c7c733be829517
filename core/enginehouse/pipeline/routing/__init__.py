"""Routing: plans which models are tried for a request, and tries them."""

from __future__ import annotations

from enginehouse.pipeline.routing.attempts import Attempts, FailedAttempt, OnDiscarded, Routed
from enginehouse.pipeline.routing.planning import AUTO, Plan, Planner, TooLong, find_too_long

__all__ = [
    "AUTO",
    "Attempts",
    "FailedAttempt",
    "OnDiscarded",
    "Plan",
    "Planner",
    "Routed",
    "TooLong",
    "find_too_long",
]
