"""The scripted engine: it must behave as a real engine does, or tests above it prove nothing."""

import asyncio
import time
from pathlib import Path

import pytest

from enginehouse.contract.backend import Backend, ModelSource
from enginehouse.contract.errors import (
    ContextLengthExceeded,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
)
from enginehouse.contract.types import (
    ChoiceFinished,
    EngineRequest,
    RequestFinished,
    SamplingParams,
    Segment,
    StopParams,
    TextDelta,
)
from enginehouse.contract.usage import Usage
from enginehouse_testkit.script import Script, ScriptToken, write_script
from enginehouse_testkit.scripted import ScriptedBackend, ScriptedEngine, ScriptedOptions


@pytest.fixture
def open_engine(tmp_path: Path):
    def open_engine(tokens: list, options: dict | None = None, **script) -> ScriptedEngine:
        path = Path(write_script(tmp_path / "script.json", tokens, **script))
        source = ModelSource(str(path), path)
        return ScriptedBackend().open(source, ScriptedOptions(**(options or {})), lambda share, text: None)

    return open_engine


def request(prompt: str = "hi", **fields) -> EngineRequest:
    return EngineRequest(request_id="r", segments=(Segment(prompt),), **fields)


async def events_of(engine: ScriptedEngine, asked: EngineRequest) -> list:
    generation = await engine.submit(asked)
    return [event async for batch in generation for event in batch]


def text_of(events: list, choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.choice == choice)


def test_backend_follows_the_contract() -> None:
    backend = ScriptedBackend()

    assert isinstance(backend, Backend)
    assert backend.probe().available
    assert backend.match(ModelSource("a.json", Path("a.json"))).score == 1
    assert backend.match(ModelSource("a.gguf", Path("a.gguf"))).score == 0
    assert backend.estimate(ModelSource("a.json"), ScriptedOptions()).total_bytes == 0


async def test_replays_and_counts(open_engine) -> None:
    events = await events_of(open_engine(["Hel", "lo"]), request("grüß"))

    assert text_of(events) == "Hello"
    assert events[-2] == ChoiceFinished(0, "stop", Usage(completion_tokens=2))
    assert isinstance(events[-1], RequestFinished)
    assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (6, 2)  # one token per byte


async def test_characters_are_never_split(open_engine) -> None:
    events = await events_of(open_engine([{"bytes": [240, 159]}, {"bytes": [146, 150]}, "!"]), request())

    assert [event.text for event in events if isinstance(event, TextDelta)] == ["💖", "!"]


async def test_replies_answer_prompts_that_contain_their_text(open_engine) -> None:
    engine = open_engine(["Hello"], replies={"name": ["Ann", "."], "name and age": ["Ann, 7"]})
    asked = ["hi", "Your name?", "Your name and age?"]

    assert [text_of(await events_of(engine, request(prompt))) for prompt in asked] == ["Hello", "Ann.", "Ann, 7"]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 100])
async def test_tokens_per_step_changes_batches_not_text(open_engine, tokens_per_step: int) -> None:
    engine = open_engine(list("abcdefg"), tokens_per_step=tokens_per_step)
    generation = await engine.submit(request(stopping=StopParams(stop=("ef",))))
    batches = [batch async for batch in generation]

    assert all(batches)
    assert text_of([event for batch in batches for event in batch]) == "abcd"
    assert len(batches) <= -(-6 // tokens_per_step) + 1  # steps that show nothing give none


async def test_choices_stop_together_and_count_separately(open_engine) -> None:
    events = await events_of(open_engine(["a", "b", "c"]), request(num_choices=3, stopping=StopParams(max_tokens=2)))

    assert [text_of(events, choice) for choice in range(3)] == ["ab"] * 3
    ends = [event for event in events if isinstance(event, ChoiceFinished)]
    found = [(end.choice, end.finish_reason, end.usage.completion_tokens) for end in ends]
    assert found == [(n, "length", 2) for n in range(3)]
    assert events[-1].usage.completion_tokens == 6


async def test_stop_string_is_reported(open_engine) -> None:
    events = await events_of(open_engine(["one t", "wo"]), request(stopping=StopParams(stop=("two",))))

    assert text_of(events) == "one "
    assert events[-2] == ChoiceFinished(0, "stop", Usage(completion_tokens=2), "two")


async def test_a_loop_ends_with_the_context(open_engine) -> None:
    events = await events_of(open_engine(["a", "b"], {"context": 10}, loop=True), request("four"))

    assert text_of(events) == "ababab"
    assert events[-2] == ChoiceFinished(0, "length", Usage(completion_tokens=6))


async def test_delay_and_error(open_engine) -> None:
    engine = open_engine(["a", {"delay_s": 0.1}, "b", {"error": "boom"}])
    generation = await engine.submit(request())
    began, seen = time.monotonic(), []

    with pytest.raises(GenerationFailed, match="boom"):
        async for batch in generation:
            seen += batch

    assert text_of(seen) == "ab"
    assert time.monotonic() - began >= 0.1
    assert (await engine.stats()).num_running == 0


async def test_logprobs(open_engine) -> None:
    events = await events_of(open_engine(["Hel", "lo"]), request(sampling=SamplingParams(num_logprobs=3)))
    entries = [entry for event in events if isinstance(event, TextDelta) for entry in event.logprobs]

    assert [entry.token for entry in entries] == [b"Hel", b"lo"]
    assert all(len(entry.top) == 3 and entry.top[0].token_id == entry.token_id for entry in entries)
    assert all(entry.top[0].logprob > entry.top[1].logprob > entry.top[2].logprob for entry in entries)


async def test_slots_queue_and_overload(open_engine) -> None:
    engine = open_engine(["a", {"delay_s": 0.05}, "b"], {"slots": 1, "max_queue": 1})
    first = await engine.submit(request())
    second = await engine.submit(request())
    with pytest.raises(Overloaded):
        await engine.submit(request())
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)

    order = []

    async def read(name: str, generation) -> None:
        async for _ in generation:
            order.append(name)

    await asyncio.gather(read("second", second), read("first", first))
    assert order.index("second") > len(order) - 1 - order[::-1].index("first")
    assert (await engine.stats()).num_running == 0


