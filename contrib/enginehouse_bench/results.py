"""Metrics of a run: times to the first token, gaps between tokens, throughput, goodput. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from attrs import field, frozen

from enginehouse_bench.driving import Answered, Run

__all__ = ["Goals", "Results", "Spread", "results_of", "spread_of"]


@frozen
class Spread:
    """Distribution of values, in milliseconds; None without values."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


@frozen
class Goals:
    """Limits that a request must meet to count as good, in milliseconds; None means no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None


@frozen(kw_only=True)
class Results:
    """Metrics of a run.

    Attributes:
        num_cut: requests that were in progress, or not sent, at the time limit; they count nowhere else.
        errors: number of requests per reason.
        ttft_ms: time to the first token, from when the request was due.
        itl_ms: gaps between two pieces of text.
        tpot_ms: time per output token after the first, one value per request.
        latency_ms: from when the request was due to the end of its answer.
        goodput: share of all requests that were answered and meet all goals; None without goals.
        good_requests_per_s: the same per second.
    """

    num_requests: int
    num_answered: int
    num_cut: int
    errors: dict[str, int] = field(factory=dict)
    wall_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    latency_ms: Spread
    goodput: float | None = None
    good_requests_per_s: float | None = None


def results_of(run: Run, num_requests: int, goals: Goals | None = None) -> Results:
    """Compute the metrics of ``run``, of which ``num_requests`` were planned."""
    whole = [answer for answer in run.answered if answer.error is None]
    errors = Counter(answer.error for answer in run.answered if answer.error is not None)
    seconds = max(run.wall_s, 1e-9)
    num_prompt = sum(answer.num_prompt_tokens for answer in whole)
    num_output = sum(_num_tokens(answer) for answer in whole)
    has_goals = goals is not None and goals != Goals()
    num_good = sum(_is_good(answer, goals) for answer in whole) if goals is not None and has_goals else 0
    return Results(
        num_requests=num_requests,
        num_answered=len(whole),
        num_cut=num_requests - len(run.answered),
        errors=dict(errors.most_common()),
        wall_s=run.wall_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        requests_per_s=len(whole) / seconds,
        output_tokens_per_s=num_output / seconds,
        total_tokens_per_s=(num_prompt + num_output) / seconds,
        ttft_ms=spread_of([value for answer in whole if (value := _ttft_ms(answer)) is not None]),
        itl_ms=spread_of([gap * 1000 for answer in whole for gap in _gaps(answer)]),
        tpot_ms=spread_of([value for answer in whole if (value := _tpot_ms(answer)) is not None]),
        latency_ms=spread_of([_latency_ms(answer) for answer in whole]),
        goodput=num_good / max(1, len(run.answered)) if has_goals else None,
        good_requests_per_s=num_good / seconds if has_goals else None,
    )


def _num_tokens(answer: Answered) -> int:
    """Number of tokens reported by the server; without a report, each piece of text counts as one."""
    return answer.num_output_tokens or len(answer.text_times_s)


def _ttft_ms(answer: Answered) -> float | None:
    return (answer.text_times_s[0] - answer.due_s) * 1000 if answer.text_times_s else None


def _tpot_ms(answer: Answered) -> float | None:
    times, following = answer.text_times_s, _num_tokens(answer) - 1
    return (times[-1] - times[0]) * 1000 / following if len(times) > 1 and following > 0 else None


def _latency_ms(answer: Answered) -> float:
    return (answer.end_s - answer.due_s) * 1000


def _gaps(answer: Answered) -> list[float]:
    return [after - before for before, after in pairwise(answer.text_times_s)]


def _is_good(answer: Answered, goals: Goals) -> bool:
    reached = (
        (_ttft_ms(answer), goals.ttft_ms),
        (_tpot_ms(answer), goals.tpot_ms),
        (_latency_ms(answer), goals.latency_ms),
    )
    return all(goal is None or value is None or value <= goal for value, goal in reached)


def spread_of(values: Sequence[float]) -> Spread:
    """Return the distribution of values in milliseconds."""
    if not values:
        return Spread()
    ordered = sorted(values)
    return Spread(
        mean=sum(ordered) / len(ordered),
        p50=_percentile(ordered, 0.50),
        p90=_percentile(ordered, 0.90),
        p95=_percentile(ordered, 0.95),
        p99=_percentile(ordered, 0.99),
        max=ordered[-1],
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two nearest values, like numpy's default."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
