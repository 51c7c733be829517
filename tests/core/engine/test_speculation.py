"""Speculation over the fake runner: drafts change how many steps a text takes, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.contract.backend import ForwardOutput, LastSampled, Span
from enginehouse.contract.drafter import BoundDrafter, Draft, DraftTask
from enginehouse.contract.errors import CacheFull, GenerationFailed, InvalidSpan
from enginehouse.contract.types import (
    Constraint,
    EngineRequest,
    EngineSettings,
    RequestFinished,
    Resume,
    ResumedChoice,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.contract.usage import Usage
from enginehouse.engine.loop import StepEngine
from enginehouse.plugins import Guard, guarded
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

from .harness import LiteralDecoder, Result, drive, free_tokens, make_request, prompt_of, run

_sessions = itertools.count()


class Oracle:
    """Knows the answers to some prompts, and errs at a share of positions."""

    is_free = True
    prior = 0.9

    def __init__(self, texts: Sequence[Sequence[int]], error: float = 0.0, length: int = 8, grade: int = 3) -> None:
        self.texts = [list(text) for text in texts]
        self.error, self.length, self.grade = error, length, grade
        self.open_sessions: set[int] = set()
        self.was_shut_down = False

    def open(self, prompt: np.ndarray, prediction: Sequence[int]) -> Any:
        session = next(_sessions)
        self.open_sessions.add(session)
        return session

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        return [self._propose(task) for task in tasks]

    def _propose(self, task: DraftTask) -> Draft | None:
        assert task.session in self.open_sessions
        written = task.token_ids.tolist()
        for text in self.texts:
            if len(text) > len(written) and text[: len(written)] == written:
                right = text[len(written) :][: min(self.length, task.max_tokens)]
                wrong = np.random.default_rng(len(written)).random(len(right)) < self.error
                return Draft([97 if error else token for token, error in zip(right, wrong, strict=True)], self.grade)
        return None

    def close(self, session: int) -> None:
        self.open_sessions.discard(session)

    def shutdown(self) -> None:
        self.was_shut_down = True


def engine_with(
    drafter: BoundDrafter | None, options: FakeOptions | None = None, decoders: Sequence[Any] = (), **sizes: Any
) -> StepEngine:
    drafters = {"oracle": drafter} if drafter is not None else {}
    return StepEngine(FakeRunner(options), EngineSettings(**sizes), {}, decoders, drafters=drafters)


class CountingRunner(FakeRunner):
    """A pass takes as many seconds as it computes tokens, and one more."""

    def __init__(self, options: FakeOptions | None = None) -> None:
        super().__init__(options)
        self.seconds = 0.0
        self.ahead: dict[int, bool] = {}  # by position: the pass was launched before the last token was read

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        self.ahead |= {span.start: isinstance(span.input, LastSampled) for span in spans}
        self.seconds += 1 + sum(span.num_tokens for span in spans)
        return super().forward(spans)


def counting_engine(drafter: BoundDrafter, runner: CountingRunner | None = None) -> StepEngine:
    runner = runner or CountingRunner()
    return StepEngine(runner, EngineSettings(), {}, clock=lambda: runner.seconds, drafters={"oracle": drafter})


def seen_of(result: Result) -> tuple[Any, ...]:
    """All that a client can see of an answer but its figures."""
    return result.text, result.token_ids, result.logprobs, result.finished, result.error


def texts_of(requests: Sequence[tuple[EngineRequest, list[int]]], options: FakeOptions) -> list[list[int]]:
    """Each prompt with each answer, as it comes without drafts; end tokens and stop texts are not in them."""
    found = []
    for request, prompt in requests:
        for token_ids in run(engine_with(None, options), [(request, prompt)])[0].token_ids.values():
            found.append([*prompt, *token_ids])
    return found


REQUESTS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.8, 1.5]),
        "penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "num_logprobs": st.sampled_from([None, None, 2]),
        "num_choices": st.sampled_from([1, 1, 3]),
        "max_tokens": st.integers(1, 60),
        "stop": st.sampled_from([(), (), ("e",), ("an", "th")]),
        "length": st.integers(1, 40),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    drawn=st.lists(REQUESTS, min_size=1, max_size=4),
    error=st.sampled_from([0.0, 0.2, 0.9]),
    length=st.sampled_from([1, 3, 17]),
    options=st.builds(
        FakeOptions,
        context=st.just(150),
        slots=st.just(3),
        cache_tokens=st.sampled_from([200, 2000]),
        device_sampling=st.booleans(),
        mixed_batch=st.booleans(),
        window=st.sampled_from([None, 16]),
    ),
)
def test_no_draft_changes_anything_that_a_client_sees(
    drawn: list[dict[str, Any]],
    error: float,
    length: int,
    options: FakeOptions,
) -> None:
    """Right and wrong ones, for sampled and greedy answers, with penalties, stop strings, preemption and windows."""
    requests = []
    for index, one in enumerate(drawn):
        sampling = SamplingParams(
            temperature=one["temperature"],
            seed=index,
            repetition_penalty=one["penalty"],
            num_logprobs=one["num_logprobs"],
        )
        stopping = StopParams(max_tokens=one["max_tokens"], stop=one["stop"])
        request = EngineRequest(
            request_id=f"q{index}", sampling=sampling, stopping=stopping, num_choices=one["num_choices"]
        )
        requests.append((request, prompt_of(index, one["length"])))
    plain = run(engine_with(None, options), requests)
    oracle = Oracle(texts_of(requests, options), error, length)
    engine = engine_with(oracle, options)
    drafted = run(engine, requests)

    assert [seen_of(result) for result in drafted] == [seen_of(result) for result in plain]
    assert not oracle.open_sessions


class FailingRunner(FakeRunner):
    """Fails at some of its passes, as a library does or for want of room."""

    def __init__(self, options: FakeOptions, failing: Collection[int], full: Collection[int]) -> None:
        super().__init__(options)
        self.failing, self.full = failing, full

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        if self.num_steps + 1 in {*self.failing, *self.full}:
            self.num_steps += 1
            raise CacheFull(1, 0) if self.num_steps in self.full else RuntimeError("on purpose")
        return super().forward(spans)


def check_what_is_held(engine: StepEngine, runner: FakeRunner) -> None:
    """No draft outlives its step, and what is kept for others is what its tokens say."""
    scheduler = engine._scheduler
    kept = {node.handle: node.path().tolist() for node in scheduler.cache._holders}
    held = runner.sequences
    running = {sequence.handle: sequence for sequence in scheduler.running}
    assert held.keys() == kept.keys() | running.keys()
    assert all(held[handle] == token_ids for handle, token_ids in kept.items() if handle is not None)
    for sequence in scheduler.running:
        assert sequence.handle is not None and sequence.num_surplus == 0
        assert held[sequence.handle][: sequence.length] == sequence.token_ids[: len(held[sequence.handle])].tolist()


@attrs.frozen
class Trouble:
    """Passes that fail, passes that find no room, and which request leaves before which step."""

    failing: list[int]
    full: list[int]
    leaving: list[tuple[int, int]]


TROUBLES = st.builds(
    Trouble,
    failing=st.lists(st.integers(2, 40), max_size=3),
    full=st.lists(st.integers(2, 40), max_size=3),
    leaving=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), max_size=2),
)
ENDS = st.fixed_dictionaries(
    {
        "min_tokens": st.sampled_from([0, 0, 6]),
        "stop_token_ids": st.sampled_from([(), (101,), (97, 110)]),
    }
)


@settings(max_examples=25, deadline=None)
@given(
    drawn=st.lists(REQUESTS, min_size=1, max_size=3),
    ends=ENDS,
    error=st.sampled_from([0.0, 0.2]),
    options=st.builds(
        FakeOptions,
        context=st.just(150),
        slots=st.just(3),
        cache_tokens=st.sampled_from([200, 2000]),
        device_sampling=st.booleans(),
        window=st.sampled_from([None, 16]),
        fork=st.sampled_from(["share", "copy", "none"]),
    ),
    trouble=TROUBLES,
)
def test_drafts_leave_nothing_behind(
    drawn: list[dict[str, Any]], ends: dict[str, Any], error: float, options: FakeOptions, trouble: Trouble
) -> None:
    """Where answers end inside a draft, passes fail with drafts in them, or clients leave."""
    requests, endless = [], []
    for index, one in enumerate(drawn):
        sampling = SamplingParams(temperature=one["temperature"], seed=index, num_logprobs=one["num_logprobs"])
        stopping = StopParams(max_tokens=one["max_tokens"] + ends["min_tokens"], stop=one["stop"], **ends)
        request = EngineRequest(
            request_id=f"q{index}", sampling=sampling, stopping=stopping, num_choices=one["num_choices"]
        )
        unending = attrs.evolve(request, stopping=StopParams(max_tokens=80, ignore_eos=True))
        prompt = prompt_of(index, one["length"])
        requests.append((request, prompt))
        endless.append((unending, prompt))
    plain = run(engine_with(None, options), requests)
    oracle = Oracle(texts_of(endless, options), error)  # it drafts beyond ends, too
    results = run_in_trouble(requests, oracle, options, trouble)

    gone = {index for _, index in trouble.leaving}
    for index, (expected, result) in enumerate(zip(plain, results, strict=True)):
        if result.summary is None:
            assert index in gone or (result.error is not None and (trouble.failing or trouble.full))
            continue
        assert expected.summary is not None
        assert seen_of(result) == seen_of(expected)
        assert result.summary.usage.completion_tokens == expected.summary.usage.completion_tokens
        assert result.summary.usage.accepted_draft_tokens <= result.summary.usage.drafted_tokens
    assert not oracle.open_sessions


def run_in_trouble(
    requests: Sequence[tuple[EngineRequest, list[int]]], oracle: Oracle, options: FakeOptions, trouble: Trouble
) -> list[Result]:
    """What clients see; looks at what is held after every step."""
    runner = FailingRunner(options, trouble.failing, trouble.full)
    engine = StepEngine(runner, EngineSettings(), {}, drafters={"oracle": oracle})
    results = {request.request_id: Result() for request, _ in requests}
    for request, prompt in requests:
        engine.add(request, prompt)
    for step in itertools.count():
        for at, index in trouble.leaving:
            if at == step:
                engine.cancel(f"q{index}")
        if not engine.has_work():
            return list(results.values())
        for request_id, event in engine.step():
            results[request_id].take(event)
        check_what_is_held(engine, runner)
    raise AssertionError("unreachable")


def test_right_drafts_save_steps_and_are_counted() -> None:
    request, prompt = make_request(max_tokens=60, ignore_eos=True), prompt_of(1, 10)
    oracle = Oracle(texts_of([(request, prompt)], FakeOptions()))
    engine = engine_with(oracle)
    (result,) = run(engine, [(request, prompt)])

    assert result.summary is not None
    assert engine.stats().num_steps < 25
    assert result.summary.usage.accepted_draft_tokens > 40
    assert result.summary.usage.drafted_tokens >= result.summary.usage.accepted_draft_tokens
    assert result.summary.usage.completion_tokens == 60


class UntilThere(Oracle):
    """Drafts nothing behind so many tokens."""

    def __init__(self, texts: Sequence[Sequence[int]], num_tokens: int) -> None:
        super().__init__(texts)
        self.num_tokens = num_tokens

    def _propose(self, task: DraftTask) -> Draft | None:
        return super()._propose(task) if len(task.token_ids) < self.num_tokens else None


@pytest.mark.parametrize("is_free", [True, False])
def test_where_the_device_draws_tokens_are_read_at_once_only_while_there_are_drafts(is_free: bool) -> None:
    """Also from a drafter that costs, which has to see the last token before it can go on from it."""
    request, prompt = make_request(max_tokens=200, ignore_eos=True), prompt_of(1, 10)
    options = FakeOptions(device_sampling=True)
    (text,) = texts_of([(request, prompt)], options)
    oracle = UntilThere([text], 60)
    oracle.is_free = is_free
    runner = CountingRunner(options)
    engine = StepEngine(runner, EngineSettings(), {}, clock=lambda: runner.seconds, drafters={"oracle": oracle})
    (result,) = run(engine, [(request, prompt)])
    ahead = runner.ahead

    assert result.token_ids[0] == text[len(prompt) :]
    assert result.summary is not None and result.summary.usage.accepted_draft_tokens > 30
    assert not any(is_ahead for length, is_ahead in ahead.items() if 20 < length < 60)
    if is_free:  # one that costs and seems to pay is asked again and again
        assert all(is_ahead for length, is_ahead in ahead.items() if 90 < length < 200)


@pytest.mark.parametrize("stop", [(), ("no such text",)])
def test_where_the_device_draws_the_next_pass_is_launched_before_text_is_made_of_accepted_drafts(
    stop: tuple[str, ...],
) -> None:
    """Unless the text may end the sequence: then the next pass waits for it."""
    request, prompt = make_request(max_tokens=60, ignore_eos=True, stop=stop), prompt_of(1, 10)
    options = FakeOptions(device_sampling=True)
    (text,) = texts_of([(request, prompt)], options)
    num_shown, num_late = 0, 0

    class Watched(FakeRunner):
        def forward(self, spans: Sequence[Span]) -> ForwardOutput:
            nonlocal num_late
            num_late += any(span.start + 1 > len(prompt) + num_shown for span in spans if span.start > len(prompt))
            return super().forward(spans)

    ticks = itertools.count()
    engine = StepEngine(
        Watched(options), EngineSettings(), {}, clock=lambda: float(next(ticks)), drafters={"oracle": Oracle([text])}
    )
    results = {request.request_id: Result()}
    engine.add(request, prompt)
    while engine.has_work():
        for request_id, event in engine.step():
            results[request_id].take(event)
            num_shown += len(event.token_ids) if isinstance(event, TextDelta) else 0
    (result,) = results.values()

    assert result.token_ids[0] == text[len(prompt) :]
    assert result.summary is not None and result.summary.usage.accepted_draft_tokens > 30
    assert num_late == 0 if stop else num_late > 4


@pytest.mark.parametrize("error", [0.0, 0.2])
@pytest.mark.parametrize("max_tokens", [60, 200])
def test_drafts_taken_at_once_are_counted_as_those_taken_one_by_one(error: float, max_tokens: int) -> None:
    """The latter with a stop string that never comes; the text ends by length, or by an end token."""
    results = []
    for stop in ((), ("no such text",)):
        request, prompt = make_request(max_tokens=max_tokens, stop=stop), prompt_of(3, 10)
        options = FakeOptions(device_sampling=True)
        oracle = Oracle(texts_of([(request, prompt)], options), error)
        (result,) = run(counting_engine(oracle, CountingRunner(options)), [(request, prompt)])
        assert result.summary is not None and result.summary.usage.accepted_draft_tokens > 5
        usage = result.summary.usage
        results.append((seen_of(result), usage.drafted_tokens, usage.accepted_draft_tokens, usage.completion_tokens))

    assert results[0] == results[1]


def test_drafts_that_are_always_wrong_are_soon_not_computed_any_more() -> None:
    request, prompt = make_request(max_tokens=300, ignore_eos=True), prompt_of(1, 10)
    oracle = Oracle(texts_of([(request, prompt)], FakeOptions()), error=1.0)
    (result,) = run(counting_engine(oracle), [(request, prompt)])

    assert result.summary is not None
    assert result.summary.usage.accepted_draft_tokens <= 5  # the wrong token is the right one now and then
    assert result.summary.usage.drafted_tokens < 60


def test_drafts_that_begin_to_be_right_are_used_from_then_on() -> None:
    """While they are not computed they are compared all the same."""
    request, prompt = make_request(max_tokens=400, ignore_eos=True), prompt_of(1, 10)
    (text,) = texts_of([(request, prompt)], FakeOptions())
    oracle = Oracle([text])

    class Late(Oracle):
        def _propose(self, task: DraftTask) -> Draft | None:
            self.error = 1.0 if len(task.token_ids) < 150 else 0.0
            return super()._propose(task)

    late = Late(oracle.texts)
    (result,) = run(counting_engine(late), [(request, prompt)])

    assert result.summary is not None and result.summary.usage.accepted_draft_tokens > 100


def test_a_slow_first_draft_and_single_slow_ones_do_not_end_drafting() -> None:
    """A draft costs a twentieth of a step per token, but the first one, which compiles kernels, a thousand steps."""
    request, prompt = make_request(max_tokens=400, ignore_eos=True), prompt_of(1, 10)
    runner, lasted = CountingRunner(), itertools.chain([2000.0], itertools.cycle([0.8] * 30 + [100.0]))

    class Slow(Oracle):
        is_free = False

        def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
            runner.seconds += next(lasted)
            return super().propose(tasks)

    (result,) = run(counting_engine(Slow(texts_of([(request, prompt)], FakeOptions())), runner), [(request, prompt)])

    assert result.summary is not None and result.summary.usage.accepted_draft_tokens > 200


@pytest.mark.parametrize("run_length", [1, 3, 10, 40])
def test_drafts_that_mislead_cost_little_time(run_length: int) -> None:
    """Right for a while and then wrong for a while: what was learned is never true any more."""
    request, prompt = make_request(max_tokens=1500, ignore_eos=True), prompt_of(1, 10)
    (text,) = texts_of([(request, prompt)], FakeOptions())

    class Misleading(Oracle):
        def _propose(self, task: DraftTask) -> Draft | None:
            self.error = float(len(task.token_ids) // run_length % 2)
            return super()._propose(task)

    plain, drafted = CountingRunner(), CountingRunner()
    run(counting_engine(Oracle([]), plain), [(request, prompt)])
    run(counting_engine(Misleading([text], length=run_length), drafted), [(request, prompt)])

    assert drafted.seconds <= 1.04 * plain.seconds


@pytest.mark.parametrize("forces", [False, True])
@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_drafts_go_together_with_constraints(forces: bool, num_logprobs: int | None) -> None:
    wanted = "a the mountaineering stop and so on"
    sampling = SamplingParams(temperature=1.0, seed=3, num_logprobs=num_logprobs)
    request = EngineRequest(
        request_id="r",
        sampling=sampling,
        stopping=StopParams(max_tokens=80),
        constraint=Constraint(kind="regex", text=wanted, param="regex"),
    )
    prompt = prompt_of(4, 12)
    plain = run(engine_with(None, decoders=[LiteralDecoder(forces)]), [(request, prompt)])[0]
    oracle = Oracle([[*prompt, *plain.token_ids[0]]], error=0.1)
    drafted = run(engine_with(oracle, decoders=[LiteralDecoder(forces)]), [(request, prompt)])[0]

    assert plain.text == {0: wanted}
    assert seen_of(drafted) == seen_of(plain)


class Broken(Oracle):
    """Fails in one of its methods, or drafts what no vocabulary holds."""

    def __init__(self, where: str, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(texts)
        self.where = where

    def open(self, prompt: np.ndarray, prediction: Sequence[int]) -> Any:
        if self.where == "open":
            raise RuntimeError("open")
        return super().open(prompt, prediction)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        if self.where == "propose":
            raise RuntimeError("propose")
        if self.where == "too few":
            return []
        if self.where == "vocabulary":
            return [Draft([10**6])] * len(tasks)
        if self.where == "grade":
            return [Draft([97], "high")] * len(tasks)  # type: ignore[arg-type]
        return [Draft([])] * len(tasks)

    def close(self, session: int) -> None:
        raise RuntimeError("close")


@pytest.mark.parametrize("where", ["open", "propose", "too few", "vocabulary", "grade", "empty"])
def test_a_broken_drafter_costs_nothing_but_itself(where: str, caplog: pytest.LogCaptureFixture) -> None:
    request, prompt = make_request(max_tokens=30, ignore_eos=True), prompt_of(2, 10)
    plain = run(engine_with(None), [(request, prompt)])[0]
    engine = engine_with(Broken(where, []))
    result = run(engine, [(request, prompt)])[0]

    assert seen_of(result) == seen_of(plain)
    assert "the drafter 'oracle'" in caplog.text
    engine.close()


def test_a_cancelled_request_closes_its_sessions() -> None:
    request, prompt = make_request(max_tokens=200, ignore_eos=True), prompt_of(2, 10)
    oracle = Oracle(texts_of([(request, prompt)], FakeOptions()))
    engine = engine_with(oracle, prefix_cache=False)
    free = free_tokens(engine)
    engine.add(request, prompt)
    for _ in range(4):
        engine.step()
    assert oracle.open_sessions
    engine.cancel(request.request_id)
    drive(engine, {})

    assert not oracle.open_sessions
    assert free_tokens(engine) == free
    engine.close()
    assert oracle.was_shut_down


def test_single_tokens_and_drafts_share_no_pass_where_the_runner_forbids_it() -> None:
    """Nothing is tried that the runner would refuse."""
    options = FakeOptions(mixed_batch=False)
    requests = [(make_request(max_tokens=40, ignore_eos=True), prompt_of(seed, 10)) for seed in (1, 2)]
    oracle = Oracle(texts_of(requests[:1], options))
    runner = CountingRefusals(options)
    engine = StepEngine(runner, EngineSettings(), {}, drafters={"oracle": oracle})
    run(engine, requests)

    assert runner.num_refused == 0


class CountingRefusals(FakeRunner):
    """Counts what it would refuse."""

    num_refused = 0

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        try:
            return super().forward(spans)
        except InvalidSpan:
            self.num_refused += 1
            raise


def test_a_request_that_cannot_enter_closes_its_sessions() -> None:
    """Its first choice was made, and then its grammar refused what it was told to have written elsewhere."""
    oracle = Oracle([])
    engine = engine_with(oracle, decoders=[LiteralDecoder()])
    request = make_request(num_choices=2, constraint=Constraint(kind="regex", text="the stop"))
    with pytest.raises(GenerationFailed):
        engine.add(request, prompt_of(4, 12), Resume((ResumedChoice(0), ResumedChoice(1, (120,)))))

    assert not oracle.open_sessions
    assert not engine.has_work()


def test_tokens_tell_which_drafter_proposed_them() -> None:
    """As many as were accepted, and those that it knew; the answer is that without details."""
    sampling, prompt = SamplingParams(temperature=0, num_logprobs=0), prompt_of(2, 10)
    request = make_request(max_tokens=40, ignore_eos=True, sampling=sampling)
    plain = run(engine_with(None), [(request, prompt)])[0]
    engine = counting_engine(Oracle([[*prompt, *plain.token_ids[0]]]))
    engine.add(attrs.evolve(request, token_details=True), prompt)
    events = [event for _ in iter(engine.has_work, False) for _, event in engine.step()]
    entries = [entry for event in events if isinstance(event, TextDelta) for entry in event.logprobs or ()]
    drafted_by = [entry.details.drafted_by for entry in entries if entry.details is not None]
    summary = events[-1]

    assert isinstance(summary, RequestFinished)
    assert [entry.token_id for entry in entries] == plain.token_ids[0]
    assert len(drafted_by) == 40 and set(drafted_by) == {None, "oracle"}
    assert drafted_by.count("oracle") == summary.usage.accepted_draft_tokens


def test_events_tell_what_was_drafted_so_far() -> None:
    request, prompt = make_request(max_tokens=40, ignore_eos=True), prompt_of(2, 10)
    plain = run(engine_with(None), [(request, prompt)])[0]
    engine = counting_engine(Oracle([[*prompt, *plain.token_ids[0]]]))
    engine.add(request, prompt)
    events = [event for _ in iter(engine.has_work, False) for _, event in engine.step()]
    counts = [event.work for event in events if isinstance(event, TextDelta)]
    summary = events[-1]

    assert isinstance(summary, RequestFinished)
    assert summary.usage.drafted_tokens > 0
    assert counts[0] is None, "nothing was drafted yet"
    drafted, accepted = summary.usage.drafted_tokens, summary.usage.accepted_draft_tokens
    assert counts[-1] == Usage(
        drafted_tokens=drafted, accepted_draft_tokens=accepted, drafts={"oracle": (drafted, accepted)}
    )


def test_drafter_of_others_that_is_slower_than_a_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Oracle):
        def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
            runner.seconds += 100
            return super().propose(tasks)

    for is_own in (True, False):
        runner = CountingRunner()
        guard = Guard("p", "drafter", "slow", is_own=is_own)
        engine = counting_engine(guarded(Slow([]), BoundDrafter, guard), runner)
        run(engine, [(make_request(max_tokens=40, ignore_eos=True), prompt_of(2, 10))])

        named = [record.getMessage() for record in caplog.records if "in propose" in record.getMessage()]
        assert len(named) == (not is_own), "once a minute"
    said = (
        "the drafter 'slow' of the plugin 'p' took 100000 ms (0 ms of processor time) in propose, longer than 2000 ms"
    )
    assert named[0].startswith(said)


def test_requests_that_wait_hold_no_session() -> None:
    """Second models have few places, and what was queued would find none when its turn comes."""
    oracle, most = Oracle([]), 0
    engine = engine_with(oracle, slots=2)
    for seed in range(6):
        engine.add(make_request(max_tokens=4, ignore_eos=True), prompt_of(seed, 10))
    for _ in iter(engine.has_work, False):
        engine.step()
        most = max(most, len(oracle.open_sessions))

    assert most == 2
    assert not oracle.open_sessions


class NarrowRunner(FakeRunner):
    """Breaks where several tokens of an answer are computed at once."""

    num_failures = 0

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        if any(span.start and span.outputs == "all" for span in spans):
            self.num_failures += 1
            raise RuntimeError("one token at a time")
        return super().forward(spans)


def test_a_pass_that_fails_with_drafts_is_done_without() -> None:
    work = [(make_request(max_tokens=30, ignore_eos=True), prompt_of(seed, 10)) for seed in range(2)]
    plain = run(engine_with(None), work)
    texts = [[*prompt, *one.token_ids[0]] for one, (_, prompt) in zip(plain, work, strict=True)]
    runner = NarrowRunner()
    drafted = run(StepEngine(runner, EngineSettings(), {}, drafters={"oracle": Oracle(texts)}), work)

    assert [seen_of(one) for one in drafted] == [seen_of(one) for one in plain]
    assert 1 <= runner.num_failures <= 2, "what cannot be computed is not drafted again"
