"""What a check is, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from attrs import frozen

from enginehouse.cli.target import Target

__all__ = ["Check", "CheckFailed", "NotOffered", "Outcome", "Result", "require"]

Outcome = Literal["passed", "failed", "refused", "skipped"]
"""``refused``: the server says honestly, with a client error, that it does not offer this. ``skipped``: it could not be
tried here, for example because no API key is set. Only ``failed`` is a fault."""


class CheckFailed(Exception):
    """The server does not show the behaviour; the message says what it did instead."""


class NotOffered(Exception):
    """The check could not be made; ``outcome`` is ``refused`` or ``skipped``."""

    def __init__(self, reason: str, outcome: Literal["refused", "skipped"] = "skipped") -> None:
        super().__init__(reason)
        self.outcome: Outcome = outcome


@frozen
class Check:
    """One check.

    Attributes:
        behaviour: number of the behaviour, such as ``H01``.
        sentence: what must hold.
        run: tries it; raises :class:`CheckFailed` or :class:`NotOffered`.
    """

    behaviour: str
    sentence: str
    run: Callable[[Target], None]


@frozen
class Result:
    """How one check ended; ``detail`` says why it did not pass."""

    behaviour: str
    sentence: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


def require(condition: Any, message: str) -> None:
    """Raise CheckFailed with ``message`` unless ``condition`` is true."""
    if not condition:
        raise CheckFailed(message)
