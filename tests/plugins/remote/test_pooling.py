"""Embeddings, reranking and classification on other servers: ours as they are, others as far as their API has them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import GenerationFailed, InvalidRequest, UnsupportedParameter, UnsupportedTask
from enginehouse.contract.types import PoolingRequest, PoolText
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_remote.backend import RemoteBackend
from enginehouse_remote.engine import RemoteEngine
from enginehouse_remote.options import RemoteOptions
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server_thread import server_thread

pytestmark = pytest.mark.remote

_PROMPTS = {"query": "query: ", "document": ""}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of a server with models for every task, and of one that has them through the remote backend."""

    def fake(**options: Any) -> ModelSettings:
        return ModelSettings(source="fake-pooler", backend="fake-pooler", isolation="thread", options=options)

    models = {
        "embed": fake(context=64, dimension_choices=[8], prompts=_PROMPTS, is_normalized=False),
        "rerank": fake(task="rerank"),
        "classify": fake(task="classify", labels=["bad", "fair", "good"]),
    }
    with server_thread(Settings(models=models, plugins=PluginsSettings(allow=("pooling",)))) as there:
        wait_ready(there.url)
        remote = {name: ModelSettings(source=there.url, backend="remote", options={"model": name}) for name in models}
        with server_thread(Settings(models=remote, plugins=PluginsSettings(allow=("pooling", "remote")))) as here:
            wait_ready(here.url)
            with (
                httpx.Client(base_url=there.url, timeout=60, trust_env=False) as upstream,
                httpx.Client(base_url=here.url, timeout=60, trust_env=False) as client,
            ):
                yield upstream, client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "embed", "input": ["one", "two", "one"]}),
        ("/v1/embeddings", {"model": "embed", "input": [[3, 4], [5]], "encoding_format": "base64"}),
        ("/v1/embeddings", {"model": "embed", "input": "one", "dimensions": 8, "prompt_name": "query"}),
        ("/v1/embeddings", {"model": "embed", "input": "one", "input_type": "query", "normalize": False}),
        ("/v1/embeddings", {"model": "embed", "input": "word " * 100, "truncate": "end"}),
        ("/v1/rerank", {"model": "rerank", "query": "q", "documents": ["a", "b", "", "a"], "top_n": 3}),
        ("/v1/rerank", {"model": "rerank", "query": "q", "documents": ["a", "b"], "raw_scores": True}),
        ("/v1/score", {"model": "rerank", "text_1": ["p", "q", "p"], "text_2": ["a", "b", "c"]}),
        ("/v1/classify", {"model": "classify", "input": ["fine", "not fine"]}),
        ("/v1/classify", {"model": "classify", "input": "fine", "raw_scores": True}),
        ("/v1/embeddings", {"model": "embed", "input": "word " * 100}),
        ("/v1/embeddings", {"model": "embed", "input": "one", "dimensions": 7}),
        ("/v1/embeddings", {"model": "embed", "input": "one", "prompt_name": "poem"}),
        ("/v1/embeddings", {"model": "rerank", "input": "one"}),
    ],
)
def test_answers_are_those_of_the_other_server(
    both: tuple[httpx.Client, httpx.Client], path: str, body: dict[str, Any]
) -> None:
    """Rows, scores, what they are, usage and numbers of cut texts; and what is refused, with the same field."""
    there, here = (client.post(path, json=body) for client in both)
    expected, found = there.json(), here.json()

    assert here.status_code == there.status_code
    for name in ("data", "results", "usage", "score_kind", "num_truncated", "model"):
        assert found.get(name) == expected.get(name)
    if there.status_code != 200:
        assert found["error"]["param"] == expected["error"]["param"]


def test_the_task_and_what_rows_are_is_shown(both: tuple[httpx.Client, httpx.Client]) -> None:
    for name in ("embed", "rerank", "classify"):
        there, here = (client.get(f"/v1/models/{name}").json() for client in both)
        assert (here["task"], here["pooling"]) == (there["task"], there["pooling"])


async def open_engine(server: Any, **options: Any) -> RemoteEngine:
    source = ModelSource(server.url)
    return await asyncio.to_thread(RemoteBackend().open, source, RemoteOptions(**options), lambda share, text: None)


def embed(*texts: str, **fields: Any) -> PoolingRequest:
    return PoolingRequest(task="embed", inputs=tuple(map(PoolText, texts)), **fields)


def rerank(*texts: str, **fields: Any) -> PoolingRequest:
    return PoolingRequest(task="rerank", inputs=tuple(PoolText("q", second=text) for text in texts), **fields)


