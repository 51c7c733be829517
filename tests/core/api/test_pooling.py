"""Pooling requests over HTTP, with the fake pooler in real worker processes, through a surface of a few lines."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from attrs import evolve, field, frozen

from enginehouse.contract.calls import Call
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.surface import ErrorAnswer, Reply, ReplyRoute
from enginehouse.contract.types import PoolingRequest, PoolingResult, PoolText
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse.settings.limits import LimitsSettings, MemoryBudget
from enginehouse_testkit.script import write_script
from enginehouse_testkit.scripted import ScriptedBackend
from enginehouse_testkit.served import served
from enginehouse_testkit.server_thread import server_thread
from enginehouse_testkit.waiting import wait_until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")


@frozen(kw_only=True)
class Body:
    """The members of a pooling request."""

    texts: list[Any] = field(factory=list)
    model: str | None = None
    task: str = "embed"
    options: dict[str, Any] = field(factory=dict)


class PoolSurface:
    """``POST /pool``, which answers with the result as it is."""

    name = "pool"
    api_version = 1
    request_id_header = None
    takes_any_type = False

    def __init__(self) -> None:
        self.routes = [ReplyRoute(path="/pool", name="pool", summary="", body=Body, handle=answer, limits="all")]

    def error(self, error: ErrorAnswer) -> Reply:
        return Reply({"code": error.code, "param": error.param, "message": error.message})


async def answer(call: Call) -> Reply:
    body = call.body
    texts = [text_of(one) for one in body.texts]
    result = await call.server.pool(
        PoolingRequest(model=body.model, task=body.task, inputs=tuple(texts), path="texts", **body.options)
    )
    plain = msgspec.structs.asdict(result)
    return Reply({**plain, "rows": result.array.tolist()})


def text_of(one: Any) -> PoolText:
    """Return the input for a text, a pair of texts, or a table with token ids."""
    if isinstance(one, dict):
        return PoolText(token_ids=tuple(one["token_ids"]))
    return PoolText(one) if isinstance(one, str) else PoolText(one[0], None, one[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooling")


def pooler(**options: Any) -> ModelSettings:
    own = {name: options.pop(name) for name in ("rerank", "context", "load", "isolation") if name in options}
    return ModelSettings(source="fake-pooler", backend="fake-pooler", options=options, **own)


class TaskBackend(ScriptedBackend):
    """The scripted backend, whose engine says that it embeds, but has no ``pool``."""

    def open(self, source: Any, options: Any, progress: Any) -> Any:
        engine: Any = super().open(source, options, progress)
        engine.info = msgspec.structs.replace(engine.info, task="embed")
        return engine


class VectorBackend(TaskBackend):
    """Its engine answers pooling requests itself, as one over another server does."""

    def open(self, source: Any, options: Any, progress: Any) -> Any:
        engine = super().open(source, options, progress)

        async def embed(request: PoolingRequest) -> PoolingResult:
            if request.dimensions is not None:
                raise InvalidRequest("dimensions: not here", "dimensions")
            rows = np.arange(2 * len(request.inputs), dtype="<f4")
            return PoolingResult(rows.tobytes(), 2, tuple(len(one.text) for one in request.inputs))

        engine.pool = embed
        return engine


@contextlib.contextmanager
def serving(models: dict[str, ModelSettings], **fields: Any) -> Iterator[httpx.Client]:
    settings = Settings(models=models, plugins=PluginsSettings(allow=()), **fields)
    registry = PluginRegistry.for_settings(settings)
    engines = {"task": TaskBackend(), "vectors": VectorBackend()}
    registry = evolve(registry, surfaces={"pool": PoolSurface()}, backends={**registry.backends, **engines})
    with served(settings, registry, timeout=60) as client:
        yield client


@contextlib.contextmanager
def served_as_it_is(models: dict[str, ModelSettings]) -> Iterator[httpx.Client]:
    """Serve models that need not become ready, and one that does: a server whose models have all failed ends."""
    settings = Settings(models={**models, "other": pooler()}, plugins=PluginsSettings(allow=()))
    with server_thread(settings) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    """Models for every task, a chat model, and ``held``, whose passes wait while the file ``hold`` exists."""
    models = {
        "embed": pooler(
            context=64,
            dimensions=16,
            dimension_choices=[4, 8],
            prompts={"query": "query: ", "passage": "passage: "},
            log=str(folder / "embed.log"),
        ),
        "counted": pooler(isolation="thread"),  # only one test uses it
        "rerank": pooler(task="rerank"),
        "classify": pooler(task="classify", labels=["bad", "fair", "good"], isolation="thread"),
        "engine": ModelSettings(source=write_script(folder / "hi.json", ["hi"]), backend="vectors"),
        "no-pool": ModelSettings(source=write_script(folder / "hi.json", ["hi"]), backend="task"),
        "cosine": pooler(rerank="cosine", is_normalized=False),
        "held": pooler(pass_tokens=40, hold=str(folder / "hold"), log=str(folder / "held.log"), context=32),
        "chat": ModelSettings(source="fake", backend="fake"),
        "judge": ModelSettings(source="fake", backend="fake", rerank="yes_no", rerank_answers=("y", "n")),
    }
    keys = (
        KeySettings(name="ann", key="ann", scopes=("infer", "admin", "metrics")),
        KeySettings(name="cem", key="cem"),
        KeySettings(name="bob", key="bob", tokens_per_minute=1000),
    )
    with serving(models, auth=AuthSettings(keys=keys)) as client:
        client.headers["authorization"] = "Bearer ann"
        yield client


def pool(client: httpx.Client, model: str, texts: list[Any], task: str = "embed", **options: Any) -> dict[str, Any]:
    response = client.post("/pool", json={"model": model, "texts": texts, "task": task, "options": options})
    assert response.status_code == 200, response.text
    answered: dict[str, Any] = response.json()
    return answered


def passes(file: Path) -> list[list[list[int]]]:
    return [msgspec.json.decode(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def test_embeddings_come_in_order_and_equal_texts_are_computed_once(client: httpx.Client, folder: Path) -> None:
    before = len(passes(folder / "embed.log"))
    answered = pool(client, "embed", ["one", "two and three", "one"])
    rows = np.array(answered["rows"])

    assert rows.shape == (3, 16)
    assert np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-6)
    assert np.array_equal(rows[0], rows[2]) and not np.array_equal(rows[0], rows[1])
    assert answered["num_tokens"] == [4, 12, 4]
    assert (answered["score_kind"], answered["model"], answered["num_truncated"]) == ("embedding", "embed", 0)
    assert [len(one) for one in passes(folder / "embed.log")[before:]] == [2]
    assert np.array_equal(np.array(pool(client, "embed", ["one"])["rows"]), rows[:1])


def test_dimensions_are_cut_and_normalised_again(client: httpx.Client) -> None:
    whole = np.array(pool(client, "embed", ["one"])["rows"])[0]
    short = np.array(pool(client, "embed", ["one"], dimensions=4)["rows"])[0]
    plain = np.array(pool(client, "embed", ["one"], dimensions=4, normalize=False)["rows"])[0]

    assert np.allclose(short, whole[:4] / np.linalg.norm(whole[:4]), atol=1e-6)
    assert np.array_equal(plain, whole[:4])


def test_prompts_are_put_before_texts(client: httpx.Client) -> None:
    plain, asked, said = (
        pool(client, "embed", texts, **options)
        for texts, options in ((["x"], {}), (["x"], {"prompt_name": "query"}), (["query: x"], {}))
    )

    assert asked["rows"] == said["rows"] != plain["rows"]
    assert asked["num_tokens"] == said["num_tokens"]


def test_long_texts_are_refused_by_place_or_shortened_on_request(client: httpx.Client) -> None:
    long = "ab" * 40
    body = {"model": "embed", "texts": ["x", long], "options": {}}
    refused = client.post("/pool", json=body).json()
    end, start = (pool(client, "embed", ["x", long], truncate=side) for side in ("end", "start"))

    assert (refused["code"], refused["param"]) == ("invalid_value", "texts[1]")
    assert "82 tokens" in refused["message"] and "64" in refused["message"]
    assert end["num_tokens"] == start["num_tokens"] == [3, 64]
    assert end["num_truncated"] == 1
    assert end["rows"][1] == pool(client, "embed", ["ab" * 31])["rows"][0]


def test_scores_of_pairs_say_what_they_are(client: httpx.Client) -> None:
    pairs = [["a fast car", text] for text in ("a fast car", "nothing of it", "")]
    scores, logits = (pool(client, "rerank", pairs, "rerank", raw_scores=raw) for raw in (False, True))
    wide = np.array(logits["rows"])

    assert (scores["score_kind"], logits["score_kind"]) == ("sigmoid", "logit")
    assert np.allclose(np.array(scores["rows"]), 1 / (1 + np.exp(-wide)), atol=1e-6)
    assert wide[0] > wide[1]
    assert scores["num_tokens"][2] == 4 + len("a fast car") - 1


def test_labels_share_one(client: httpx.Client) -> None:
    answered = pool(client, "classify", ["a", "b"], "classify")

    assert (answered["score_kind"], answered["labels"]) == ("softmax", ["bad", "fair", "good"])
    assert np.allclose(np.array(answered["rows"]).sum(axis=1), 1.0, atol=1e-6)


def test_embeddings_are_compared_where_the_settings_say_so(client: httpx.Client) -> None:
    answered = pool(client, "cosine", [["a", "a"], ["a", "b"]], "rerank")
    one, two = np.array(pool(client, "cosine", ["a", "b"])["rows"])

    assert answered["score_kind"] == "cosine"
    assert np.allclose(np.array(answered["rows"])[:, 0], [1.0, one @ two], atol=1e-6)
    assert answered["num_tokens"] == [6, 6]


def test_a_generative_model_is_a_reranker_where_the_settings_say_so(client: httpx.Client) -> None:
    pairs = [["a fast car", text] for text in ("a fast car", "nothing of it", "a fast car")]
    scores, logits = (pool(client, "judge", pairs, "rerank", raw_scores=raw) for raw in (False, True))
    chat = {"model": "judge", "messages": [{"role": "user", "content": "hi"}]}
    refused = client.post("/v1/chat/completions", json=chat).json()["error"]

    assert scores["score_kind"] == "sigmoid"
    assert np.allclose(np.array(scores["rows"]), 1 / (1 + np.exp(-np.array(logits["rows"]))), atol=1e-6)
    assert scores["rows"][0] == scores["rows"][2] != scores["rows"][1]
    assert refused["code"] == "unsupported_task"
    assert client.get("/v1/models/judge").json()["pooling"]["pooling"] == "yes_no"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"model": "embed", "task": "rerank", "texts": [["a", "b"]]}, "unsupported_task", "model"),
        ({"model": "rerank", "texts": ["a"]}, "unsupported_task", "model"),
        ({"model": "chat", "texts": ["a"]}, "unsupported_task", "model"),
        ({"model": "none", "texts": ["a"]}, "model_not_found", "model"),
        ({"model": "embed", "texts": []}, "invalid_value", "texts"),
        ({"model": "embed", "texts": [["a", "b"]]}, "invalid_value", "texts[0]"),
        ({"model": "rerank", "task": "rerank", "texts": ["a"]}, "invalid_value", "texts[0]"),
        ({"model": "embed", "texts": ["a"], "options": {"dimensions": 5}}, "invalid_value", "dimensions"),
        ({"model": "embed", "texts": ["a"], "options": {"prompt_name": "mine"}}, "invalid_value", "prompt_name"),
        ({"model": "embed", "texts": ["a"], "options": {"priority": -1}}, "invalid_value", "priority"),
    ],
)
def test_what_a_model_does_not_offer_is_refused(
    client: httpx.Client, body: dict[str, Any], code: str, param: str
) -> None:
    response = client.post("/pool", json=body)

    assert response.status_code == (404 if code == "model_not_found" else 400)
    assert (response.json()["code"], response.json()["param"]) == (code, param)


def test_a_refusal_says_that_no_model_was_named(client: httpx.Client) -> None:
    """The first model of the configuration is taken, which is an embedder."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    unnamed, named = (
        client.post("/v1/chat/completions", json={**chat, **model}).json()["error"]
        for model in ({}, {"model": "embed"})
    )
    pooled = client.post("/pool", json={"texts": [["a", "b"]], "task": "classify"}).json()
    hint = " The request names no model, so that the first one was taken; name another one in 'model'."

    assert unnamed["code"] == named["code"] == pooled["code"] == "unsupported_task"
    assert unnamed["message"] == named["message"] + hint
    assert pooled["message"].endswith(hint)


