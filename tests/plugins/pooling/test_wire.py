"""Embeddings, rerank, score and classify on the wire, in the forms of all servers whose addresses there are."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

DOCUMENTS = ["the sea and the mountain", "stop stop stop", "", "mountaineering of the sea", "stop stop stop"]
LONG = "xyz " * 40
PAGE = Path(__file__).parents[3] / "docs" / "embeddings.md"


def ask(client: httpx.Client, path: str, **body: Any) -> Any:
    """Return the body of a response; no member of the request was ignored."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "x-enginehouse-ignored" not in response.headers
    return response.json()


def embed(client: httpx.Client, given: Any, **fields: Any) -> NDArray[np.float32]:
    """Return the vectors of `/v1/embeddings`."""
    data = ask(client, "/v1/embeddings", **{"model": "embedder", "input": given, **fields})["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return np.array([item["embedding"] for item in data], np.float32)


# -- embeddings --------------------------------------------------------------------------------------


def test_embeddings_have_openais_form(client: httpx.Client) -> None:
    answer = ask(client, "/v1/embeddings", model="embedder", input="the sea", user="x", priority=1)
    item = answer["data"][0]

    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": item["embedding"]}],
        "model": "embedder",
        "usage": {"prompt_tokens": 8, "total_tokens": 8},
    }
    assert np.linalg.norm(item["embedding"]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("prefix", ["", "/compat/octomil/v1", "/compat/omlx/v1"])
def test_embeddings_have_the_addresses_of_other_profiles(client: httpx.Client, prefix: str) -> None:
    answer = ask(client, f"{prefix}/embeddings", model="embedder", input="the sea")

    assert np.array(answer["data"][0]["embedding"], np.float32) == pytest.approx(embed(client, "the sea")[0])


def test_a_text_has_one_vector_in_every_form_of_the_input(client: httpx.Client) -> None:
    ids = ask(client, "/tokenize", model="embedder", content="the sea", add_special=False)["tokens"]
    texts = embed(client, ["the sea", "stop", "the sea"])
    bare = embed(client, ids)

    assert (embed(client, "the sea") == texts[:1]).all() and (texts[0] == texts[2]).all()
    assert not (bare == texts[0]).all()
    assert (embed(client, [ids, ids]) == bare).all()
    assert (embed(client, ["the sea", ids]) == np.concatenate([texts[:1], bare])).all()
    assert (embed(client, [ids, "stop"], add_special_tokens=True) == texts[:2]).all()
    assert (embed(client, "the sea", add_special_tokens=False) == bare).all()


def test_base64_and_numbers_are_the_same_to_the_bit(client: httpx.Client) -> None:
    texts = [f"{number} mountaineering" for number in range(300)]
    numbers = embed(client, texts, encoding_format="float")
    data = ask(client, "/v1/embeddings", model="embedder", input=texts, encoding_format="base64")["data"]
    coded = np.frombuffer(b"".join(base64.b64decode(item["embedding"]) for item in data), "<f4")

    assert (coded.reshape(300, -1) == numbers).all()


def test_dimensions_are_cut_and_normalised_again(client: httpx.Client) -> None:
    whole, cut = embed(client, "the sea")[0], embed(client, "the sea", dimensions=8)[0]

    assert cut == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=1e-6)


def test_normalize_false_leaves_vectors_as_they_are(client: httpx.Client) -> None:
    raw = embed(client, "the sea", model="plain", normalize=False)
    scaled = embed(client, "the sea", model="plain")

    assert np.linalg.norm(raw) > 2 and np.linalg.norm(scaled) == pytest.approx(1, abs=1e-6)
    assert (embed(client, "the sea", model="plain", embd_normalize=-1) == raw).all()


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt_name": "query"}, "query: "),
        ({"input_type": "search_query"}, "query: "),
        ({"input_type": "document"}, "passage: "),
        ({}, ""),
    ],
)
def test_prompts_are_put_before_texts(client: httpx.Client, fields: dict[str, str], prompt: str) -> None:
    assert (embed(client, "the sea", **fields) == embed(client, f"{prompt}the sea")).all()


