"""Errors in a schema, with their location."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["NotExpressible", "SchemaProblem", "TooManySubschemas", "join_pointer"]


class SchemaProblem(ValueError):
    """A schema is malformed, too large, or uses a feature that cannot be enforced.

    Attributes:
        pointer: JSON pointer of the keyword, "" for the whole schema.
        reason: the message without the pointer.
    """

    def __init__(self, pointer: str, message: str) -> None:
        shown = pointer if len(pointer) <= 200 else f"{pointer[:200]}..."
        super().__init__(f"'{shown}': {message}" if pointer else message)
        self.pointer, self.reason = pointer, message


class TooManySubschemas(SchemaProblem):
    """A schema has too many parts, together with those that its keywords are expressed by."""


class NotExpressible(SchemaProblem):
    """A keyword has a meaning that a grammar cannot express."""


def join_pointer(pointer: str, steps: Iterable[str | int]) -> str:
    """Return the JSON pointer of a descendant of ``pointer``."""
    escaped = (str(step).replace("~", "~0").replace("/", "~1") for step in steps)
    return "".join([pointer, *(f"/{step}" for step in escaped)])
