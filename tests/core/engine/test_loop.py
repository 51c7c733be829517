"""StepEngine over the fake runner: what clients see never depends on batching, caching, forks or preemption."""

from __future__ import annotations

import codecs

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.contract.errors import (
    ContextLengthExceeded,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    PluginFailed,
)
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.prefix_cache import common_prefix_length
from enginehouse_testkit.fake_runner import FakeFaults, FakeOptions, FakeRunner

from .harness import (
    Result,
    WatchedClose,
    WholeRunner,
    alone,
    drive,
    free_tokens,
    make_engine,
    make_request,
    prompt_of,
    run,
    run_each,
)


def test_text_ends_at_max_tokens_with_length() -> None:
    result = alone(make_request(max_tokens=7, ignore_eos=True), prompt_of(0, 10))

    assert result.finished[0].finish_reason == "length"
    assert result.finished[0].usage.completion_tokens == 7
    assert result.summary is not None and result.summary.usage.completion_tokens == 7
    assert result.summary.usage.prompt_tokens == 10


def test_generation_stops_at_the_end_of_the_context() -> None:
    result = alone(make_request(max_tokens=None, ignore_eos=True), prompt_of(0, 30), FakeOptions(context=50))

    assert result.finished[0].finish_reason == "length"
    assert result.finished[0].usage.completion_tokens == 20


def test_an_end_token_stops_and_is_not_shown() -> None:
    result = alone(make_request(max_tokens=3000), prompt_of(3, 10), FakeOptions(end_logit=2.0))

    assert result.finished[0].finish_reason == "stop"
    assert isinstance(result.finished[0].stop_reason, int)
    assert "<|" not in result.text.get(0, "")


@pytest.mark.parametrize("fork", ["share", "copy", "none"])
@pytest.mark.parametrize("mixed_batch", [True, False])
@pytest.mark.parametrize("window", [None, 24])
def test_batch_neighbours_and_chunks_change_nothing(fork: str, mixed_batch: bool, window: int | None) -> None:
    options = FakeOptions(fork=fork, mixed_batch=mixed_batch, window=window, slots=4)  # type: ignore[arg-type]
    work = [
        (
            make_request(max_tokens=5 + 7 * i, sampling=SamplingParams(temperature=i % 2, seed=i)),
            prompt_of(i, 3 + 60 * i),
        )
        for i in range(7)
    ]
    expected = [alone(request, prompt, options) for request, prompt in work]

    got = run(make_engine(options, slots=4, prefill_chunk_tokens=16, max_prefill_tokens=48), work)

    for one, other in zip(expected, got, strict=True):
        assert (one.text, one.finished) == (other.text, other.finished)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mix_of_arrivals_cancellations_and_cache_sizes_gives_the_lone_text(data: st.DataObject) -> None:
    """The invariant of the whole engine: text is a function of the request, whatever else happens."""
    cache_tokens = data.draw(st.sampled_from([160, 300, 2000]))
    options = FakeOptions(
        context=150,
        slots=3,
        cache_tokens=cache_tokens,
        fork=data.draw(st.sampled_from(["share", "copy", "none"])),
        window=data.draw(st.sampled_from([None, None, 16])),
        window_slack=data.draw(st.sampled_from([0, 8, 60])),
        mixed_batch=data.draw(st.booleans()),
        max_sequences=data.draw(st.sampled_from([3, 4, 12])),
    )
    runner = WatchedClose(options)
    settings_ = EngineSettings(slots=3, prefill_chunk_tokens=data.draw(st.sampled_from([1, 8, 64])))
    engine = StepEngine(runner, settings_, {})
    results: dict[str, Result] = {}
    work: list[tuple[EngineRequest, list[int]]] = []
    cancelled: set[str] = set()
    for _ in range(data.draw(st.integers(1, 7))):
        shared = prompt_of(0, data.draw(st.integers(0, 60)))
        prompt = shared + prompt_of(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 50)))
        request = make_request(
            max_tokens=data.draw(st.integers(1, 30)),
            num_choices=data.draw(st.sampled_from([1, 1, 3])),
            sampling=SamplingParams(
                temperature=data.draw(st.sampled_from([0.0, 1.0])), seed=data.draw(st.integers(0, 5))
            ),
            priority=data.draw(st.integers(-1, 1)),
            namespace=data.draw(st.sampled_from(["", "a"])),
        )
        work.append((request, prompt))
        results[request.request_id] = Result()
        engine.add(request, prompt)
        for _ in range(data.draw(st.integers(0, 6))):
            for request_id, event in engine.step():
                results[request_id].take(event)
        if data.draw(st.booleans()) and data.draw(st.booleans()):
            engine.cancel(request.request_id)
            cancelled.add(request.request_id)
    drive(engine, results)

    for request, prompt in work:
        if request.request_id not in cancelled:
            expected, got = alone(request, prompt, options), results[request.request_id]
            assert got.error is None
            assert (got.text, got.finished) == (expected.text, expected.finished)
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    engine.close()
    assert runner.num_left == 0, "KV positions leaked"


