"""``drafters`` of a model in the settings: which drafters propose tokens for it, and with what.

A part of ``config``. Which drafters there are, and what each can be set, is known to ``plugins``.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen

__all__ = ["DrafterSettings"]


@frozen(kw_only=True)
class DrafterSettings:
    """One entry of ``drafters``: the name of a drafter, or a table with its name and settings.

    Attributes:
        name: of the drafter.
        source: of a second model that the drafter uses, written like that of a model.
        backend: name of the backend of that model; unset lets the one that suits best open it.
        settings: settings of that backend.
        options: further keys of the table; the drafter's options class reads them.
    """

    name: str
    source: str | None = None
    backend: str | None = None
    settings: dict[str, Any] = field(factory=dict)
    options: dict[str, Any] = field(factory=dict)

    @classmethod
    def read(cls, value: Any) -> DrafterSettings:
        """A name, or a table.

        Raises:
            TypeError: it is neither, or a key of core's has a wrong type.
        """
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(table.get("name"), str):
            raise TypeError("must be the name of a drafter, or a table that holds its name")
        for key, wanted, noun in (("source", str, "string"), ("backend", str, "string"), ("settings", dict, "table")):
            if not isinstance(table.get(key, wanted()), wanted):
                raise TypeError(f"{key} of the drafter {table['name']!r} must be a {noun}")
        own = {key: table[key] for key in ("name", "source", "backend", "settings") if key in table}
        return cls(**own, options={key: item for key, item in table.items() if key not in own})

    def with_source(self, source: str | None) -> DrafterSettings:
        """The same, with another source."""
        return evolve(self, source=source)
