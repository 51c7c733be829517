"""Where a schema stands inside another one."""

from __future__ import annotations

from attrs import evolve, frozen

from enginehouse_llguidance.schemas.problems import join_pointer

__all__ = ["Place", "ValuePath"]

ValuePath = tuple[str | None, ...]
"""Names of the properties that lead to a value; None stands for any name or index."""


@frozen
class Place:
    """A subschema's place.

    Attributes:
        pointer: its JSON pointer.
        depth: how many schemas it stands in.
        joined: None when no other schema restricts the same values; else the way to them from the value
            where schemas were joined.
        is_in_resource: it is below an inner ``$id``, so that references mean something else.
    """

    pointer: str = ""
    depth: int = 0
    joined: ValuePath | None = None
    is_in_resource: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether this schema alone decides."""
        return self.joined is None

    def at(self, *steps: str | int) -> str:
        """The pointer of something below."""
        return join_pointer(self.pointer, steps)

    def beside(self) -> Place:
        """The same place, with other schemas that restrict the same value."""
        return evolve(self, joined=self.joined or ())

    def of_part(self, *steps: str | int) -> Place:
        """The place of the schema of a property or an item."""
        joined = self.joined
        if joined is not None:
            joined = (*joined, str(steps[-1]) if steps[0] == "properties" else None)
        return evolve(self, pointer=self.at(*steps), depth=self.depth + 1, joined=joined)

    def of_branch(self, *steps: str | int) -> Place:
        """The place of a schema that restricts the same value."""
        return evolve(self, pointer=self.at(*steps), depth=self.depth + 1)