def test_choices_share_one_prefill() -> None:
    runner = FakeRunner(FakeOptions(slots=4))
    engine = StepEngine(runner, EngineSettings(slots=4), {})
    forwarded: list[int] = []
    forward = runner.forward
    runner.forward = lambda spans: (forwarded.append(sum(len(s.input) for s in spans)), forward(spans))[1]  # type: ignore[method-assign]

    request = make_request(max_tokens=4, num_choices=4, sampling=SamplingParams(seed=3), ignore_eos=True)
    result = run(engine, [(request, prompt_of(0, 400))])[0]

    assert sorted(result.finished) == [0, 1, 2, 3]
    assert sum(forwarded) <= 400 + 3 + 4 * 4
    assert len(set(result.text.values())) > 1, "the choices must be drawn independently"
    assert result.summary is not None and result.summary.usage.completion_tokens == 16


def test_a_repeated_prompt_is_cached_but_for_one_token() -> None:
    engine = make_engine()
    prompt = prompt_of(0, 100)
    first = run(engine, [(make_request(), prompt)])[0]
    second = run(engine, [(make_request(), prompt)])[0]

    assert first.summary is not None and second.summary is not None
    assert first.summary.usage.cached_tokens == 0
    assert second.summary.usage.cached_tokens == 99
    assert first.text == second.text


def test_namespaces_do_not_share() -> None:
    engine = make_engine()
    prompt = prompt_of(0, 100)
    run(engine, [(make_request(namespace="a"), prompt)])
    other = run(engine, [(make_request(namespace="b"), prompt)])[0]

    assert other.summary is not None and other.summary.usage.cached_tokens == 0


def test_a_sliding_window_reuses_a_conversation_that_goes_on() -> None:
    engine = make_engine(FakeOptions(window=16))
    prompt = prompt_of(0, 100)
    first = run(engine, [(make_request(max_tokens=10, ignore_eos=True), prompt)])[0]
    following = prompt + first.token_ids[0] + prompt_of(1, 20)
    request = make_request()
    second = run(engine, [(request, following)])[0]

    assert second.summary is not None and second.summary.usage.cached_tokens > 90
    assert second.text == alone(request, following, FakeOptions(window=16)).text


def test_a_sliding_window_reuses_what_it_still_knows() -> None:
    """Another question after the same beginning: only where the window's slack reaches back to it."""
    beginning = prompt_of(0, 100)
    prompts = [beginning + prompt_of(1, 30), beginning + prompt_of(2, 30)]
    for slack, num_cached in ((60, 100), (8, 0)):
        options = FakeOptions(window=16, window_slack=slack)
        results = run_each(make_engine(options), prompts)
        assert [result.summary.usage.cached_tokens for result in results if result.summary] == [0, num_cached]
        assert [result.text for result in results] == [alone(make_request(), one, options).text for one in prompts]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("fork", ["share", "copy"])
