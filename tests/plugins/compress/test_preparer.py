"""Prompts on their way to the engine: what triggers, what is cut, what is remembered, and what a failure costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from attrs import evolve

from enginehouse.contract.compressor import Compressor
from enginehouse.contract.errors import ConfigError, ContextLengthExceeded, InvalidRequest, ModelUnloaded, RequestError
from enginehouse.contract.types import GenerateRequest, Message
from enginehouse.pipeline.pipeline import Pipeline, RunningRequest
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.plugins import PluginRegistry
from enginehouse.serving import ModelManager
from enginehouse.serving.changing import unload_model
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings
from enginehouse_compress.fields import CompressionBody
from enginehouse_testkit.script import write_script

from .methods import Confused, Failing, Forgetful, Gated, Halving, Scoring, Slow, Unbudgeted

PLUGINS = PluginsSettings(allow=("compress",))
DOCUMENT, QUESTION = "0123456789" * 40, "What is it?"
TEXT = f"{DOCUMENT}\n\n{QUESTION}"  # 413 tokens, of which 402 are free: one per byte


def request(content: str = TEXT, **fields: Any) -> GenerateRequest:
    """A chat; ``compression`` is the value of that field."""
    messages = (Message(role="user", content=content),)
    if "compression" in fields:
        fields["extensions"] = {"compression": {"compression": fields.pop("compression")}}
    return GenerateRequest(request_id="r", **{"model": "m", "messages": messages, **fields})


@contextlib.asynccontextmanager
async def opened(
    folder: Path,
    method: Compressor,
    compressor: dict[str, Any] | None = None,
    *,
    limits: Mapping[str, Any] = MappingProxyType({}),
    s: Mapping[str, Any] = MappingProxyType({}),
    **model: Any,
) -> AsyncIterator[Pipeline]:
    """A pipeline with one compressor, to a model ``m`` with one token per byte and the scorer ``s``."""
    source = write_script(folder / "script.json", ["Hel", "lo"])
    models = {
        "m": ModelSettings(source=source, backend="scripted", compressor=compressor, **model),
        "s": ModelSettings(source=str(folder), backend="fake", isolation="thread", **s),
    }
    settings = Settings(
        models=models,
        limits=LimitsSettings(render_timeout_s=20, **limits),
        plugins=PluginsSettings(allow=("compress",)),
    )
    registry = evolve(PluginRegistry.for_settings(settings), compressors={method.name: method})
    manager, renderer = ModelManager(settings, registry), Renderer(20, 100_000)
    pipeline = Pipeline(settings, registry, manager, renderer)
    await renderer.start()
    await manager.start()
    await manager.wait_settled(30)
    try:
        yield pipeline
    finally:
        await manager.close()
        await renderer.close()


async def submit(pipeline: Pipeline, request: GenerateRequest) -> RunningRequest:
    running = await pipeline.start(request)
    running.generation.cancel()
    return running


def content(running: RunningRequest) -> str:
    (message,) = running.request.messages or ()
    return message.content


def compressed(running: RunningRequest) -> dict[str, Any] | None:
    report = running.reports["compression"]
    return None if report is None else dict(report.details)


async def test_request_asks_for_it(tmp_path: Path) -> None:
    asked = CompressionBody(method="halving", ratio=0.25)
    async with opened(tmp_path, Halving()) as pipeline:
        plain = await submit(pipeline, request())
        running = await submit(pipeline, request(compression=asked))

    assert compressed(plain) is None
    assert content(plain) == TEXT
    assert content(running) == DOCUMENT[:100] + QUESTION
    told = compressed(running)
    assert told is not None
    assert (told["method"], told["tokens_before"], told["tokens_after"]) == ("halving", 413, 111)
    assert plain.generation.num_prompt_tokens - running.generation.num_prompt_tokens == 302


async def test_settings_ask_for_it_and_requests_may_say_no_or_something_else(tmp_path: Path) -> None:
    settings = {"method": "halving", "ratio": 0.5}
    async with opened(tmp_path, Halving(), settings) as pipeline:
        usual = await submit(pipeline, request())
        without = await submit(pipeline, request(compression=False))
        other = await submit(pipeline, request(compression=CompressionBody(ratio=0.1)))
        short = await submit(pipeline, request("Short.\n\n" + QUESTION))
        scored = await submit(pipeline, request(num_prompt_logprobs=0))

    assert len(content(usual)) == 201 + 11
    assert content(without) == content(scored) == TEXT
    assert len(content(other)) == 40 + 11
    assert content(short).startswith("Short.")  # less than min_tokens


async def test_settings_may_wait_for_a_request(tmp_path: Path) -> None:
    settings = {"method": "halving", "ratio": 0.1, "when": "asked"}
    async with opened(tmp_path, Halving(), settings) as pipeline:
        usual = await submit(pipeline, request())
        asked = await submit(pipeline, request(compression=True))

    assert content(usual) == TEXT
    assert len(content(asked)) == 40 + 11


async def test_prompt_that_does_not_fit_is_shortened_where_the_operator_chose_that(tmp_path: Path) -> None:
    settings = {"method": "halving", "when": "overflow"}
    async with opened(tmp_path, Halving(), settings, context=300) as pipeline:
        fitting = await submit(pipeline, request("0123456789" * 10 + "\n\n" + QUESTION))
        running = await submit(pipeline, request(stopping={"max_tokens": 20}))
        with pytest.raises(ContextLengthExceeded):  # the client does not want that
            await submit(pipeline, request(compression=False))
        with pytest.raises(ContextLengthExceeded):  # the question alone is too long
            await submit(pipeline, request("Text.\n\n" + "x" * 400))

    assert compressed(fitting) is None
    assert compressed(running) is not None
    assert content(running).endswith(QUESTION)
    assert 260 < running.generation.num_prompt_tokens <= 280  # and room for the answer


async def test_prompt_that_does_not_fit_is_refused_elsewhere(tmp_path: Path) -> None:
    async with opened(tmp_path, Halving(), context=300) as pipeline:
        with pytest.raises(ContextLengthExceeded):
            await submit(pipeline, request())


@pytest.mark.parametrize("method", [Failing(), Confused(), Forgetful()], ids=lambda method: method.name)
async def test_failure_leaves_the_prompt_as_it_was(
    tmp_path: Path, method: Compressor, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, method, {"method": method.name, "ratio": 0.5}) as pipeline:
        running = await submit(pipeline, request())

    assert content(running) == TEXT
    told = compressed(running)
    assert told is not None
    assert told["failed"].startswith(f"The compressor '{method.name}' of the plugin 'compress.methods'")
    assert "no idea" not in told["failed"]
    assert told["tokens_before"] == told["tokens_after"]
    assert f"the compressor '{method.name}' of the plugin 'compress.methods'" in caplog.text


async def test_same_texts_are_compressed_once(tmp_path: Path) -> None:
    method = Halving()
    asked = CompressionBody(method="halving", ratio=0.5)
    async with opened(tmp_path, method) as pipeline:
        first = await submit(pipeline, request(compression=asked))
        second = await submit(pipeline, request(compression=asked))
        assert len(method.tasks) == 1
        for other in (
            request(compression=evolve(asked, ratio=0.4)),
            request(TEXT + "!", compression=asked),
            request(compression=asked, namespace="another"),
        ):
            await submit(pipeline, other)

    assert content(first) == content(second)
    assert len(method.tasks) == 4


async def test_texts_of_all_messages_share_the_budget(tmp_path: Path) -> None:
    method = Halving()
    messages = (Message(role="user", content="a" * 300), Message(role="assistant", content="b" * 100))
    asked = request(
        messages=(*messages, Message(role="user", content=TEXT)),
        compression=CompressionBody(method="halving", ratio=0.5),
    )
    async with opened(tmp_path, method) as pipeline:
        running = await submit(pipeline, asked)

    assert [len(text.text) for text in method.tasks[0].texts] == [300, 100, 413]
    assert method.tasks[0].max_tokens == 401 + 11
    assert [len(message.content) for message in running.request.messages or ()] == [300, 100, 12]


async def test_raw_prompt_is_shortened_on_request_only(tmp_path: Path) -> None:
    raw = request(messages=None, text=TEXT)
    async with opened(tmp_path, Halving(), {"method": "halving"}) as pipeline:
        usual = await submit(pipeline, raw)
        asked = await submit(pipeline, request(messages=None, text=TEXT, compression=CompressionBody(ratio=0.5)))

    assert usual.request.text == TEXT
    assert asked.request.text == DOCUMENT[:201] + QUESTION


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"compression": True}, "compression.method"),
        ({"compression": CompressionBody(method="none")}, "compression.method"),
        ({"compression": CompressionBody(method="halving"), "num_prompt_logprobs": 0}, "compression"),
        ({"compression": CompressionBody(method="halving"), "messages": None, "token_ids": (1, 2)}, "compression"),
        ({"compression": CompressionBody(method="halving"), "messages": None, "text": "a", "suffix": "b"}, "suffix"),
    ],
)
async def test_what_cannot_be_is_refused(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with opened(tmp_path, Halving()) as pipeline:
        with pytest.raises(RequestError) as caught:
            await submit(pipeline, request(**fields))

    assert caught.value.param == param


async def test_method_without_a_budget_has_no_ratio(tmp_path: Path) -> None:
    method = Unbudgeted()
    async with opened(tmp_path, method) as pipeline:
        running = await submit(pipeline, request(compression=CompressionBody(method="unbudgeted")))
        with pytest.raises(InvalidRequest, match="has no ratio"):
            await submit(pipeline, request(compression=CompressionBody(method="unbudgeted", ratio=0.5)))

    assert content(running) == QUESTION


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        ({"method": "halfing"}, "no plugin registers a compressor 'halfing'.*'halving'"),
        ({"method": "halving", "scorer": "x"}, "no model 'x' is served"),
    ],
)
async def test_settings_that_cannot_be_followed_are_refused_at_start(
    tmp_path: Path, compressor: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        async with opened(tmp_path, Halving(), compressor):
            pass


async def test_request_that_leaves_stops_its_compressor(tmp_path: Path) -> None:
    method = Slow()
    async with opened(tmp_path, method) as pipeline:
        task = asyncio.create_task(submit(pipeline, request(compression=CompressionBody(method="slow"))))
        await asyncio.to_thread(method.has_begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert await asyncio.to_thread(method.has_ended.wait, 20)


async def test_another_model_says_how_probable_texts_are(tmp_path: Path) -> None:
    """Every token of the text gets a figure, and they end where the text ends."""
    method = Scoring()
    text = "Grüße, 漢字 and a few more words of one line.\n\n" + QUESTION
    settings = {"method": "scoring", "ratio": 0.5, "when": "asked", "scorer": "s"}
    async with opened(tmp_path, method, settings) as pipeline:
        running = await submit(pipeline, request(text, compression=True))

    told = compressed(running)
    assert told is not None
    assert told["failed"] is None
    (ends,), (scores,) = method.ends, method.scores
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    assert len(scores) > len(text) / 2
    assert all(score <= 0 for score in scores)


async def test_a_model_without_a_queue_scores_its_own_prompts(tmp_path: Path) -> None:
    """What scores belongs to a request that has a place in the queue."""
    settings = {"method": "scoring", "ratio": 0.5, "when": "asked"}
    async with opened(
        tmp_path, Scoring(), None, limits={"max_queue": 0}, s={"slots": 1, "compressor": settings}
    ) as pipeline:
        running = await submit(pipeline, request(model="s", compression=True))

    told = compressed(running)
    assert told is not None
    assert told["failed"] is None and told["scored_tokens"] > 0


async def test_scorer_that_is_not_loaded_is_not_waited_for(tmp_path: Path) -> None:
    settings = {"method": "scoring", "ratio": 0.5, "scorer": "s", "min_tokens": 0}
    async with opened(tmp_path, Scoring(), settings) as pipeline:
        manager = pipeline._manager
        await manager.find("s").evict(0.0)
        running = await submit(pipeline, request())

    assert content(running) == TEXT
    told = compressed(running)
    assert told is not None
    assert told["failed"] == "ModelNotReady"


@pytest.mark.parametrize("is_kept", [True, False])
async def test_scorer_keeps_nothing_of_a_request_that_forbids_it(tmp_path: Path, is_kept: bool) -> None:
    settings = {"method": "scoring", "ratio": 0.5, "when": "asked", "scorer": "s"}
    async with opened(tmp_path, Scoring(), settings) as pipeline:
        running = await submit(pipeline, request(compression=True, cache_prompt=is_kept))
        scorer = pipeline._manager.find("s").loaded
        assert scorer is not None
        stats = await scorer.engine.stats()

    told = compressed(running)
    assert told is not None
    assert told["scored_tokens"] > 0
    assert (stats.cached_tokens > 0) == is_kept


@pytest.mark.parametrize("model", ["s", "m"])
async def test_model_that_is_taken_away_while_a_prompt_is_shortened_is_not_told_of_as_dead(
    tmp_path: Path, model: str
) -> None:
    """An operator's order is no illness of the model, neither for the client nor for a circuit breaker."""
    gated = Gated()
    async with opened(tmp_path, gated) as pipeline:
        asked = request(model=model, compression=CompressionBody(method="gated", ratio=0.5))
        submitting = asyncio.create_task(pipeline.start(asked))
        assert await asyncio.to_thread(gated.has_begun.wait, 20)
        await unload_model(pipeline._manager, model, force=True)
        gated.may_end.set()

        with pytest.raises(ModelUnloaded, match=f"'{model}' was unloaded"):
            [batch async for batch in (await submitting).generation]
