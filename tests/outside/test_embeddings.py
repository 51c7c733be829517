"""Clients of embeddings and rerank: LangChain's suite, and the clients of OpenAI, Cohere, Ollama and Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginehouse_testkit.server import started_server

pytest.importorskip("langchain_tests", reason="langchain-tests is not installed")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
pytest.importorskip("langchain_ollama", reason="langchain-ollama is not installed")

from langchain_core.embeddings import Embeddings
from langchain_ollama import OllamaEmbeddings
from langchain_openai import OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests

pytestmark = pytest.mark.slow

TEXTS = ["the sea", "a mountain", "stop"]
CONFIG = """
[models.embedder]
source = "fake-pooler"
backend = "fake-pooler"
dimension_choices = [8]
prompts = { query = "query: " }

[models.reranker]
source = "fake-pooler"
backend = "fake-pooler"
task = "rerank"
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with two pooling models."""
    config = tmp_path_factory.mktemp("pooling") / "enginehouse.toml"
    config.write_text(CONFIG, encoding="utf-8")
    with started_server("--config", config) as process:
        assert process.url is not None
        yield process.url


class _Suite(EmbeddingsIntegrationTests):
    """The suite against the server."""

    url: str

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _serve(cls, url: str) -> None:
        cls.url = url


class TestOpenAIEmbeddings(_Suite):
    """Its tokenizer is that of OpenAI's models, so that texts are sent as they are."""

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        address = {"base_url": f"{self.url}/v1", "api_key": "unused"}
        return {**address, "model": "embedder", "check_embedding_ctx_length": False}


class TestOllamaEmbeddings(_Suite):
    """Ollama's addresses."""

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OllamaEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"base_url": self.url, "model": "embedder"}


def test_openais_sdk_reads_both_formats(url: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        usual = client.embeddings.create(model="embedder", input=TEXTS)  # it asks for base64
        numbers = client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
        small = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=8)

    rows, same = (np.array([item.embedding for item in one.data], np.float32) for one in (usual, numbers))
    assert (rows == same).all() and rows.shape == (3, 32)
    assert [item.index for item in usual.data] == [0, 1, 2] and usual.usage.prompt_tokens > 3
    assert len(small.data[0].embedding) == 8


def test_coheres_sdk_reranks_and_embeds(url: str) -> None:
    cohere = pytest.importorskip("cohere", reason="cohere is not installed")
    client = cohere.ClientV2(api_key="unused", base_url=url)
    ranked = client.rerank(model="reranker", query="the sea", documents=TEXTS, top_n=2)
    former = cohere.Client(api_key="unused", base_url=url).rerank(
        model="reranker", query="the sea", documents=TEXTS, return_documents=True
    )
    vectors = client.embed(
        model="embedder", texts=TEXTS, input_type="search_query", embedding_types=["float"], truncate="END"
    )

    assert len(ranked.results) == 2 and ranked.results[0].index == 0
    assert 1 > ranked.results[0].relevance_score > ranked.results[1].relevance_score > 0
    assert next(one.document.text for one in former.results) == TEXTS[0]
    assert len(vectors.embeddings.float_) == 3 and len(vectors.embeddings.float_[0]) == 32


def test_the_client_of_hugging_face_reads_teis_form(url: str) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface-hub is not installed")
    client = hub.InferenceClient(model=f"{url}/embed")
    plain = client.feature_extraction("the sea")

    assert plain.shape == (1, 32)
    assert not (client.feature_extraction("the sea", prompt_name="query") == plain).all()


def test_ollamas_client_embeds(url: str) -> None:
    ollama = pytest.importorskip("ollama", reason="ollama is not installed")
    client = ollama.Client(host=url)
    found = client.embed(model="embedder", input=TEXTS)
    former = client.embeddings(model="embedder", prompt=TEXTS[0])

    assert len(found.embeddings) == 3 and found.prompt_eval_count > 3
    assert list(found.embeddings[0]) == list(former.embedding)