def test_planned_cuts_never_reuse_less_than_whole_sequences(fork: str, data: st.DataObject) -> None:
    """One prompt after the other, with and without cuts: equal texts, never fewer cached tokens."""
    slack = data.draw(st.sampled_from([0, 5, 20, 200]))
    options = FakeOptions(window=16, window_slack=slack, fork=fork, max_sequences=64)  # type: ignore[arg-type]
    prompts = []
    for _ in range(data.draw(st.integers(2, 6))):
        begun = data.draw(st.sampled_from([prompt_of(0, 60), *prompts]))
        kept = begun[: data.draw(st.integers(1, len(begun)))]
        prompts.append(kept + prompt_of(data.draw(st.integers(1, 3)), data.draw(st.integers(0, 30))))
    cut, whole = (
        run_each(StepEngine(kind(options), EngineSettings(), {}), prompts) for kind in (FakeRunner, WholeRunner)
    )

    for number, (prompt, one, other) in enumerate(zip(prompts, cut, whole, strict=True)):
        assert one.text == other.text == alone(make_request(), prompt, options).text
        assert one.summary is not None and other.summary is not None
        assert other.summary.usage.cached_tokens <= one.summary.usage.cached_tokens < len(prompt)
        if slack == 200:  # nothing is ever forgotten
            shared = [common_prefix_length(np.array(prompt[:-1]), np.array(before)) for before in prompts[:number]]
            assert one.summary.usage.cached_tokens >= max(shared, default=0)


def test_choices_with_a_sliding_window_share_one_prefill() -> None:
    """The leader has computed the prompt to its end; the others start one token before that."""
    runner = FakeRunner(FakeOptions(slots=4, window=16))
    engine = StepEngine(runner, EngineSettings(slots=4), {})
    forwarded: list[int] = []
    forward = runner.forward
    runner.forward = lambda spans: (forwarded.append(sum(len(s.input) for s in spans)), forward(spans))[1]  # type: ignore[method-assign]
    request = make_request(max_tokens=4, num_choices=4, sampling=SamplingParams(seed=3), ignore_eos=True)
    run(engine, [(request, prompt_of(0, 400))])

    assert sum(forwarded) <= 400 + 3 + 4 * 4


def test_simultaneous_requests_prefill_their_shared_beginning_once() -> None:
    runner = FakeRunner(FakeOptions(slots=8))
    engine = StepEngine(runner, EngineSettings(slots=8), {})
    num_tokens = 0
    forward = runner.forward

    def counting(spans):  # type: ignore[no-untyped-def]
        nonlocal num_tokens
        num_tokens += sum(len(span.input) for span in spans)
        return forward(spans)

    runner.forward = counting  # type: ignore[method-assign]
    run(engine, [(make_request(max_tokens=2), prompt_of(0, 300) + prompt_of(9 + i, 10)) for i in range(8)])

    assert num_tokens < 300 + 8 * (10 + 3)


def test_a_long_prompt_delays_a_running_stream_by_one_chunk_at_most() -> None:
    runner = FakeRunner(FakeOptions(slots=4))
    engine = StepEngine(runner, EngineSettings(slots=4, prefill_chunk_tokens=32), {})
    stream = make_request(max_tokens=100, ignore_eos=True)
    engine.add(stream, prompt_of(0, 5))
    engine.step()
    engine.add(make_request(), prompt_of(1, 1000))
    spans_seen = []
    forward = runner.forward
    runner.forward = lambda spans: (spans_seen.append([len(s.input) for s in spans]), forward(spans))[1]  # type: ignore[method-assign]
    for _ in range(30):
        ids = [request_id for request_id, event in engine.step() if isinstance(event, TextDelta)]
        assert stream.request_id in ids or ids == [], "characters may be held back, the step must not"

    assert all(sorted(sizes)[0] == 1 and sum(sizes) <= 33 for sizes in spans_seen)


