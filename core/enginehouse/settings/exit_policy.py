"""``exit_policy`` of a model in the settings: which policy lets its tokens leave early, and with what.

A part of ``config``. Which policies there are, and what each can be set, is known to ``plugins``.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

__all__ = ["ExitPolicySettings"]


@frozen(kw_only=True)
class ExitPolicySettings:
    """The name of an exit policy, or a table with its name and settings.

    Attributes:
        name: of the policy.
        options: further keys of the table; the policy's options class reads them.
    """

    name: str
    options: dict[str, Any] = field(factory=dict)

    @classmethod
    def read(cls, value: Any) -> ExitPolicySettings:
        """A name, or a table.

        Raises:
            TypeError: it is neither.
        """
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(table.get("name"), str):
            raise TypeError("must be the name of an exit policy, or a table that holds its name")
        return cls(name=table["name"], options={key: item for key, item in table.items() if key != "name"})