async def test_cancel_in_every_phase_frees_the_slot(open_engine) -> None:
    engine = open_engine(["a", {"delay_s": 600}, "b"], {"slots": 1})
    running, waiting, never_read = [await engine.submit(request()) for _ in range(3)]

    async def read(generation) -> int:
        return len([batch async for batch in generation])

    tasks = [asyncio.create_task(read(running)), asyncio.create_task(read(waiting))]
    await asyncio.sleep(0.02)
    waiting.cancel()
    never_read.cancel()
    running.cancel()
    running.cancel()

    assert await asyncio.wait_for(asyncio.gather(*tasks), 60) == [1, 0]
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


async def test_close_ends_what_runs(open_engine) -> None:
    engine = open_engine(["a", {"delay_s": 600}])
    generation = await engine.submit(request())

    async def read() -> None:
        async for _ in generation:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.02)
    await engine.close()
    with pytest.raises(EngineDead):
        await asyncio.wait_for(task, 60)


async def test_refusals(open_engine) -> None:
    engine = open_engine(["a"], {"context": 8})

    with pytest.raises(ContextLengthExceeded):
        await engine.submit(request("12345678"))
    with pytest.raises(InvalidRequest):
        await engine.submit(EngineRequest(request_id="r", token_ids=(257,)))
    with pytest.raises(InvalidRequest):
        await engine.detokenize([999])
    assert await engine.detokenize(await engine.tokenize([Segment("grün")], True)) == "grün"


async def test_sixty_four_streams_at_once(open_engine) -> None:
    engine = open_engine([" word"] * 50)

    texts = [text_of(events) for events in await asyncio.gather(*(events_of(engine, request()) for _ in range(64)))]
    assert texts == [" word" * 50] * 64


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "cannot read"),
        ("[]", "is wrong"),
        ('{"tokens": [{}]}', "exactly one"),
        ('{"tokens": [{"text": "a", "error": "b"}]}', "exactly one"),
        ('{"tokens": [{"bytes": [256]}]}', "0 to 255"),
        ('{"tokens": [{"text": 5}]}', r"tokens\[0\].text"),
        ('{"tokens": [], "loop": true}', "needs a token"),
        ('{"tokens": [], "speed": 1}', "speed"),
    ],
)
def test_wrong_scripts(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(content, encoding="utf-8")

    with pytest.raises(ModelLoadError, match=problem):
        ScriptedBackend().open(ModelSource(str(path), path), ScriptedOptions(), lambda share, text: None)


async def test_cancelled_while_it_waits_for_a_slot() -> None:
    """The place that it had not got yet is nobody's."""
    engine = ScriptedEngine(Script(tokens=(ScriptToken(text="a"), ScriptToken(delay_s=0.05))), ScriptedOptions(slots=1))
    first, second, third = (asyncio.create_task(events_of(engine, request())) for _ in range(3))
    await asyncio.sleep(0.01)
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third
    assert engine.slots.num_running == len(engine.slots.waiting) == 1
    await asyncio.gather(first, second)

    assert engine.slots.num_running == 0
    assert not engine.slots.waiting
