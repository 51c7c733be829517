"""Settings of the plugin, ``[plugins.router]``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, le, optional

from enginehouse.contract.router import MAX_PROBE_TOKENS
from enginehouse_router.features import WEIGHTS

__all__ = ["RouterOptions", "Rule"]


def _check_weights(_: object, attribute: object, value: dict[str, float]) -> None:
    unknown = sorted(set(value) - set(WEIGHTS))
    if unknown:
        raise ValueError(f"there is no feature {unknown[0]!r}; there are: {', '.join(WEIGHTS)}")


def _check_thresholds(_: object, attribute: object, value: tuple[float, ...]) -> None:
    if list(value) != sorted(value) or not all(0 <= number <= 1 for number in value):
        raise ValueError("'thresholds' must grow, from 0 to 1")


@frozen(kw_only=True)
class Rule:
    """One entry of ``rules``: it holds when everything that it says does; the first one that holds decides.

    Attributes:
        model: the model to take.
        contains: words or phrases, of which the last user message has at least one; in any case, as whole words.
        system_contains: the same of the system messages.
        min_chars: least length of all messages together.
        max_chars: largest length of all messages together.
        min_turns: least number of user messages.
        tools: whether there are tools.
        structured: whether the answer must have a form, such as a JSON schema.
        code: whether the last user message holds code.
    """

    model: str
    contains: tuple[str, ...] = ()
    system_contains: tuple[str, ...] = ()
    min_chars: int | None = field(default=None, validator=optional(ge(0)))
    max_chars: int | None = field(default=None, validator=optional(ge(0)))
    min_turns: int | None = field(default=None, validator=optional(ge(1)))
    tools: bool | None = None
    structured: bool | None = None
    code: bool | None = None


@frozen(kw_only=True)
class RouterOptions:
    """Options of the strategies.

    Attributes:
        rules: of the strategy ``rules``, in order.
        weights: of the strategy ``difficulty``: feature to weight, in the place of the built-in ones.
        thresholds: of ``difficulty``: the scores from which on each model but the first is taken; unset divides 0 to 1
            evenly.
        probe_tokens: of ``cascade``: tokens of an answer by which it is judged.
        min_probability: of ``cascade``: geometric mean of their probabilities from which on it is taken.
    """

    rules: tuple[Rule, ...] = ()
    weights: dict[str, float] = field(factory=dict, validator=_check_weights)
    thresholds: tuple[float, ...] = field(default=(), validator=_check_thresholds)
    probe_tokens: int = field(default=8, validator=[ge(1), le(MAX_PROBE_TOKENS)])
    min_probability: float = field(default=0.6, validator=[ge(0), le(1)])
