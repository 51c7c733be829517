"""Usage of requests: one value with all counts and times, from the engine to the log, metrics and responses.

A field's metadata says what it counts and where it is shown. The log line, the metric families, OpenAI's ``usage``
object, the response details, their headers, and the tables of the documentation are derived from it.
"""

# msgspec resolves annotations when a message is encoded, so no name may be imported under TYPE_CHECKING.
from collections.abc import Callable, Iterator, Mapping
from operator import add, attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, get_type_hints

import msgspec
from attrs import evolve, frozen
from msgspec.structs import astuple

__all__ = ["USAGE_FIELDS", "Shown", "Usage", "UsageCounter"]


@frozen
class Shown:
    """Metadata of a field of :class:`Usage`; its name in the log, in responses and in headers is the field's own.

    Attributes:
        help: one sentence.
        when: in the log, in metrics and in spans: always, only of complete responses, if it is not zero, or never.
        metric: name of its family, without the prefix: a counter, or for times a histogram; empty is the field's name.
        group: member of OpenAI's ``usage`` object that has it.
        is_optimization: measured saving, in the response details and for the headers of profiles.
        is_work: further work of the engine that no event shows, so that it is reported while a request runs; a request
            that continues in another worker adds to it.
    """

    help: str
    when: Literal["always", "complete", "nonzero", "never"] = "nonzero"
    metric: str | None = ""
    group: Literal["prompt_tokens_details", "completion_tokens_details"] | None = None
    is_optimization: bool = False
    is_work: bool = False


class UsageCounter(msgspec.Struct, array_like=True):
    """Fields of :class:`Usage`, for the engine to count in place.

    Times are in seconds. Those of the queue, of prefill and of decoding are measured in the worker, the others in the
    server.
    """

    prompt_tokens: Annotated[int, Shown("Tokens of prompts that an engine has accepted.", "always")] = 0
    cached_tokens: Annotated[
        int,
        Shown(
            "Prompt tokens that were in the prefix cache.",
            "complete",
            metric="cached_prompt_tokens",
            group="prompt_tokens_details",
            is_optimization=True,
        ),
    ] = 0
    image_tokens: Annotated[
        int, Shown("Prompt tokens of images.", metric="image_prompt_tokens", group="prompt_tokens_details")
    ] = 0
    audio_tokens: Annotated[
        int, Shown("Prompt tokens of recordings.", metric="audio_prompt_tokens", group="prompt_tokens_details")
    ] = 0
    completion_tokens: Annotated[int, Shown("Generated tokens, including those of aborted answers.", "always")] = 0
    reasoning_tokens: Annotated[
        int,
        Shown("Generated tokens between reasoning markers.", "never", metric=None, group="completion_tokens_details"),
    ] = 0
    accepted_prediction_tokens: Annotated[
        int, Shown("Tokens of predictions that the answer contains.", group="completion_tokens_details")
    ] = 0
    rejected_prediction_tokens: Annotated[
        int, Shown("Tokens of predictions that the answer does not contain.", group="completion_tokens_details")
    ] = 0
    replays: Annotated[int, Shown("Answers that were continued after the death of their worker.")] = 0
    queue_s: Annotated[float, Shown("Waiting for a slot.", "complete", metric="queue_seconds")] = 0.0
    prefill_s: Annotated[float, Shown("From the slot to the first token.", "complete", metric="prefill_seconds")] = 0.0
    decode_s: Annotated[float, Shown("From the first token to the last one.", "complete", metric=None)] = 0.0
    loaded_prompt_tokens: Annotated[int, Shown("Cached prompt tokens that were loaded from disk.")] = 0
    forced_tokens: Annotated[int, Shown("Tokens forced by a constraint, without sampling.", is_optimization=True)] = 0
    drafted_tokens: Annotated[
        int, Shown("Tokens that a drafter proposed.", metric=None, is_optimization=True, is_work=True)
    ] = 0
    accepted_draft_tokens: Annotated[
        int, Shown("Drafted tokens that verification accepted.", metric=None, is_optimization=True, is_work=True)
    ] = 0
    drafts: Annotated[
        dict[str, tuple[int, int]],
        Shown("Both numbers by the name of the drafter.", "never", metric=None, is_work=True),
    ] = {}
    early_exit_tokens: Annotated[
        int, Shown("Tokens generated without the model's last layers.", is_optimization=True, is_work=True)
    ] = 0
    skipped_layers: Annotated[int, Shown("Layers that these tokens skipped.", is_optimization=True, is_work=True)] = 0
    routed_requests: Annotated[int, Shown("Requests that a router sent to this model.")] = 0
    routing_attempts: Annotated[int, Shown("Models that were tried for these requests, including the last one.")] = 0
    discarded_tokens: Annotated[int, Shown("Tokens of attempts whose answer was not used.")] = 0
    kept_tokens: Annotated[
        int, Shown("Prompt tokens that the prefix cache keeps since this request.", "never", metric=None)
    ] = 0
    load_s: Annotated[float, Shown("Waiting for the model to be loaded.", "never", metric=None)] = 0.0
    render_s: Annotated[float, Shown("In the chat template.", "never", metric=None)] = 0.0
    tokenize_s: Annotated[
        float, Shown("From the template until the engine has accepted the prompt.", "never", metric=None)
    ] = 0.0
    first_token_s: Annotated[
        float, Shown("From the arrival of the request to its first text.", "never", metric=None)
    ] = 0.0
    total_s: Annotated[float, Shown("From the arrival of the request until now.", "never", metric=None)] = 0.0

    def add_drafts(self, drafter: str, num_drafted: int = 0, num_accepted: int = 0) -> None:
        """Count tokens that a drafter proposed, or that verification accepted."""
        self.drafted_tokens += num_drafted
        self.accepted_draft_tokens += num_accepted
        self.drafts = _merged(self.drafts, {drafter: (num_drafted, num_accepted)})  # snapshots keep theirs

    def snapshot(self) -> "Usage":
        """Return the present values."""
        return Usage(*astuple(self))

    def work(self) -> "Usage | None":
        """Return the fields with ``is_work``; None if all are zero."""
        counts = _work_of(self)
        return Usage(**dict(zip(_WORK, counts, strict=True))) if any(counts) else None

    def __add__(self, other: "UsageCounter") -> Self:
        """Return the sum; times are the longer ones."""
        values = zip(_SUMS, astuple(self), astuple(other), strict=True)
        return type(self)(*[total(one, two) for total, one, two in values])


