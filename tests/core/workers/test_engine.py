"""WorkerEngine over the fake backend, in real processes and in threads: the same answers, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from attrs import evolve

from enginehouse.contract.engine import Engine, EngineStream
from enginehouse.contract.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    PluginFailed,
)
from enginehouse.contract.types import (
    ChoiceFinished,
    DecodedImage,
    EngineRequest,
    EngineSettings,
    Event,
    RequestFinished,
    Resume,
    ResumedChoice,
    SamplingParams,
    Segment,
    StopParams,
    TextDelta,
)
from enginehouse.settings.config import PluginsSettings
from enginehouse.settings.limits import LimitsSettings
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.messages import Load
from enginehouse.workers.request_queue import RequestQueue

ISOLATIONS = ("process", "thread")
_ids = itertools.count()


def load_message(backend: str = "fake", engine: EngineSettings | None = None, **options: Any) -> Load:
    return Load(backend, "fake", None, options, "models.m", engine or EngineSettings(), PluginsSettings())


@contextlib.asynccontextmanager
async def open_engine(
    isolation: str, engine: EngineSettings | None = None, request_queue: RequestQueue | None = None, **options: Any
) -> AsyncIterator[WorkerEngine]:
    opened = await WorkerEngine.open(
        load_message(engine=engine, **options),
        isolation=isolation,
        python=None,
        on_progress=lambda share, text: None,
        request_queue=request_queue,
    )
    try:
        yield opened
    finally:
        await opened.close()


def make_request(text: str = "tell me a story", max_tokens: int | None = 12, **fields: Any) -> EngineRequest:
    fields.setdefault("sampling", SamplingParams(temperature=0))
    stopping = StopParams(max_tokens=max_tokens, ignore_eos=fields.pop("ignore_eos", False))
    return EngineRequest(request_id=f"r{next(_ids)}", segments=(Segment(text),), stopping=stopping, **fields)


def endless(text: str = "tell me a story", **fields: Any) -> EngineRequest:
    return make_request(text, max_tokens=None, ignore_eos=True, **fields)


async def collect(generation: EngineStream) -> list[Event]:
    return [event for events in [batch async for batch in generation] for event in events]


async def answer(engine: Engine, request: EngineRequest) -> list[Event]:
    return await collect(await engine.submit(request))


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Wait until an async condition holds."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - the condition is in another process
            await asyncio.sleep(0.005)


async def is_idle(engine: Engine) -> bool:
    stats = await engine.stats()
    return stats.num_running == stats.num_waiting == 0


async def has_stepped(engine: Engine, count: int) -> bool:
    return (await engine.stats()).num_steps >= count


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_answer_comes_as_text_then_finish_then_summary(isolation):
    async with open_engine(isolation) as engine:
        generation = await engine.submit(make_request("hello", num_choices=2))
        events = await collect(generation)

    assert engine.info.backend == "fake"
    assert generation.num_prompt_tokens == events[-1].usage.prompt_tokens > 0
    assert isinstance(events[-1], RequestFinished)
    for choice in (0, 1):
        kinds = [type(event) for event in events[:-1] if event.choice == choice]
        assert kinds == [TextDelta] * (len(kinds) - 1) + [ChoiceFinished]


async def test_process_and_thread_answer_alike():
    """Whatever the isolation, many requests at once get the same events (times aside), logprobs included."""
    requests = [
        make_request(f"story {index}", 20, sampling=SamplingParams(temperature=1.0, seed=index, num_logprobs=2))
        for index in range(12)
    ]
    results = []
    for isolation in ISOLATIONS:
        async with open_engine(isolation, EngineSettings(slots=4)) as engine:
            answers = await asyncio.gather(*(answer(engine, request) for request in requests))
            results.append([events[:-1] for events in answers])

    assert results[0] == results[1]
    assert len({text_of(events) for events in results[0]}) == 12


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_tokenizer_and_stats_are_reachable(isolation):
    async with open_engine(isolation) as engine:
        token_ids = await engine.tokenize([Segment("<|bos|>", True), Segment("héllo <|bos|>")], False)
        text = await engine.detokenize(token_ids)
        generation = await engine.submit(make_request("héllo"))
        with pytest.raises(InvalidRequest, match="Token ids must be in"):
            await engine.detokenize([10**6])
        stats = await engine.stats()
        await collect(generation)

    assert text == "<|bos|>héllo <|bos|>"
    assert token_ids[0] == engine.info.special_tokens["<|bos|>"] not in token_ids[1:]
    assert stats.max_sequences == 8


@pytest.mark.parametrize(
    ("request_fields", "error"),
    [
        ({"text": "x" * 9000}, ContextLengthExceeded),
        ({"text": ""}, InvalidRequest),
        ({"token_ids": (10**6,)}, InvalidRequest),
        ({"text": "lone surrogate \ud800"}, InvalidRequest),
        ({"text": "x" * 70_000_000}, InvalidRequest),
    ],
)
async def test_refusals_come_from_submit_and_name_the_reason(request_fields, error):
    async with open_engine("thread") as engine:
        with pytest.raises(error):
            await engine.submit(make_request(**request_fields))

        assert text_of(await answer(engine, make_request()))
        assert engine.num_open == 0


async def test_request_id_in_use_is_refused():
    async with open_engine("thread", step_delay_s=0.01) as engine:
        first = endless()
        generation = await engine.submit(first)
        with pytest.raises(InvalidRequest, match=first.request_id):
            await engine.submit(first)
        generation.cancel()


async def test_full_queue_is_overloaded_until_a_place_is_free():
    request_queue = RequestQueue(1, LimitsSettings(max_queue=1))
    async with open_engine("thread", EngineSettings(slots=1), request_queue, step_delay_s=0.01) as engine:
        running = await engine.submit(endless())
        await eventually(lambda: _num_running(engine))
        waiting = await engine.submit(make_request())
        with pytest.raises(Overloaded) as refused:
            await engine.submit(make_request())
        running.cancel()

        assert refused.value.retry_after_s > 0
        assert text_of(await collect(waiting))
        assert text_of(await answer(engine, make_request()))


async def test_queue_counts_requests_that_the_worker_has_not_accepted():
    request_queue = RequestQueue(1, LimitsSettings(max_queue=1))
    async with open_engine("thread", EngineSettings(slots=1), request_queue) as engine:
        answers = [asyncio.create_task(answer(engine, make_request())) for _ in range(3)]
        outcomes = await asyncio.gather(*answers, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes[2:]] == [Overloaded]
    assert not any(isinstance(outcome, Exception) for outcome in outcomes[:2])
    assert len(request_queue) == 0


async def test_requests_that_return_with_their_images_are_never_refused():
    """After the death of a worker the next one gets all requests at once; together they are larger than its buffer."""
    image = DecodedImage("0" * 64, 2048, 2048, bytes(3 * 2048 * 2048))
    segments = (Segment("a"), *(Segment("", True, image),) * 2, Segment("b"))
    resume = Resume((ResumedChoice(0, (97, 98)),))
    async with open_engine("process", image_tokens=4) as engine:
        requests = [evolve(make_request(max_tokens=4, ignore_eos=True), segments=segments) for _ in range(5)]
        streams = await asyncio.gather(*(engine.submit(request, resume=resume) for request in requests))
        events = [await collect(stream) for stream in streams]

    assert [one[-1].usage.completion_tokens for one in events] == [4] * 5


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_prompts_that_are_too_long_to_wait_are_taken_back_from_the_worker(isolation):
    request_queue = RequestQueue(1, LimitsSettings(max_queue_tokens=20))
    async with open_engine(isolation, EngineSettings(slots=1), request_queue, step_delay_s=0.01) as engine:
        running = await engine.submit(endless())
        await eventually(lambda: _num_running(engine))
        waiting = await engine.submit(make_request("x" * 19))
        with pytest.raises(Overloaded, match="Too many prompt tokens"):
            await engine.submit(make_request("yy"))
        stats = await engine.stats()
        running.cancel()

        assert (stats.num_running, stats.num_waiting) == (1, 1)
        assert text_of(await collect(waiting))
    assert len(request_queue) == 0


async def _num_running(engine: Engine) -> int:
    return (await engine.stats()).num_running


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_cancel_while_decoding_frees_the_slot(isolation):
    async with open_engine(isolation, EngineSettings(slots=1), step_delay_s=0.005) as engine:
        generation = await engine.submit(endless())
        batches = generation.__aiter__()
        await anext(batches)
        generation.cancel()
        generation.cancel()

        assert [batch async for batch in batches] == []
        async with asyncio.timeout(60):
            assert text_of(await answer(engine, make_request(max_tokens=4)))
        assert await is_idle(engine)


async def test_cancel_while_queued_means_that_it_never_runs():
    async with open_engine("thread", EngineSettings(slots=1), step_delay_s=0.005) as engine:
        running = await engine.submit(endless())
        queued = await engine.submit(endless("another"))
        queued.cancel()
        assert await collect(queued) == []
        await eventually(lambda: _is_alone(engine))
        running.cancel()
        await eventually(lambda: is_idle(engine))


async def _is_alone(engine: Engine) -> bool:
    stats = await engine.stats()
    return (stats.num_running, stats.num_waiting) == (1, 0)


async def test_cancel_while_prefilling_stops_before_the_next_chunk():
    settings = EngineSettings(slots=1, prefill_chunk_tokens=16)
    async with open_engine("thread", settings, step_delay_s=0.1, max_batch_tokens=16) as engine:
        generation = await engine.submit(make_request("a long prompt " * 100))
        num_steps = generation.num_prompt_tokens // 16
        assert num_steps > 20
        await eventually(lambda: _num_running(engine))
        generation.cancel()
        await eventually(lambda: is_idle(engine))

        assert (await engine.stats()).num_steps < num_steps


@pytest.mark.parametrize("num_requests", [1, 2])
async def test_cancel_interrupts_a_long_forward_pass(num_requests):
    """Nothing but requests that leave is computed, so nobody loses by it and the next request need not wait."""
    async with open_engine("thread", EngineSettings(slots=1), step_delay_s=600.0) as engine:
        generations = [await engine.submit(make_request("a long prompt")) for _ in range(num_requests)]
        await asyncio.sleep(0.2)  # the pass is running now, and answers no questions
        began = time.monotonic()
        for generation in generations:
            generation.cancel()
        await eventually(lambda: is_idle(engine))

        assert time.monotonic() - began < 60


async def test_cancel_does_not_interrupt_the_work_of_others():
    async with open_engine("thread", EngineSettings(slots=2), step_delay_s=0.05) as engine:
        generation = await engine.submit(make_request("stays", max_tokens=10))
        for _ in range(5):
            leaving = await engine.submit(make_request("leaves"))
            await asyncio.sleep(0.02)
            leaving.cancel()
        text = text_of(await collect(generation))

        assert text == text_of(await answer(engine, make_request("stays", max_tokens=10)))


async def test_closing_the_iteration_cancels():
    async with open_engine("thread", step_delay_s=0.002) as engine:
        generation = await engine.submit(endless())
        async with contextlib.aclosing(aiter(generation)) as batches:
            async for _ in batches:
                break
        await eventually(lambda: is_idle(engine))

        assert engine.num_open == 0


async def test_cancelling_the_task_that_submits_or_iterates_cancels_the_request():
    async with open_engine("thread", step_delay_s=0.002) as engine:
        tasks = [asyncio.create_task(answer(engine, endless(f"story {index}"))) for index in range(8)]
        await asyncio.sleep(0)
        for task in tasks[:4]:
            task.cancel()
        await eventually(lambda: _num_running(engine))
        for task in tasks[4:]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(result) for result in results] == [asyncio.CancelledError] * 8
        await eventually(lambda: is_idle(engine))
        assert engine.num_open == 0


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_many_aborted_requests_leave_nothing_behind(isolation):
    """200 streams are given up in every phase; slots, KV positions, tasks and tables are as before."""
    async with open_engine(isolation, EngineSettings(slots=4, prefix_cache=False)) as engine:
        await answer(engine, make_request())
        before, num_tasks = await engine.stats(), len(asyncio.all_tasks())
        for index in range(200):
            generation = await engine.submit(endless(f"story {index}", num_choices=1 + index % 2))
            if index % 3:
                async with contextlib.aclosing(aiter(generation)) as batches:
                    for _ in range(index % 3):
                        await anext(batches)
            generation.cancel()
        await eventually(lambda: is_idle(engine))
        after = await engine.stats()

        assert (after.free_tokens, after.cached_tokens) == (before.free_tokens, before.cached_tokens)
        assert engine.num_open == 0
        assert len(asyncio.all_tasks()) == num_tasks
        assert text_of(await answer(engine, make_request()))


async def test_slow_client_gets_everything_in_fewer_batches():
    async with open_engine("thread") as engine:
        generation = await engine.submit(make_request(max_tokens=50, ignore_eos=True))
        await eventually(lambda: has_stepped(engine, 50))  # an accepted request may not have entered yet
        await eventually(lambda: is_idle(engine))
        batches = [batch async for batch in generation]

        assert len(batches) < 5
        assert isinstance(batches[-1][-1], RequestFinished)


async def test_failing_forward_fails_its_request_and_the_next_is_served():
    async with open_engine("thread", faults={"raise_at_step": 2}) as engine:
        with pytest.raises(PluginFailed, match="'fake' failed in forward"):
            await answer(engine, make_request())

        assert text_of(await answer(engine, make_request()))


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize(
    ("load", "error", "reason"),
    [
        (load_message(faults={"refuse_to_open": "damaged file"}), ModelLoadError, "damaged file"),
        (load_message("nonsense"), ModelLoadError, "no backend 'nonsense'"),
        (load_message(slotz=3), ConfigError, r"models\.m\.slotz.*'slots'"),
        (load_message(vocab_size=3), ModelLoadError, "vocab"),
    ],
)
async def test_load_failure_comes_back_with_its_reason(isolation, load, error, reason):
    with pytest.raises(error, match=reason):
        await WorkerEngine.open(load, isolation=isolation, python=None, on_progress=lambda share, text: None)


async def test_load_reports_progress():
    reports: list[tuple[float, str]] = []
    engine = await WorkerEngine.open(
        load_message(), isolation="process", python=None, on_progress=lambda *report: reports.append(report)
    )
    await engine.close()

    assert reports[-1] == (1.0, "ready")
    assert [share for share, _ in reports] == sorted({share for share, _ in reports})
    assert len(reports) > 5


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_close_ends_running_requests_with_engine_dead(isolation):
    async with open_engine(isolation, EngineSettings(slots=1), step_delay_s=0.005) as engine:
        running, queued = [asyncio.create_task(answer(engine, endless())) for _ in range(2)]
        await eventually(lambda: _num_running(engine))
        call = asyncio.create_task(engine.stats())
        await asyncio.sleep(0)
        await engine.close()
        results = await asyncio.gather(running, queued, call, return_exceptions=True)

        assert [type(result) for result in results] == [EngineDead] * 3
        assert not engine.died.done(), "it was asked to end"
        with pytest.raises(EngineDead):
            await engine.submit(make_request())


async def test_thread_ends_after_close():
    before = set(threading.enumerate())  # servers of other tests may live as long as the session
    async with open_engine("thread") as engine:
        await answer(engine, make_request())

    async def has_ended() -> bool:
        new = set(threading.enumerate()) - before
        return not {thread.name for thread in new} & {"engine", "intake", "reader"}

    await eventually(has_ended)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors in /proc")
@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_engines_that_were_closed_leave_no_descriptors(isolation):
    async def open_and_close(**options: Any) -> None:
        with contextlib.suppress(ModelLoadError):
            async with open_engine(isolation, **options) as engine:
                await answer(engine, make_request(max_tokens=2))

    await open_and_close()
    before = len(os.listdir("/proc/self/fd"))
    for faults in ({}, {"refuse_to_open": "no"}):
        await open_and_close(faults=faults)

    async with asyncio.timeout(60):  # the loop closes some of them after its next round, perhaps those of before, too
        while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110 - nobody tells of that
            await asyncio.sleep(0.01)


async def test_cancelled_load_ends_the_worker():
    task = asyncio.create_task(
        WorkerEngine.open(
            load_message(open_delay_s=600.0), isolation="process", python=None, on_progress=lambda share, text: None
        )
    )
    await asyncio.sleep(0.1)
    task.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await task