def test_a_short_prompt_overtakes_a_long_prefill() -> None:
    engine = make_engine(FakeOptions(slots=4), slots=4, max_prefill_tokens=64)
    long, short = make_request(max_tokens=1), make_request(max_tokens=1)
    engine.add(long, prompt_of(0, 2000))
    engine.step()
    engine.add(short, prompt_of(1, 40))
    finished = [rid for _ in range(3) for rid, event in engine.step() if isinstance(event, RequestFinished)]

    assert finished == [short.request_id]


def test_priority_goes_first() -> None:
    engine = make_engine(slots=1)
    order: list[str] = []
    names = {}
    for name, priority in (("running", 0), ("late", 5), ("normal", 0), ("urgent", -5)):
        request = make_request(max_tokens=2, priority=priority)
        names[request.request_id] = name
        engine.add(request, prompt_of(0, 5))
        if name == "running":
            engine.step()
    while engine.has_work():
        order += [names[rid] for rid, event in engine.step() if isinstance(event, RequestFinished)]

    assert order == ["running", "urgent", "normal", "late"]


def test_preemption_replays_without_a_trace() -> None:
    options = FakeOptions(slots=4, context=200, cache_tokens=260)
    work = [(make_request(max_tokens=80, ignore_eos=True), prompt_of(i, 20)) for i in range(4)]
    engine = make_engine(options, slots=4)
    results = run(engine, work)

    assert engine.stats().num_preemptions > 0
    for (request, prompt), result in zip(work, results, strict=True):
        assert result.text == alone(request, prompt, options).text


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_cancel_frees_everything_in_any_phase(num_steps: int) -> None:
    engine = make_engine(slots=1, prefix_cache=False, max_prefill_tokens=16)
    before = free_tokens(engine)
    queued, running = make_request(), make_request(max_tokens=1000, ignore_eos=True)
    engine.add(running, prompt_of(0, 40))
    engine.add(queued, prompt_of(1, 40))
    for _ in range(num_steps):
        engine.step()
    engine.cancel(queued.request_id)
    engine.cancel(running.request_id)
    engine.cancel("never seen")

    assert not engine.has_work()
    assert free_tokens(engine) == before


@pytest.mark.parametrize("is_known", [False, True])
def test_no_pass_begins_for_a_request_that_is_being_cancelled(is_known: bool) -> None:
    """Its cancellation came when no pass could be aborted: before the request was added, or before its first pass."""
    runner = FakeRunner()
    engine = StepEngine(runner, EngineSettings(), {})
    request = make_request(max_tokens=3, ignore_eos=True)
    if not is_known:
        engine.interrupt(request.request_id)
    engine.add(request, prompt_of(0, 10))
    if is_known:
        engine.interrupt(request.request_id)
    engine.step()

    assert runner.num_steps == 0 and engine.has_work()
    engine.cancel(request.request_id)
    assert not engine.has_work()
    assert run_each(engine, [prompt_of(0, 10)])[0].finished


def test_a_stop_string_inside_a_token_keeps_the_text_before_it() -> None:
    request = make_request(max_tokens=60, ignore_eos=True)
    prompt = prompt_of(0, 12)
    text = alone(request, prompt).text[0]
    stop = text[20:24]
    result = alone(make_request(max_tokens=60, ignore_eos=True, stop=(stop,)), prompt)

    assert result.text.get(0, "") == text[: text.index(stop)]
    assert result.finished[0].finish_reason == "stop"
    assert result.finished[0].stop_reason == stop
    assert 0 < result.finished[0].usage.completion_tokens < 60


def test_logprobs_travel_with_their_tokens() -> None:
    sampling = SamplingParams(temperature=0, num_logprobs=3)
    result = alone(make_request(max_tokens=30, sampling=sampling, ignore_eos=True), prompt_of(0, 12))

    assert len(result.logprobs[0]) == len(result.token_ids[0]) > 20
    assert all(value <= 0 for value in result.logprobs[0])