class Usage(UsageCounter, frozen=True):  # type: ignore[misc]  # a struct, unlike a dataclass, may be frozen anew
    """Usage of a choice, a prompt or a response. Counts add up; of several prompts, the longest time counts."""

    def shown(self, *, is_complete: bool) -> Iterator[tuple[str, Shown, float]]:
        """Yield name, metadata and value of the fields to log and to count for a response.

        Args:
            is_complete: False for a response that was broken off.
        """
        for (name, field), value in zip(USAGE_FIELDS.items(), astuple(self), strict=True):
            if field.when == "always" or (
                is_complete if field.when == "complete" else value and field.when == "nonzero"
            ):
                yield name, field, value


def _merged(some: Mapping[str, tuple[int, int]], more: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return the sum of two pairs of counts by name."""
    merged = dict(some)
    for name, (one, two) in more.items():
        before = merged.get(name, (0, 0))
        merged[name] = (before[0] + one, before[1] + two)
    return merged


def _metadata() -> Iterator[tuple[str, Shown]]:
    for name, kind in get_type_hints(Usage, include_extras=True).items():
        (shown,) = kind.__metadata__
        yield name, evolve(shown, metric=name) if shown.metric == "" else shown


USAGE_FIELDS: Mapping[str, Shown] = MappingProxyType(dict(_metadata()))
"""Name of a field of :class:`Usage` to its metadata."""

_SUM_OF: Mapping[Any, Callable[[Any, Any], Any]] = {float: max, int: add}
_SUMS = tuple(_SUM_OF.get(kind, _merged) for kind in get_type_hints(Usage).values())
_WORK = tuple(name for name, shown in USAGE_FIELDS.items() if shown.is_work)
_work_of = attrgetter(*_WORK)
