"""Settings of optimisations: drafters, early exit, routing."""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen
from attrs.validators import ge

from enginehouse.settings.reload import LIVE


@frozen(kw_only=True)
class DrafterSettings:
    """One entry of ``drafters``: the name of a drafter, or a table with its name and settings.

    Attributes:
        name: name of the drafter.
        source: source of a second model that the drafter uses, in the format of a model's ``source``.
        backend: name of the backend of that model; unset selects the best match.
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
        """Read a name or a table.

        Raises:
            TypeError: it is neither, or one of core's keys has a wrong type.
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
        """Return a copy with another source."""
        return evolve(self, source=source)


@frozen(kw_only=True)
class ExitPolicySettings:
    """The name of an exit policy, or a table with its name and settings.

    Attributes:
        name: name of the policy.
        options: further keys of the table; the policy's options class reads them.
    """

    name: str
    options: dict[str, Any] = field(factory=dict)

    @classmethod
    def read(cls, value: Any) -> ExitPolicySettings:
        """Read a name or a table.

        Raises:
            TypeError: it is neither.
        """
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(table.get("name"), str):
            raise TypeError("must be the name of an exit policy, or a table that holds its name")
        return cls(name=table["name"], options={key: item for key, item in table.items() if key != "name"})


@frozen(kw_only=True)
class RouterSettings:
    """``[router]``: model selection for requests for the model ``auto``, and fallback models.

    Attributes:
        strategy: name of the router; the default is ``load``.
        models: the candidate models for ``auto``, the weakest and cheapest first; empty is every model, in their order.
        default: the model to use unless there is a reason for another one; unset is the first of ``models``.
        fallbacks: model to the models that replace it, in this order, while it cannot answer.
        max_failures: number of consecutive failures after which a model is suspended.
        pause_s: time in seconds before one request tries a suspended model again.
    """

    strategy: str | None = field(default=None, metadata=LIVE)
    models: tuple[str, ...] = field(default=(), metadata=LIVE)
    default: str | None = field(default=None, metadata=LIVE)
    fallbacks: dict[str, tuple[str, ...]] = field(factory=dict, metadata=LIVE)
    max_failures: int = field(default=3, validator=ge(1), metadata=LIVE)
    pause_s: float = field(default=30.0, validator=ge(0), metadata=LIVE)

    def named_models(self) -> list[tuple[str, str]]:
        """Return every model named in these settings, with the path of the setting."""
        named = [("router.models", name) for name in self.models]
        if self.default is not None:
            named.append(("router.default", self.default))
        for name, others in self.fallbacks.items():
            path = f"router.fallbacks.{name}"
            named += [("router.fallbacks", name), *((path, other) for other in others)]
        return named
