"""What a router is: it orders the models that could answer a request. Written by plugin authors, called by ``routing``.

A router only proposes. Core asks it before anything is rendered, tries the models in its order, and never changes the
model once an answer has begun; so a router needs to know nothing of engines, streams or failures.
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
    "Attempt",
    "Candidate",
    "ChecksModels",
    "Probe",
    "Route",
    "RouteQuestion",
    "Router",
]

MAX_PROBE_TOKENS = 16
"""Most tokens of an answer that are held back to judge it by."""


@frozen(kw_only=True)
class Candidate:
    """A model that can serve the request as far as can be known before it is tried.

    Attributes:
        rank: its place in ``router.models``, from 0: the operator lists the weakest and cheapest model first.
        state: what it is doing. Core tries models that are not ready, or have failed lately, after all others.
        has_failed: it failed so often lately that it is only tried when nothing else is left.
        num_running: requests that use it now.
        num_waiting: requests that wait for it to be loaded.
        slots: requests that it answers at once.
        max_context: longest sequence in tokens; None before its first load.
        first_token_s: time to the first token of its last routed requests, averaged; None before the first one.
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
    """A request, and who could answer it.

    Attributes:
        candidates: at least one, by rank. Models that cannot do what the request needs (tools, a constraint, images)
            or that its caller may not use are not among them.
        default: the model to take where nothing speaks for another one.
    """

    request: GenerateRequest
    candidates: tuple[Candidate, ...]
    default: str


@frozen
class Probe:
    """How an answer begins.

    Attributes:
        logprobs: natural logarithms of the probabilities of its tokens, as the model gives them before sampling.
        is_whole: the answer has ended already.
    """

    text: str
    logprobs: tuple[float, ...]
    is_whole: bool = False


@frozen
class Acceptance:
    """A test of how an answer begins; when it says no, the beginning is thrown away and the next model is tried.

    Attributes:
        num_tokens: of the beginning; fewer where the answer ends before.
        is_good: called once, on the event loop; must return at once.
    """

    num_tokens: int = field(validator=[ge(1), le(MAX_PROBE_TOKENS)])
    is_good: Callable[[Probe], bool] = field()


@frozen
class Attempt:
    """One model to try. Of the last attempt the acceptance is not asked: its answer is taken."""

    model: str
    accept: Acceptance | None = None


@frozen(kw_only=True)
class Route:
    """A router's decision.

    Attributes:
        attempts: the models in the order in which they are tried; at least one.
        reason: why, in a few words; shown to clients that ask.
        scores: of candidates, larger is better; whatever the router means by it.
        features: what it saw in the request, by name.
    """

    attempts: tuple[Attempt, ...]
    reason: str
    scores: Mapping[str, float] = field(factory=dict)
    features: Mapping[str, float] = field(factory=dict)


class Router(Protocol):
    """A strategy. ``name`` is what ``router.strategy`` says."""

    name: str
    api_version: int

    def route(self, question: RouteQuestion) -> Route:
        """Decide, without waiting for anything and within a millisecond or two; called on the event loop."""
        ...


@runtime_checkable
class ChecksModels(Protocol):
    """What a router may have besides: settings of its own that name models or depend on their number."""

    def check_models(self, models: Sequence[str]) -> None:
        """Refuse settings that could not be followed; called at the start, only where this router decides.

        Args:
            models: what ``auto`` may mean, the weakest first.

        Raises:
            ConfigError: names the setting.
        """
        ...
