"""What an engine shows and counts, reasoning that is closed on request, and when a worker reports."""

import itertools
import sys

import psutil
import pytest

from enginehouse.contract.inspection import EngineMetrics, EngineView
from enginehouse.contract.types import (
    ChoiceFinished,
    EngineRequest,
    EngineSettings,
    ReasoningParams,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse.process import rss_bytes
from enginehouse.workers.host import MetricsReports
from enginehouse.workers.messages import MetricsReport, decode_from_worker, encode
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

_ids = itertools.count()
GREEDY = SamplingParams(temperature=0)
PROMPT = [ord(c) for c in "some prompt of the usual kind"]


def make_engine(options: FakeOptions | None = None, **settings: int) -> StepEngine:
    return StepEngine(FakeRunner(options), EngineSettings(**settings), {})


def request(max_tokens: int = 30, sampling: SamplingParams = GREEDY, **fields) -> EngineRequest:
    stopping = StopParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=f"i{next(_ids)}", sampling=sampling, stopping=stopping, **fields)


def add(engine: StepEngine, asked: EngineRequest, prompt: list[int] = PROMPT) -> str:
    engine.check(asked, len(prompt))
    engine.add(asked, prompt)
    return asked.request_id


def finish(engine: StepEngine) -> dict[str, list]:
    events: dict[str, list] = {}
    while engine.has_work():
        for request_id, event in engine.step():
            events.setdefault(request_id, []).append(event)
    return events


def texts(events: list) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


# -- pictures -----------------------------------------------------------------------------------------


def test_a_picture_of_every_phase() -> None:
    engine = make_engine(FakeOptions(slots=2), slots=2, prefill_chunk_tokens=8, max_prefill_tokens=8)
    first, second, third = (add(engine, request(), [n, *PROMPT]) for n in (65, 66, 67))
    assert [s.phase for r in engine.view().requests for s in r.sequences] == ["queued"] * 3
    engine.step()
    engine.step()

    view = engine.view()
    by_id = {shown.request_id: shown for shown in view.requests}
    assert view.num_slots == 2 and view.num_cache_tokens > view.num_free_tokens
    assert by_id[third].sequences[0].phase == "queued"
    assert "prefill" in {by_id[first].sequences[0].phase, by_id[second].sequences[0].phase}
    for _ in range(12):
        engine.step()
    (sequence,) = {shown.request_id: shown for shown in engine.view().requests}[first].sequences
    assert sequence.phase == "decode" and sequence.num_completion_tokens > 0
    assert sequence.num_kv_tokens >= len(PROMPT) + 1 and sequence.is_thinking is False

    finish(engine)
    assert engine.view().requests == ()


def test_a_preempted_choice_is_paused() -> None:
    options = FakeOptions(slots=4, context=256, cache_tokens=256)
    engine = make_engine(options, slots=4)
    for n in range(3):
        add(engine, request(max_tokens=100), [65 + n, *PROMPT])
    phases = set()
    while engine.has_work():
        engine.step()
        phases |= {sequence.phase for shown in engine.view().requests for sequence in shown.sequences}

    assert engine.metrics().stats.num_preemptions > 0
    assert {"paused", "decode"} <= phases


def test_the_prefix_cache_is_shown_with_its_hits() -> None:
    engine = make_engine()
    for salt, times in (("a", 3), ("b", 1)):
        for _ in range(times):
            add(engine, request(max_tokens=5, namespace=salt))
            finish(engine)
    shown = {prefix.namespace: prefix for prefix in engine.view().prefixes}

    assert set(shown) == {"a", "b"}
    assert shown["a"].num_hits == 2 and shown["b"].num_hits == 0
    assert shown["a"].num_tokens >= len(PROMPT)
    assert next(prefix.namespace for prefix in engine.view().prefixes) == "b", "the last used comes first"


def test_snapshots_and_metrics_cross_the_link() -> None:
    engine = make_engine()
    add(engine, request(num_choices=2))
    engine.step()
    message = MetricsReport(engine.metrics())

    assert decode_from_worker(encode(message)) == message
    assert isinstance(engine.view(), EngineView)