@pytest.mark.parametrize("stop", [(), ("\ufffd\ufffd\ufffda",)], ids=["", "text held back"])
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 1000))
def test_every_token_is_reported_wherever_the_answer_is_cut(stop: tuple[str, ...], seed: int) -> None:
    """By the token limit or an end token, also within a character, whose tokens have no text then."""
    bytes_only = {token_id: 60.0 if token_id > 127 else 50.0 for token_id in range(32, 256)}
    sampling = SamplingParams(temperature=1.0, seed=seed, num_logprobs=0, logit_bias=bytes_only)
    whole = alone(make_request(10, sampling=sampling, stop=stop), prompt_of(0, 12)).token_ids[0]
    for num_tokens in range(1, len(whole) + 1):
        limit = StopParams(max_tokens=num_tokens, stop=stop)
        end = StopParams(max_tokens=10, stop=stop, stop_token_ids=(whole[num_tokens - 1],))
        for stopping, drawn in ((limit, whole[:num_tokens]), (end, whole[: whole.index(whole[num_tokens - 1])])):
            result = alone(EngineRequest(request_id="cut", sampling=sampling, stopping=stopping), prompt_of(0, 12))
            assert result.token_ids.get(0, []) == drawn
            assert len(result.logprobs.get(0, [])) == len(drawn)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            assert result.text.get(0, "") == decoder.decode(bytes(drawn))


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_row_of_nan_fails_its_request_only(num_choices: int) -> None:
    engine = make_engine(FakeOptions(faults=FakeFaults(nan_at_step=3)), slots=4)
    work = [(make_request(max_tokens=9, ignore_eos=True, num_choices=num_choices), prompt_of(i, 5)) for i in range(2)]
    results = run(engine, work)

    assert sum(isinstance(result.error, GenerationFailed) for result in results) == 1
    assert sum(result.summary is not None for result in results) == 1


def test_an_exception_in_the_runner_costs_at_most_one_request() -> None:
    options = FakeOptions(faults=FakeFaults(raise_at_step=4))
    work = [(make_request(max_tokens=9, ignore_eos=True), prompt_of(i, 5)) for i in range(3)]
    results = run(make_engine(options, slots=4), work)

    assert sum(result.error is not None for result in results) <= 1
    for (request, prompt), result in zip(work, results, strict=True):
        if result.error is None:
            assert result.text == alone(request, prompt).text


def test_a_request_that_always_breaks_the_runner_fails_alone() -> None:
    runner = FakeRunner()
    forward = runner.forward

    def picky(spans):  # type: ignore[no-untyped-def]
        if any(255 in span.input for span in spans):
            raise RuntimeError("cannot digest 255")
        return forward(spans)

    runner.forward = picky  # type: ignore[method-assign]
    engine = StepEngine(runner, EngineSettings(), {})
    good, bad = make_request(max_tokens=5), make_request(max_tokens=5)
    results = run(engine, [(good, prompt_of(0, 5)), (bad, [97, 255, 97])])

    assert results[0].error is None
    assert isinstance(results[1].error, PluginFailed)
    assert results[1].error.message.startswith("The backend 'FakeRunner'")


def test_check_names_what_is_wrong() -> None:
    engine = make_engine(FakeOptions(context=50))

    with pytest.raises(ContextLengthExceeded) as too_long:
        engine.check(make_request(), 50)
    assert (too_long.value.num_prompt_tokens, too_long.value.max_context) == (50, 50)
    engine.check(make_request(), 49)
    with pytest.raises(InvalidRequest, match="empty"):
        engine.check(make_request(), 0)
    with pytest.raises(InvalidRequest, match="-1, 999999"):
        engine.check(make_request(token_ids=(5, -1, 999999)), 3)
    with pytest.raises(InvalidRequest, match="999999") as bad_bias:
        engine.check(make_request(sampling=SamplingParams(logit_bias={5: 1.0, 999999: 1.0})), 3)
    assert bad_bias.value.param == "logit_bias.999999"


def test_close_ends_every_request() -> None:
    engine = make_engine(slots=1)
    requests = [make_request(), make_request()]
    for request in requests:
        engine.add(request, prompt_of(0, 5))
    engine.step()
    outputs = engine.close()

    assert {rid for rid, error in outputs if isinstance(error, EngineDead)} == {r.request_id for r in requests}
