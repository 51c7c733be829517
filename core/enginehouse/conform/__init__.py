"""Checks of OpenAI-compatible servers: :data:`CHECKS`, run by :func:`run_checks`, written by :mod:`.report`."""

from __future__ import annotations

from enginehouse.conform.catalogue import CHECKS
from enginehouse.conform.check import Check, Outcome, Result
from enginehouse.conform.running import connect, run_checks
from enginehouse.conform.target import Target

__all__ = ["CHECKS", "Check", "Outcome", "Result", "Target", "connect", "run_checks"]
