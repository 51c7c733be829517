"""What is asked for survives: twenty long documents, each with one fact that matters and a question about it.

``-m slow`` asks SmolLM2 for all documents; the default run asks it for two. Figures stand in docs/compression.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import pytest
from attrs import evolve, frozen

from enginehouse.contract.compressor import CompressibleText, CompressionTask, Compressor, cut
from enginehouse.contract.types import GenerateRequest, Message
from enginehouse.pipeline.preparing import Preparers
from enginehouse.plugins import PluginRegistry
from enginehouse.recovery import Recovery
from enginehouse.serving import LoadedModel, ModelManager
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse_compress.extractive import ExtractiveCompressor
from enginehouse_compress.fields import CompressionBody
from enginehouse_compress.options import CompressOptions
from enginehouse_compress.scored import ScoredCompressor
from enginehouse_compress.sentences import split_sentences
from enginehouse_testkit.fake_compression import FakeCompressionTools

from .planted import NUM_SENTENCES, PlantedDocument, planted_documents

DOCUMENTS = list(planted_documents())


def test_documents_are_what_they_should_be() -> None:
    """Twenty different facts, each once in a document of sixty sentences; rewording shares no word that tells it."""
    assert len({document.fact for document in DOCUMENTS}) == 20
    for document in DOCUMENTS:
        assert document.text.count(document.fact) == 1
        assert len(split_sentences(document.text)) == NUM_SENTENCES
        shared = _telling_words(document.reworded) & _telling_words(document.fact)
        assert not shared, f"{document.reworded!r} says {shared}"
        assert _telling_words(document.question) & _telling_words(document.fact)


def _telling_words(text: str) -> set[str]:
    return {word.strip("?.,'").lower() for word in text.split() if len(word.strip("?.,'")) > 4}


def survives(document: PlantedDocument, question: str, method: Compressor, ratio: float = 0.5) -> bool:
    """Whether the fact is in what is left, which has at most ``ratio`` of the tokens."""
    tools = FakeCompressionTools()
    (total,) = tools.count_tokens([document.text])
    text = CompressibleText(text=document.text)
    task = CompressionTask(texts=(text,), question=question, max_tokens=int(total * ratio))
    (kept,) = method.compress(task, tools)
    left = cut(text, kept)
    assert tools.count_tokens([left])[0] <= task.max_tokens
    return document.fact in left


@pytest.mark.compress
def test_extractive_keeps_what_shares_words_with_the_question() -> None:
    method = ExtractiveCompressor(CompressOptions())

    assert sum(survives(document, document.question, method) for document in DOCUMENTS) >= 19
    assert sum(survives(document, document.question, method, 0.2) for document in DOCUMENTS) >= 19


def test_scored_asks_the_model_and_keeps_what_it_finds_telling() -> None:
    """The fake model finds words probable that it has just read, so shared words suffice; see below for a real one."""
    method = ScoredCompressor(CompressOptions())

    assert sum(survives(document, document.question, method) for document in DOCUMENTS) >= 19


@frozen
class Survival:
    """How many facts were left, and what that took."""

    num_left: int
    seconds: float
    num_tokens: int

    @property
    def ms_per_1000_tokens(self) -> float:
        return 1000 * self.seconds / (self.num_tokens / 1000)


@contextlib.asynccontextmanager
async def smollm2(**settings: object) -> AsyncIterator[tuple[Preparers, LoadedModel]]:
    """SmolLM2 and what prepares its prompts."""
    model = ModelSettings(source="starter", context=2048, options={"cache_tokens": 8192, "threads": 1}, **settings)  # type: ignore[arg-type]
    everything = Settings(models={"m": model})
    registry = PluginRegistry.for_settings(everything)
    manager = ModelManager(everything, registry)
    await manager.start()
    try:
        await manager.wait_settled(120)
        yield Preparers(everything.models, registry, manager, Recovery()), manager.get("m")
    finally:
        await manager.close()


async def survival(
    preparers: Preparers, model: LoadedModel, documents: Sequence[PlantedDocument], method: str, wording: str
) -> Survival:
    num_left, num_tokens, began = 0, 0, time.perf_counter()
    for document in documents:
        question = getattr(document, wording)
        request = GenerateRequest(
            request_id="r",
            model="m",
            messages=(Message(role="user", content=f"{document.text}\n\n{question}"),),
            extensions={"compression": {"compression": CompressionBody(method=method, ratio=0.5)}},
        )
        shorter, reports = await preparers.prepare(request, model)
        report = reports["compression"]
        assert report is not None
        assert report.details["failed"] is None
        assert report.details["tokens_after"] <= 0.5 * report.details["tokens_before"] + 40  # and the question
        content = (shorter.messages or ())[0].content
        assert content.endswith(question)
        num_left += document.fact in content
        num_tokens += report.details["tokens_before"]
    return Survival(num_left, time.perf_counter() - began, num_tokens)


@pytest.mark.llamacpp
@pytest.mark.timeout(300)
async def test_scored_keeps_facts_that_are_asked_for_in_other_words() -> None:
    """On a fifth of a document, so that it takes seconds."""
    document = DOCUMENTS[6]
    paragraphs = document.text.split("\n\n")
    place = next(index for index, paragraph in enumerate(paragraphs) if document.fact in paragraph)
    short = evolve(document, text="\n\n".join(paragraphs[max(0, place - 1) : place + 1]))
    async with smollm2() as (preparers, model):
        for wording in ("question", "reworded"):
            found = await survival(preparers, model, [short], "scored", wording)
            assert found.num_left == 1


@pytest.mark.llamacpp
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("method", "wording", "least"),
    [
        ("scored", "question", 19),
        ("scored", "reworded", 15),
        pytest.param("extractive", "question", 19, marks=pytest.mark.compress),
    ],
)
async def test_planted_facts_survive(
    method: str, wording: str, least: int, record_property: pytest.RecordProperty
) -> None:
    async with smollm2() as (preparers, model):
        found = await survival(preparers, model, DOCUMENTS, method, wording)
    record_property("num_left", found.num_left)
    record_property("ms_per_1000_tokens", found.ms_per_1000_tokens)
    print(method, wording, found.num_left, f"{found.ms_per_1000_tokens:.0f} ms per 1,000 tokens")

    assert found.num_left >= least
