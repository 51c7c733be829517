"""Location of a subschema within a schema, and what its grammar leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from attrs import evolve, frozen

from enginehouse_llguidance.schemas.problems import join_pointer

__all__ = ["Loosening", "Place", "Prepare", "ValuePath"]

ValuePath = tuple[str | None, ...]
"""Property names that lead to a value; None is any name or index."""


Prepare = Callable[..., Any]
"""Prepares a subschema: ``prepare(value, *steps)``."""


Loosening = Literal["counts", "derived", "names", "properties", "texts"]
"""What is left out of the grammar, so that values are checked when they are complete.

``counts``: numbers of properties, where schemas are joined; ``derived``: keywords that would be expressed by others;
``names``: expressions for names, where schemas are joined or they are many; ``properties``: those after 500 that may be
absent; ``texts``: what strings have to match besides one expression.
"""


@frozen
class Place:
    """Location of a subschema.

    Attributes:
        pointer: its JSON pointer.
        depth: number of enclosing schemas.
        joined: None if no other schema restricts the same values; otherwise the path from the value at which schemas
            were combined.
        entered: schemas that were referred to on that path.
    """

    pointer: str = ""
    depth: int = 0
    joined: ValuePath | None = None
    entered: frozenset[str] = frozenset()

    @property
    def is_alone(self) -> bool:
        """True if no other schema restricts the same value."""
        return self.joined is None

    def at(self, *steps: str | int) -> str:
        """Return the pointer of a descendant."""
        return join_pointer(self.pointer, steps)

    def beside(self) -> Place:
        """Return this location, combined with other schemas that restrict the same value."""
        return evolve(self, joined=self.joined or ())

    def of_part(self, *steps: str | int) -> Place:
        """Return the location of the schema of a property or an item."""
        joined = self.joined
        if joined is not None:
            joined = (*joined, str(steps[-1]) if steps[0] == "properties" else None)
        return evolve(self, pointer=self.at(*steps), depth=self.depth + 1, joined=joined)

    def of_branch(self, *steps: str | int) -> Place:
        """Return the location of a schema that restricts the same value."""
        return evolve(self, pointer=self.at(*steps), depth=self.depth + 1)