async def test_other_servers_get_openais_body_only(small_server: Any) -> None:
    """Numbers or base64, in any order; normalised here, since servers differ; usage is the server's sum."""
    rows = [[3.0, 4.0], [0.0, 2.0]]

    async def answers(request: dict[str, Any], wire: Any) -> None:
        packed = base64.b64encode(np.array(rows[0], "<f4").tobytes()).decode()
        data = [{"index": 1, "embedding": rows[1]}, {"index": 0, "embedding": packed}]
        wire.body({"object": "list", "data": data, "usage": {"prompt_tokens": 7, "total_tokens": 7}})

    server = await small_server(answers)
    engine = await open_engine(server, task="embed")
    result = await engine.pool(embed("a", "b", dimensions=2))

    assert server.requests[-1] == {"model": "big", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 2}
    assert engine.info.task == "embed"
    assert np.allclose(result.array, [[0.6, 0.8], [0.0, 1.0]])
    assert sum(result.num_tokens) == 7
    for field, request in (
        ("prompt_name", embed("a", prompt_name="query")),
        ("truncate", embed("a", truncate="end")),
        ("normalize", embed("a", normalize=False)),
        ("raw_scores", rerank("a", raw_scores=True)),
        ("input", PoolingRequest(task="embed", inputs=(PoolText("a"), PoolText(token_ids=(3,))))),
    ):
        with pytest.raises(UnsupportedParameter) as refused:
            await engine.pool(request)
        assert refused.value.param == field
    with pytest.raises(UnsupportedTask):
        await engine.pool(PoolingRequest(task="classify", inputs=(PoolText("a"),)))
    await engine.close()


async def test_scores_of_llama_server_are_logits(small_server: Any) -> None:
    async def answers(request: dict[str, Any], wire: Any) -> None:
        wire.body({"results": [{"index": 1, "relevance_score": 2.0}, {"index": 0, "relevance_score": -1.0}]})

    server = await small_server(answers, owned_by="llamacpp")
    engine = await open_engine(server, task="rerank")
    scores, logits = await engine.pool(rerank("a", "b")), await engine.pool(rerank("a", "b", raw_scores=True))

    assert server.requests[-1] == {"model": "big", "query": "q", "documents": ["a", "b"]}
    assert (scores.score_kind, logits.score_kind) == ("sigmoid", "logit")
    assert logits.array[:, 0].tolist() == [-1.0, 2.0]
    assert np.allclose(scores.array, 1 / (1 + np.exp(-logits.array)))
    await engine.close()


@pytest.mark.parametrize(
    "data",
    [
        [],
        [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}],
        [{"index": 0, "embedding": [1.0]}, {"index": 2, "embedding": [1.0]}],
        [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}],
        [{"index": 0, "embedding": "AAA"}, {"index": 1, "embedding": [1.0]}],
        [{"index": 0, "embedding": "AAAA"}, {"index": 1, "embedding": [1.0]}],
        [{"index": 0, "embedding": "AADAfw=="}, {"index": 1, "embedding": [1.0]}],
        [{"index": 0}, {"index": 1}],
        "text",
    ],
)
async def test_a_wrong_answer_is_an_error_of_the_server(small_server: Any, data: Any) -> None:
    async def answers(request: dict[str, Any], wire: Any) -> None:
        wire.body({"data": data})

    engine = await open_engine(await small_server(answers), task="embed")
    with pytest.raises(GenerationFailed, match="invalid answer"):
        await engine.pool(embed("a", "b"))
    await engine.close()


async def test_a_refusal_stays_one_and_a_failing_server_is_left_for_another(small_server: Any) -> None:
    async def refuses(request: dict[str, Any], wire: Any) -> None:
        wire.body({"error": {"message": "input[0] is odd", "param": "input"}}, 400)

    async def fails(request: dict[str, Any], wire: Any) -> None:
        wire.body({"error": {"message": "out of memory"}}, 500)

    async def answers(request: dict[str, Any], wire: Any) -> None:
        wire.body({"data": [{"index": 0, "embedding": [2.0]}]})

    engine = await open_engine(await small_server(refuses), task="embed")
    with pytest.raises(InvalidRequest, match="is odd"):
        await engine.pool(embed("a"))
    await engine.close()
    other = await small_server(answers)
    engine = await open_engine(await small_server(fails), task="embed", urls=(other.url,))
    for _ in range(2):
        assert (await engine.pool(embed("a"))).array.tolist() == [[1.0]]
    await engine.close()


async def test_leaving_cancels_the_request_there(small_server: Any) -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def waits(request: dict[str, Any], wire: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:  # the small server cancels what it does for a client that has left
            left.set()

    server = await small_server(waits)
    engine = await open_engine(server, task="embed")
    asking = asyncio.ensure_future(engine.pool(embed("a")))
    await begun.wait()
    assert (await engine.stats()).num_running == 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await left.wait()

    assert (await engine.stats()).num_running == 0
    await engine.close()
