"""Settings of optimisations: compressor, drafter, early exit, router."""

from __future__ import annotations

from typing import Any, Literal

from attrs import evolve, field, frozen
from attrs.validators import ge, gt, le, optional

from enginehouse.settings.structuring import strict_converter

__all__ = ["CompressorSettings", "DrafterSettings", "ExitPolicySettings", "RouterSettings"]


@frozen(kw_only=True)
class CompressorSettings:
    """``compressor``: a method by its name, or a table with these keys.

    Attributes:
        method: name of a compressor.
        ratio: share of the tokens that is kept of what may be shortened; unset is 0.5, for methods that have one.
        when: ``always``, ``overflow`` only for prompts that the model's context could not hold, which else are
            refused, ``asked`` only where a request says so.
        min_tokens: of ``always``: prompts with less that may be shortened are left alone.
        system: shorten system messages, too.
        scorer: name of the model that compressors ask how probable texts are; unset is the model itself.
    """

    method: str
    ratio: float | None = field(default=None, validator=optional([gt(0), le(1)]))
    when: Literal["always", "overflow", "asked"] = "always"
    min_tokens: int = field(default=256, validator=ge(0))
    system: bool = False
    scorer: str | None = None

    @classmethod
    def read(cls, value: Any) -> CompressorSettings:
        """A name, or a table.

        Raises:
            TypeError: it is neither.
            Exception: whatever the converter raises.
        """
        table = {"method": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(table.get("method"), str):
            raise TypeError("must be the name of a method, or a table that holds it as method")
        return strict_converter().structure(table, cls)


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


@frozen(kw_only=True)
class RouterSettings:
    """``[router]``: which model answers a request for the model ``auto``, and which ones stand in for others.

    Attributes:
        strategy: name of the router that decides; ``load`` where nothing is said.
        models: what ``auto`` may mean, the weakest and cheapest model first; empty is every model, in their order.
        default: the model to take where nothing speaks for another one; unset is the first of ``models``.
        fallbacks: model to the models that are tried in its place, in this order, while it cannot answer.
        max_failures: failures in a row after which a model is left aside.
        pause_s: seconds until one request tries it again then.
    """

    strategy: str | None = None
    models: tuple[str, ...] = ()
    default: str | None = None
    fallbacks: dict[str, tuple[str, ...]] = field(factory=dict)
    max_failures: int = field(default=3, validator=ge(1))
    pause_s: float = field(default=30.0, validator=ge(0))

    def named_models(self) -> list[tuple[str, str]]:
        """Every model that is named here, with the path of the setting that does it."""
        named = [("router.models", name) for name in self.models]
        if self.default is not None:
            named.append(("router.default", self.default))
        for name, others in self.fallbacks.items():
            path = f"router.fallbacks.{name}"
            named += [("router.fallbacks", name), *((path, other) for other in others)]
        return named