def test_token_ids_are_taken_as_they_are(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"model": "embed", "content": "some text", "add_special": True}).json()
    texts = [{"token_ids": ids["tokens"]}, "some text", {"token_ids": [9999]}]
    answered = pool(client, "embed", texts[:2])
    refused = client.post("/pool", json={"model": "embed", "texts": texts, "options": {}}).json()

    assert answered["rows"][0] == answered["rows"][1]
    assert refused["param"] == "texts[2][0]" and "9999" in refused["message"]


def test_an_engine_without_pool_refuses(client: httpx.Client) -> None:
    refused = client.post("/pool", json={"model": "no-pool", "texts": ["a"]})

    assert refused.status_code == 400 and refused.json()["param"] == "model"
    assert "no-pool" in refused.json()["message"] and "'embed'" in refused.json()["message"]


def test_an_engine_may_answer_by_itself(client: httpx.Client) -> None:
    answered = pool(client, "engine", ["ab", "c"])
    body = {"model": "engine", "texts": ["a"], "options": {"dimensions": 2}}
    refused = client.post("/pool", json=body).json()

    assert answered["rows"] == [[0.0, 1.0], [2.0, 3.0]]
    assert (answered["num_tokens"], answered["model"]) == ([2, 1], "engine")
    assert (refused["code"], refused["param"]) == ("invalid_value", "dimensions")


