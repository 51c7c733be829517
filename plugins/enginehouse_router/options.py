"""Settings of the plugin, ``[plugins.router]``."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen
from attrs.validators import ge, le, optional

from enginehouse.contract.router import MAX_PROBE_TOKENS
from enginehouse_router.features import WEIGHTS

__all__ = ["RouterOptions", "Rule"]


def _check_weights(_: object, attribute: object, value: dict[str, float]) -> None:
    unknown = sorted(set(value) - set(WEIGHTS))
    if unknown:
        raise ValueError(f"unknown feature {unknown[0]!r}; the features are {', '.join(WEIGHTS)}")


def _check_thresholds(_: object, attribute: object, value: tuple[float, ...]) -> None:
    if list(value) != sorted(value) or not all(0 <= number <= 1 for number in value):
        raise ValueError("'thresholds' must grow, from 0 to 1")


@frozen(kw_only=True)
class Rule:
    """One entry of ``rules``: it matches if all of its conditions hold; the first matching rule decides.

    Attributes:
        model: the model to route to.
        contains: words or phrases, at least one of which occurs in the last user message; whole words, ignoring case.
        system_contains: the same for the system messages.
        min_chars: minimum total length of all messages.
        max_chars: maximum total length of all messages.
        min_turns: minimum number of user messages.
        tools: True requires tools in the request, False requires none.
        structured: True requires a prescribed form of the answer, such as a JSON schema, False requires none.
        code: True requires code in the last user message, False requires none.
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
        rules: rules of the strategy ``rules``, in order.
        weights: feature weights of the strategy ``difficulty``, replacing the built-in ones.
        thresholds: minimum scores of ``difficulty`` for each model except the first; unset divides 0 to 1 evenly.
        probe_tokens: number of tokens by which ``cascade`` judges an answer.
        min_probability: minimum geometric mean of their probabilities for ``cascade`` to accept the answer.
        embedder: name of the model for embeddings by which ``semantic`` compares prompts.
        examples: file with the examples of ``semantic``; a relative name is relative to the configuration file. Each
            line is JSON with a ``prompt``, and a ``model`` or a ``label``.
        labels: the model of each label in that file.
        num_neighbours: number of nearest examples that ``semantic`` asks.
        min_similarity: similarity of the nearest example, -1 to 1, below which ``semantic`` chooses the default model.
    """

    rules: tuple[Rule, ...] = ()
    weights: dict[str, float] = field(factory=dict, validator=_check_weights)
    thresholds: tuple[float, ...] = field(default=(), validator=_check_thresholds)
    probe_tokens: int = field(default=8, validator=[ge(1), le(MAX_PROBE_TOKENS)])
    min_probability: float = field(default=0.6, validator=[ge(0), le(1)])
    embedder: str | None = None
    examples: Path | None = None
    labels: dict[str, str] = field(factory=dict)
    num_neighbours: int = field(default=5, validator=[ge(1), le(100)])
    min_similarity: float = field(default=0.0, validator=[ge(-1), le(1)])
