"""``[router]`` of the settings: what the model name ``auto`` means, and which models stand in for others.

A part of ``config``, which checks the names. Options of a strategy are those of its plugin, ``[plugins.router]``.
"""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

__all__ = ["RouterSettings"]


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
