"""The contract of routers, which rank the models that could answer a request. Called by ``routing``.

Implemented by plugin authors. A router only proposes. Core asks it before anything is rendered, tries the models in its
order, and never changes the model once an answer has started; a router therefore needs no knowledge of engines, streams
or failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from attrs import field, frozen
from attrs.validators import ge, le

from enginehouse.contract.types import GenerateRequest

__all__ = [
    "MAX_PROBE_TOKENS",
    "Acceptance",
    "AnswerBeginning",
    "Attempt",
    "Candidate",
    "ChecksModels",
    "ComparesTexts",
    "RouteQuestion",
    "Router",
    "RoutingDecision",
]

MAX_PROBE_TOKENS = 16
"""Maximum number of answer tokens that are held back for evaluation."""


@frozen(kw_only=True)
class Candidate:
    """A model that can serve the request, as far as is known before it is tried.

    Attributes:
        rank: its index in ``router.models``: the operator lists the weakest and cheapest model first.
        state: lifecycle state. Core tries models that are not ready, or have failed recently, after all others.
        has_failed: it has failed so often recently that it is only tried if no other model is left.
        num_running: requests that currently use it.
        num_waiting: requests that wait for it to be loaded.
        slots: maximum number of requests answered concurrently.
        max_context: longest sequence in tokens; None before its first load.
        first_token_s: mean time to the first token over its last routed requests; None before the first one.
    """

    name: str
    rank: int
    state: Literal["unloaded", "loading", "ready", "draining", "restarting", "failed"] = "ready"
    has_failed: bool = False
    num_running: int = 0
    num_waiting: int = 0
    slots: int = 1
    max_context: int | None = None
    backend: str | None = None
    first_token_s: float | None = None


@frozen(kw_only=True)
class RouteQuestion:
    """A request and the candidate models for it.

    Attributes:
        candidates: at least one, by rank. Excludes models that lack a feature the request needs (tools, a constraint,
            images) and models that its caller may not use.
        default: the model to use unless there is a reason for another one.
        similarities: of the request's text to each example of a router that :class:`ComparesTexts`: cosines of their
            embeddings, -1 to 1; empty for others.
    """

    request: GenerateRequest
    candidates: tuple[Candidate, ...]
    default: str
    similarities: Sequence[float] = ()


@frozen
class AnswerBeginning:
    """The beginning of an answer.

    Attributes:
        logprobs: natural-log probabilities of its tokens, as computed by the model before sampling.
        is_whole: the answer has ended already.
    """

    text: str
    logprobs: tuple[float, ...]
    is_whole: bool = False


@frozen
class Acceptance:
    """A test of the beginning of an answer; if it fails, the beginning is discarded and the next model is tried.

    Attributes:
        num_tokens: number of tokens to test; fewer if the answer ends earlier.
        is_good: called once, in a thread of the plugin; must return immediately.
    """

    num_tokens: int = field(validator=[ge(1), le(MAX_PROBE_TOKENS)])
    is_good: Callable[[AnswerBeginning], bool] = field()


@frozen
class Attempt:
    """One model to try. The acceptance of the last attempt is not called: its answer is always used."""

    model: str
    accept: Acceptance | None = None


@frozen(kw_only=True)
class RoutingDecision:
    """A router's decision.

    Attributes:
        attempts: the models in the order in which they are tried; at least one.
        reason: short explanation; shown to clients that ask.
        scores: score by candidate, larger is better; the scale is the router's own.
        features: features of the request that the router used, by name.
    """

    attempts: tuple[Attempt, ...]
    reason: str
    scores: Mapping[str, float] = field(factory=dict)
    features: Mapping[str, float] = field(factory=dict)


class Router(Protocol):
    """A routing strategy. ``name`` is the value of ``router.strategy``.

    Calls:
        route: for each request to ``auto``; server, thread of the plugin; 1 to 2 ms, ``plugin_timeout_s`` at most.
    """

    name: str
    api_version: int

    def route(self, question: RouteQuestion) -> RoutingDecision:
        """Choose the models. The request waits meanwhile; after the time limit the default model comes first."""
        ...


@runtime_checkable
class ChecksModels(Protocol):
    """Optional interface of routers whose settings name models or depend on their number.

    Calls:
        check_models: once at start, if the router is in use; server, main thread; seconds.
    """

    def check_models(self, models: Sequence[str]) -> None:
        """Validate the settings; called at the start, only if this router is in use.

        Args:
            models: the models of ``auto``, the weakest first.

        Raises:
            ConfigError: a setting is invalid; names the setting.
        """
        ...


@runtime_checkable
class ComparesTexts(Protocol):
    """Optional interface of routers that compare requests with examples by the embeddings of their texts.

    Core embeds both, and hands the router the similarities. If the embedder is not loaded, fails or takes longer than
    ``plugin_timeout_s``, the router is not asked, and the default model comes first.

    Attributes:
        embedder: name of the model for embeddings.

    Calls:
        examples: with the first request to ``auto`` of a configuration; server, event loop; 1 ms.
        text_of: for each request to ``auto``; server, thread of the plugin; 1 ms, ``plugin_timeout_s`` at most.
    """

    embedder: str

    def examples(self) -> Sequence[str]:
        """Return the texts with which requests are compared."""
        ...

    def text_of(self, request: GenerateRequest) -> str:
        """Return the text of a request that is compared with the examples; an embedder may cut a long one."""
        ...