def test_models_show_what_their_rows_are(client: httpx.Client) -> None:
    shown = client.get("/v1/models/embed").json()
    chat = client.get("/v1/models/chat").json()

    assert (shown["task"], chat["task"], chat["pooling"]) == ("embed", "generate", None)
    assert shown["pooling"] == {
        "max_tokens": 64,
        "dimensions": 16,
        "pooling": "mean",
        "is_normalized": True,
        "dimension_choices": [4, 8],
        "prompts": {"query": "query: ", "passage": "passage: "},
        "default_prompt": "",
        "labels": [],
        "activation": "none",
    }
    assert [shown[name] for name in ("template_hash", "parsers", "parameters", "capabilities")] == [None] * 4


def test_limits_of_tokens_count_texts(client: httpx.Client) -> None:
    bob = {"authorization": "Bearer bob"}
    body = {"model": "embed", "texts": ["y" * 60] * 16, "options": {}}
    first, second = (client.post("/pool", json=body, headers=bob) for _ in range(2))

    assert (first.status_code, second.status_code) == (200, 429)
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 1000
    assert second.json()["code"] == "rate_limit_exceeded"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Passes of the model ``held`` wait while the block runs."""
    file = folder / "hold"
    file.touch()
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


BULK = {"model": "held", "texts": [f"{number:02}" + "z" * 18 for number in range(20)]}


def num_running(client: httpx.Client) -> int:
    """Number of pooling requests that the server lists; after it, the worker has all that are listed."""
    listed = client.get("/admin/requests").json()["data"]
    client.post("/tokenize", json={"model": "held", "content": "x"})
    return sum(one["endpoint"] == "/pool" for one in listed)


def test_short_requests_do_not_wait_for_bulk(client: httpx.Client, folder: Path) -> None:
    """The next pass after the running one has the two short requests, though the bulk request came first."""
    log = folder / "held.log"
    before = len(passes(log))
    with ThreadPoolExecutor(4) as threads:
        with held(folder):
            bulk = threads.submit(client.post, "/pool", json=BULK)
            wait_until(lambda: len(passes(log)) == before + 1)
            short = [threads.submit(pool, client, "held", [text]) for text in ("short", "brief")]
            wait_until(lambda: num_running(client) == 3)
        assert bulk.result().status_code == 200
        assert all(len(one.result()["rows"]) == 1 for one in short)
    sizes = [[len(ids) for ids in one] for one in passes(log)[before:]]

    assert sizes == [[22], [7, 7], *[[22]] * 19]


def test_a_client_that_leaves_cancels_between_passes_and_in_one(client: httpx.Client, folder: Path) -> None:
    log, url = folder / "held.log", client.base_url
    before = len(passes(log))
    with held(folder):
        connection = http.client.HTTPConnection(url.host, url.port or 80)
        headers = {"content-type": "application/json", "authorization": "Bearer ann"}
        connection.request("POST", "/pool", json.dumps(BULK), headers)
        wait_until(lambda: len(passes(log)) == before + 1)
        connection.close()
        wait_until(lambda: num_running(client) == 0)
        with ThreadPoolExecutor(1) as threads:
            following = threads.submit(pool, client, "held", ["short"])
            wait_until(lambda: len(passes(log)) == before + 2)  # the running pass was aborted for it
            (folder / "hold").unlink()
            assert len(following.result()["rows"]) == 1

    assert [len(ids) for ids in passes(log)[-1]] == [7]
    assert len(passes(log)) == before + 2
    wait_until(lambda: 'outcome="cancelled"' in client.get("/metrics").text)


def test_an_operator_can_cancel(client: httpx.Client, folder: Path) -> None:
    log = folder / "held.log"
    before = len(passes(log))
    with held(folder), ThreadPoolExecutor(1) as threads:
        bulk = threads.submit(client.post, "/pool", json=BULK)
        wait_until(lambda: len(passes(log)) == before + 1)  # otherwise its pass could count in a later test
        (shown,) = (one for one in client.get("/admin/requests").json()["data"] if one["endpoint"] == "/pool")
        client.post(f"/admin/requests/{shown['id']}/cancel")
        response = bulk.result()
        wait_until(lambda: num_running(client) == 0)  # otherwise the worker could begin the next pass

    assert (response.status_code, response.json()["code"]) == (410, "request_cancelled")


def test_callers_take_turns(client: httpx.Client, folder: Path) -> None:
    """Two bulk requests of different keys share the passes, whoever came first."""
    log = folder / "held.log"
    before = len(passes(log))
    other = {"model": "held", "texts": [f"{number:02}" + "y" * 18 for number in range(10)]}
    with ThreadPoolExecutor(2) as threads:
        with held(folder):
            first = threads.submit(client.post, "/pool", json=BULK)
            wait_until(lambda: len(passes(log)) == before + 1)
            second = threads.submit(client.post, "/pool", json=other, headers={"authorization": "Bearer cem"})
            wait_until(lambda: num_running(client) == 2)
        assert (first.result().status_code, second.result().status_code) == (200, 200)
    whose = "".join("y" if ord("y") in one[0] else "z" for one in passes(log)[before:])

    assert whose == "z" + "zy" * 10 + "z" * 9


def test_metrics_count_texts_and_passes(client: httpx.Client) -> None:
    names = ("pooled_texts_total", "pooled_tokens_total", "prompt_tokens_total", "batch_sequences_count")

    def counts() -> tuple[float, ...]:
        text = client.get("/metrics").text
        found = (re.search(rf'^enginehouse_{name}{{model="counted"}} (\S+)', text, re.MULTILINE) for name in names)
        return tuple(float(one[1]) if one is not None else 0.0 for one in found)

    num_tokens = sum(pool(client, "counted", ["counted", "twice"])["num_tokens"])

    expected = (2, num_tokens, num_tokens, 1)
    wait_until(lambda: counts() == expected, lambda: f"{expected}; there are {counts()}")


CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}


def test_a_chat_model_and_an_embedder_share_a_budget(folder: Path) -> None:
    """With room for one of them each waits for the other's requests and takes its place; a third never fits."""
    models = {
        "chat": ModelSettings(source="fake", backend="fake", context=1000, slots=4, load="lazy"),
        "embed": pooler(weights_bytes=600_000, load="lazy"),
        "large": pooler(weights_bytes=2_000_000, load="lazy"),
    }
    limits = LimitsSettings(memory_budget=MemoryBudget({"cpu": 1_000_000}))
    with serving(models, limits=limits) as client, ThreadPoolExecutor(6) as threads:
        refused = client.post("/pool", json={"model": "large", "texts": ["a"]})
        works = [threads.submit(client.post, "/v1/chat/completions", json=CHAT) for _ in range(6)]
        works += [threads.submit(client.post, "/pool", json={"model": "embed", "texts": ["a", "b"]}) for _ in range(6)]
        statuses = [one.result().status_code for one in works]
        held = {one["id"]: one["state"] for one in client.get("/v1/models").json()["data"]}

    assert (refused.status_code, refused.json()["code"]) == (507, "model_too_large")
    assert statuses == [200] * 12
    assert sorted(held.values()) == ["ready", "unloaded", "unloaded"]