# -- counts -------------------------------------------------------------------------------------------


def test_steps_are_counted_by_their_size() -> None:
    engine = make_engine()
    add(engine, request(max_tokens=10, num_choices=3))
    finish(engine)
    figures = engine.metrics()

    assert sum(figures.steps_by_size) == figures.stats.num_steps
    assert figures.steps_by_size[2] >= 8, "three choices fall into the bucket of up to four"
    assert figures.num_batched >= 3 * 9
    assert figures.num_cache_tokens >= figures.stats.free_tokens > 0


def test_a_worker_reports_now_and_then_and_before_it_rests() -> None:
    engine, sent, now = make_engine(), [], [0.0]
    reports = MetricsReports(engine, sent.append, is_process=False, clock=lambda: now[0])
    reports.before_rest()
    assert len(sent) == 1, "the first one tells the size of the cache"
    reports.before_rest()
    assert len(sent) == 1, "nothing has happened since"

    for at in (0.1, 0.2, 0.9, 1.2, 1.3):
        now[0] = at
        reports.after_step()
    assert len(sent) == 2, "one per second"
    reports.before_rest()
    assert len(sent) == 3
    assert sent[0].metrics.rss_bytes == 0, "a thread has no memory of its own"


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_memory_is_what_the_system_says() -> None:
    assert rss_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    sent: list[MetricsReport] = []
    MetricsReports(make_engine(), sent.append, is_process=True).before_rest()

    assert sent[0].metrics.rss_bytes > 2**20
    assert EngineMetrics().rss_bytes == 0


# -- reasoning ----------------------------------------------------------------------------------------

REASONING = ReasoningParams(start="<think>", end="</think>", is_open=True)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(temperature=0, num_logprobs=1)])
@pytest.mark.parametrize("device", [False, True])
def test_reasoning_is_closed_at_once(sampling: SamplingParams, device: bool) -> None:
    engine = make_engine(FakeOptions(device_sampling=device))
    asked = add(engine, request(max_tokens=60, sampling=sampling, reasoning=REASONING))
    events = [event for _ in range(6) for _, event in engine.step()]
    assert engine.view().requests[0].sequences[0].is_thinking

    assert engine.stop_thinking(asked) == 1
    assert engine.stop_thinking(asked) == 0, "it is being closed already"
    events += finish(engine)[asked]
    (ended,) = [event for event in events if isinstance(event, ChoiceFinished)]
    _, closing, answer = texts(events).partition("</think>")

    assert closing and answer
    assert ended.usage.reasoning_tokens <= 7 and ended.usage.completion_tokens == 60
    if sampling.num_logprobs is not None:
        assert sum(len(event.logprobs or ()) for event in events if isinstance(event, TextDelta)) == 60


def test_what_does_not_think_is_left_alone() -> None:
    engine = make_engine()
    plain = add(engine, request())
    engine.step()

    assert engine.stop_thinking(plain) == 0
    assert engine.stop_thinking("unknown") == 0


def test_all_choices_that_think_are_closed() -> None:
    engine = make_engine()
    asked = add(engine, request(max_tokens=40, num_choices=3, reasoning=REASONING))
    for _ in range(5):
        engine.step()

    assert engine.stop_thinking(asked) == 3
    finished = [event for event in finish(engine)[asked] if isinstance(event, ChoiceFinished)]
    assert [event.usage.reasoning_tokens < 10 for event in finished] == [True] * 3


def test_closing_a_request_that_waits_for_its_slot() -> None:
    """Its prompt leaves the reasoning open, so the closing marker is computed with the prompt."""
    engine = make_engine(slots=1)
    add(engine, request())
    waiting = add(engine, request(max_tokens=20, reasoning=REASONING), [66, *PROMPT])
    engine.step()

    assert engine.stop_thinking(waiting) == 1
    events = finish(engine)[waiting]
    assert texts(events).startswith("</think>")