def test_a_kind_of_text_without_a_prompt_is_listed_as_ignored(client: httpx.Client) -> None:
    body = {"model": "embedder", "input": "the sea", "input_type": "clustering", "unknown": 1}
    response = client.post("/v1/embeddings", json=body)

    assert response.status_code == 200
    assert sorted(response.headers["x-enginehouse-ignored"].split(", ")) == ["input_type", "unknown"]


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"truncate": "end"}, LONG[:62]),
        ({"truncate": "END"}, LONG[:62]),
        ({"truncate": True}, LONG[:62]),
        ({"truncation": True}, LONG[:62]),
        ({"truncate_prompt_tokens": -1}, LONG[:62]),
        ({"truncate": "start"}, LONG[-62:]),
        ({"truncate": True, "truncation_direction": "Left"}, LONG[-62:]),
        ({"truncate_prompt_tokens": 10}, LONG[:8]),
        ({"truncate": "start", "truncate_prompt_tokens": 10}, LONG[-8:]),
    ],
)
def test_long_texts_are_shortened_if_asked(client: httpx.Client, fields: dict[str, Any], same: str) -> None:
    answer = ask(client, "/v1/embeddings", model="embedder", input=["x", LONG], **fields)
    found = np.array(answer["data"][1]["embedding"], np.float32)

    assert answer["num_truncated"] == 1
    assert answer["usage"]["prompt_tokens"] == 3 + min(len(same), 62) + 2
    assert (found == embed(client, same)[0]).all()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
    ("/v1/embeddings", {"input": [[]]}, "input[0]"),
    ("/v1/embeddings", {"input": {"a": 1}}, "input"),
    ("/v1/embeddings", {"input": [[1, "a"]]}, "input[0][1]"),
    ("/v1/embeddings", {"input": [1, -1]}, "input[1]"),
    ("/v1/embeddings", {"input": [1, True]}, "input[1]"),
    ("/v1/embeddings", {"input": [[5], [1_000_000]]}, "input[1][0]"),
    ("/v1/embeddings", {"input": ["a", LONG]}, "input[1]"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
    ("/v1/embeddings", {"input": "a", "content": "a"}, "content"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "dimensions": 9}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "prompt_name": "clustering"}, "prompt_name"),
    ("/v1/embeddings", {"input": "a", "prompt_name": "query", "input_type": "query"}, "input_type"),
    ("/v1/embeddings", {"input": "a", "pooling": "cls"}, "pooling"),
    ("/v1/embeddings", {"input": "a", "truncate": "middle"}, "truncate"),
    ("/v1/embeddings", {"input": "a", "truncate": "none", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "normalize": True, "embd_normalize": 2}, "embd_normalize"),
    ("/v1/embeddings", {"input": "a", "embd_normalize": 1}, "embd_normalize"),
    ("/v1/embeddings", {"input": "a", "model": "reranker"}, "model"),
    ("/v1/embeddings", {"input": "a", "model": "fake"}, "model"),
    ("/embed", {"inputs": ["a", LONG]}, "inputs[1]"),
    ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, "model"),
    ("/v1/rerank", {"model": "reranker", "documents": ["b"]}, "query"),
    ("/v1/rerank", {"model": "reranker", "query": "a"}, "documents"),
    ("/v1/rerank", {"model": "reranker", "query": "a", "documents": []}, "documents"),
    ("/v1/rerank", {"model": "reranker", "query": "a", "documents": "b"}, "documents"),
    ("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["b"] * 2049}, "documents"),
    ("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["b", 1]}, "documents[1]"),
    ("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["b"], "texts": ["b"]}, "texts"),
    ("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["b", LONG]}, "documents[1]"),
    ("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    (
        "/v1/rerank",
        {"model": "reranker", "query": "a", "documents": ["b"], "truncate": False, "max_tokens_per_doc": 1},
        "max_tokens_per_doc",
    ),
    ("/v1/score", {"model": "reranker", "text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
    ("/v1/score", {"model": "reranker", "text_1": "a"}, "text_2"),
    ("/v1/score", {"model": "reranker", "text_1": "a", "queries": "b", "text_2": "c"}, "queries"),
    ("/v1/classify", {"model": "classifier"}, "input"),
    ("/predict", {"model": "classifier", "inputs": [["a", "b", "c"]]}, "inputs[0]"),
    # One text, or its token ids, have no index.
    ("/v1/embeddings", {"input": LONG}, "input"),
    ("/v1/embeddings", {"input": [1, 99999]}, "input[1]"),
    ("/embed", {"inputs": LONG}, "inputs"),
    ("/v1/classify", {"model": "classifier", "input": [1, 99999]}, "input[1]"),
    ("/predict", {"model": "classifier", "inputs": LONG}, "inputs"),
]


@pytest.mark.parametrize(("path", "body", "named"), REFUSED)
def test_errors_name_the_member_and_the_index(
    client: httpx.Client, path: str, body: dict[str, Any], named: str
) -> None:
    response = client.post(path, json={"model": "embedder", **body})
    error = response.json()["error"]

    assert (response.status_code, error["param"]) == (400, named), error
    assert named == "model" or error["message"].startswith(named), error


def test_a_text_that_is_too_long_is_named_with_its_tokens_and_the_limit(client: httpx.Client) -> None:
    error = client.post("/v1/embeddings", json={"model": "embedder", "input": ["a", LONG]}).json()["error"]

    assert "162" in error["message"] and "64" in error["message"]


# -- other forms of embeddings -----------------------------------------------------------------------


def test_other_servers_addresses_give_the_same_vectors_in_their_forms(client: httpx.Client) -> None:
    texts = ["the sea", "stop"]
    want = embed(client, texts)
    tei = ask(client, "/embed", model="embedder", inputs=texts)
    llama = ask(client, "/embedding", model="embedder", content=texts)
    cohere = ask(client, "/v2/embed", model="embedder", texts=texts, embedding_types=["float", "base64"])
    ollama = ask(client, "/api/embed", model="embedder:latest", input=texts)
    former = ask(client, "/api/embeddings", model="embedder", prompt="the sea")

    assert (np.array(tei, np.float32) == want).all()
    assert [item["index"] for item in llama] == [0, 1]
    assert (np.array([item["embedding"] for item in llama], np.float32)[:, 0] == want).all()
    assert (np.array(cohere["embeddings"]["float"], np.float32) == want).all()
    assert cohere["embeddings"]["base64"][0] == base64.b64encode(want[0].tobytes()).decode()
    assert (np.array(ollama["embeddings"], np.float32) == want).all()
    assert ollama["model"] == "embedder:latest" and ollama["prompt_eval_count"] == 8 + 4
    assert 0 < ollama["total_duration"] < 1e9 * 60
    assert (np.array(former["embedding"], np.float32) == want[0]).all()


def test_ollama_shortens_and_cohere_too_unless_told_otherwise(client: httpx.Client) -> None:
    want = embed(client, LONG[:62])
    shortened = ask(client, "/api/embed", model="embedder", input=LONG)["embeddings"]
    refused = client.post("/api/embed", json={"model": "embedder", "input": LONG, "truncate": False})
    cohere = ask(client, "/v2/embed", model="embedder", texts=[LONG], input_type="search_query")
    strict = client.post("/v2/embed", json={"model": "embedder", "texts": [LONG], "truncate": "NONE"})

    assert (np.array(shortened, np.float32) == want).all()
    assert refused.status_code == 400 and refused.json()["error"].startswith("input")
    assert cohere["num_truncated"] == 1
    assert strict.status_code == 400


def test_ollama_without_an_input_loads_the_model(client: httpx.Client) -> None:
    assert ask(client, "/api/embed", model="embedder", input="") == {"model": "embedder", "embeddings": []}
    assert ask(client, "/api/embeddings", model="embedder") == {"embedding": []}
    assert "embedding" in ask(client, "/api/show", model="embedder")["capabilities"]
    ignored = client.post("/api/embed", json={"model": "embedder", "input": "a", "options": {"num_ctx": 9}})
    assert ignored.headers["x-enginehouse-ignored"] == "options.num_ctx"


# -- rerank ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking"])
def test_rerank_sorts_documents(client: httpx.Client, path: str) -> None:
    answer = ask(client, path, model="reranker", query="the sea", documents=DOCUMENTS, return_documents=True)
    results = answer["results"]
    scores = [result["relevance_score"] for result in results]

    assert sorted(result["index"] for result in results) == [0, 1, 2, 3, 4]
    assert scores == sorted(scores, reverse=True) and 0 < scores[-1] < scores[0] < 1
    assert all(result["document"] == {"text": DOCUMENTS[result["index"]]} for result in results)
    assert answer["score_kind"] == "sigmoid" and answer["model"] == "reranker"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    # Equal documents have equal scores, and the earlier one comes first.
    places = {result["index"]: place for place, result in enumerate(results)}
    assert places[4] == places[1] + 1 and scores[places[1]] == scores[places[4]]


def test_rerank_in_teis_form_is_a_list(client: httpx.Client) -> None:
    body = {"model": "reranker", "query": "the sea"}
    want = ask(client, "/v1/rerank", **body, documents=[{"text": text} for text in DOCUMENTS], top_n=2)["results"]
    found = ask(client, "/rerank", **body, texts=DOCUMENTS, return_text=True, top_n=2)
    whole = ask(client, "/rerank", **body, texts=DOCUMENTS, top_n=99)

    assert found == [
        {"index": one["index"], "score": one["relevance_score"], "text": DOCUMENTS[one["index"]]} for one in want
    ]
    assert len(whole) == 5 and "text" not in whole[0]


def test_raw_scores_are_logits(client: httpx.Client) -> None:
    body = {"model": "reranker", "query": "the sea", "documents": DOCUMENTS}
    scores = {one["index"]: one["relevance_score"] for one in ask(client, "/v1/rerank", **body)["results"]}
    raw = ask(client, "/v1/rerank", **body, raw_scores=True)

    assert raw["score_kind"] == "logit"
    for one in raw["results"]:
        assert scores[one["index"]] == pytest.approx(1 / (1 + np.exp(-one["relevance_score"])), abs=1e-6)


def test_long_documents_are_shortened_alone(client: httpx.Client) -> None:
    body = {"model": "reranker", "query": "the sea"}
    cut = ask(client, "/v2/rerank", **body, documents=["x", LONG])
    by_tokens = ask(client, "/v1/rerank", **body, documents=["stop and the", LONG], max_tokens_per_doc=2)
    same = ask(client, "/v1/rerank", **body, documents=["st"[:2], LONG[:2]])

    assert cut["num_truncated"] == 1
    assert by_tokens["num_truncated"] == 2
    assert by_tokens["usage"]["prompt_tokens"] <= same["usage"]["prompt_tokens"] + 2


def test_a_request_without_a_model_goes_to_one_for_its_task(client: httpx.Client) -> None:
    assert len(ask(client, "/embed", inputs="the sea")[0]) == 32
    assert ask(client, "/v1/rerank", query="a", documents=["b"])["model"] == "reranker"
    assert ask(client, "/v1/classify", input="a")["model"] == "classifier"


# -- score, classify ---------------------------------------------------------------------------------


def test_scores_are_those_of_rerank_in_the_order_of_the_pairs(client: httpx.Client) -> None:
    want = ask(client, "/v1/rerank", model="reranker", query="the sea", documents=DOCUMENTS)["results"]
    answer = ask(client, "/v1/score", model="reranker", text_1="the sea", text_2=DOCUMENTS)
    pairs = ask(client, "/score", model="reranker", queries=["the sea"] * 5, documents=DOCUMENTS)

    assert answer["data"] == [
        {"index": one["index"], "object": "score", "score": one["relevance_score"]}
        for one in sorted(want, key=lambda one: one["index"])
    ]
    assert pairs["data"] == answer["data"]
    assert (answer["object"], answer["score_kind"]) == ("list", "sigmoid")


def test_classes_have_probabilities(client: httpx.Client) -> None:
    texts = ["the sea", "stop", "mountain"]
    answer = ask(client, "/v1/classify", model="classifier", input=texts)
    raw = ask(client, "/classify", model="classifier", input=texts, use_activation=False)
    predicted = ask(client, "/predict", model="classifier", inputs=[[text] for text in texts])
    single = ask(client, "/predict", model="classifier", inputs=texts[0])

    labels = ["negative", "positive"]
    for item, logits, ranked in zip(answer["data"], raw["data"], predicted, strict=True):
        assert item["num_classes"] == 2 and sum(item["probs"]) == pytest.approx(1)
        assert item["label"] == labels[int(np.argmax(item["probs"]))] == ranked[0]["label"]
        assert ranked[0]["score"] == pytest.approx(max(item["probs"]))
        odds = np.exp(logits["probs"])
        assert item["probs"] == pytest.approx(odds / odds.sum(), abs=1e-6)
    assert (answer["score_kind"], raw["score_kind"]) == ("softmax", "logit")
    assert single == predicted[0]


# -- the page ----------------------------------------------------------------------------------------

RENAMED = {"minilm": "embedder"}


def covers(found: Any, shown: Any) -> bool:
    """Return True if everything that the page shows is there, with values of the same kind."""
    if isinstance(shown, dict):
        return all(name in found and covers(found[name], value) for name, value in shown.items())
    if isinstance(shown, list):
        return bool(found) and covers(found[0], shown[0])
    return isinstance(found, str | int | float) and isinstance(shown, str) == isinstance(found, str)


def test_the_requests_of_the_page_have_the_responses_of_the_page(client: httpx.Client) -> None:
    blocks = re.findall(r"```(bash|json)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    num_asked = 0
    for place, (language, block) in enumerate(blocks):
        asked = re.match(r"curl http://127\.0\.0\.1:8080(\S+) .*?-d '(.*)'$", block.strip(), flags=re.DOTALL)
        if language != "bash" or asked is None:
            continue
        body = json.loads(asked[2])
        body["model"] = RENAMED.get(body["model"], body["model"])
        found = ask(client, asked[1], **body)
        num_asked += 1
        if place + 1 < len(blocks) and blocks[place + 1][0] == "json":
            shown = json.loads(blocks[place + 1][1])
            assert covers(found, shown), f"{found} does not hold {shown}"

    assert num_asked == 4


def test_the_addresses_of_the_page_are_those_that_there_are(client: httpx.Client) -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `POST ")]
    named = {path for row in rows for path in re.findall(r"`(?:POST )?(/[^`]+)`", row.split("|")[1])}
    described = client.get("/schema").json()["paths"]
    there = {path for path in described if "post" in described[path]}
    with_v1 = there | {f"/v1{path}" for path in there}

    assert named <= with_v1 and len(named) > 15