def test_both_are_served_at_once_if_both_fit(folder: Path) -> None:
    """While passes of the embedder are held, the chat model answers, and the other way round."""
    models = {
        "chat": ModelSettings(source="fake", backend="fake", options={"step_delay_s": 0.01}),
        "embed": pooler(hold=str(folder / "hold"), log=str(folder / "both.log")),
    }
    with serving(models) as client, ThreadPoolExecutor(4) as threads:
        with held(folder):
            bulk = threads.submit(client.post, "/pool", json={**BULK, "model": "embed"})
            wait_until(lambda: passes(folder / "both.log"))
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert bulk.result().status_code == 200
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 4000, "stream": True}) as stream:
            next(stream.iter_lines())
            assert client.post("/pool", json={"model": "embed", "texts": ["a"]}).status_code == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rerank": "yes_no"}, "models.m.rerank: 'yes_no' needs a model for 'generate'; this one is for 'embed'"),
        ({"rerank": "cosine", "task": "rerank"}, "models.m.rerank: 'cosine' needs a model for 'embed'"),
    ],
)
def test_settings_without_effect_fail_the_load(settings: dict[str, Any], message: str) -> None:
    with served_as_it_is({"m": pooler(**settings)}) as client:
        shown = wait_until(lambda: client.get("/v1/models/m").json()["error"])

    assert message in shown
