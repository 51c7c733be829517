"""A conformance check and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from attrs import frozen

from enginehouse.cli.target import Target

__all__ = ["Check", "CheckFailed", "NotOffered", "Outcome", "Result", "require"]

Outcome = Literal["passed", "failed", "refused", "skipped"]
"""``refused``: the server declares, with a client error, that it does not support this. ``skipped``: it could not be
tested, for example because no API key is set. Only ``failed`` is a fault.
"""


class CheckFailed(Exception):
    """The server does not show the behaviour; the message describes what it did instead."""


class NotOffered(Exception):
    """The check could not be run; ``outcome`` is ``refused`` or ``skipped``."""

    def __init__(self, reason: str, outcome: Literal["refused", "skipped"] = "skipped") -> None:
        super().__init__(reason)
        self.outcome: Outcome = outcome


@frozen
class Check:
    """One check.

    Attributes:
        behaviour: number of the behaviour, such as ``H01``.
        sentence: the requirement.
        run: runs the check; raises :class:`CheckFailed` or :class:`NotOffered`.
    """

    behaviour: str
    sentence: str
    run: Callable[[Target], None]


@frozen
class Result:
    """Outcome of one check; ``detail`` is the reason if it did not pass."""

    behaviour: str
    sentence: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


def require(condition: Any, message: str) -> None:
    """Raise CheckFailed with ``message`` unless ``condition`` is true."""
    if not condition:
        raise CheckFailed(message)
