"""The strategy ``semantic``: examples from a file, the vote of the nearest, and what a failing embedder costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.router import Candidate, RouteQuestion, RoutingDecision
from enginehouse.contract.types import GenerateRequest, Message
from enginehouse.plugins.registry import PluginRegistry
from enginehouse.settings.config import (
    ModelSettings,
    PluginsSettings,
    RouterSettings,
    Settings,
    load_settings,
    structure_options,
)
from enginehouse_router.options import RouterOptions
from enginehouse_router.semantic import SemanticRouter
from enginehouse_testkit.embedding_server import embedding_server
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

EXAMPLES = [
    {"prompt": "Translate the word house into Spanish.", "label": "easy"},
    {"prompt": "Translate the word river into Danish.", "model": "small"},
    {"prompt": "Prove the theorem of Pythagoras by areas.", "model": "big"},
    {"prompt": "Prove the lemma about prime numbers by induction.", "model": "big"},
]


def router(folder: Path, lines: Sequence[Any] = EXAMPLES, **options: Any) -> SemanticRouter:
    file = folder / "examples.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    values = {"embedder": "e", "examples": str(file), "labels": {"easy": "small"}, "num_neighbours": 3, **options}
    return SemanticRouter(structure_options(RouterOptions, values, "plugins.router"))


def decide(asked: SemanticRouter, similarities: Sequence[float], *names: str) -> RoutingDecision:
    candidates = tuple(Candidate(name=name, rank=rank) for rank, name in enumerate(names or ("small", "big")))
    request = GenerateRequest(request_id="r", model="auto", messages=(Message(role="user", content="x"),))
    question = RouteQuestion(
        request=request, candidates=candidates, default=candidates[0].name, similarities=similarities
    )
    return asked.route(question)


def test_nearest_examples_decide_and_tell_the_margin(tmp_path: Path) -> None:
    decision = decide(router(tmp_path), [0.2, 0.1, 0.6, 0.4])

    assert [attempt.model for attempt in decision.attempts] == ["big", "small"]
    assert decision.reason == "2 of the 3 nearest examples, margin 0.67; the nearest is line 3, similarity 0.60"
    assert decision.scores == pytest.approx({"big": 1.0 / 1.2, "small": 0.2 / 1.2})
    assert decision.features == pytest.approx({"similarity": 0.6, "margin": 0.8 / 1.2})


def test_default_model_when_no_example_is_near_or_there_is_no_text(tmp_path: Path) -> None:
    asked = router(tmp_path, min_similarity=0.3)

    assert decide(asked, [0.1, 0.1, 0.2, 0.1]).attempts[0].model == "small"
    assert "similarity of 0.20; the default model" in decide(asked, [0.1, 0.1, 0.2, 0.1]).reason
    assert decide(asked, ()).attempts[0].model == "small"


def test_examples_of_models_that_are_not_candidates_do_not_count(tmp_path: Path) -> None:
    decision = decide(router(tmp_path), [0.2, 0.1, 0.6, 0.4], "small", "other")

    assert [attempt.model for attempt in decision.attempts] == ["small", "other"]


@pytest.mark.parametrize(
    ("lines", "options", "problem"),
    [
        (EXAMPLES, {"embedder": None}, "plugins.router.embedder: the strategy"),
        (EXAMPLES, {"examples": None}, "plugins.router.examples: the strategy"),
        (EXAMPLES, {"examples": "/nowhere"}, "cannot be read"),
        (EXAMPLES, {"labels": {}}, "line 1: the label 'easy' has no model"),
        ([], {}, "has no examples"),
        (["{"], {}, "line 1: "),
        (["", "[]"], {}, "line 2: must be an object with a text as prompt"),
        ([{"prompt": "x"}], {}, "line 1: needs either model or label"),
        ([{"prompt": "x", "model": "bgi"}], {}, "line 1: 'bgi' is not one of the models of the router.*'big'"),
    ],
)
def test_wrong_examples_are_refused(
    tmp_path: Path, lines: Sequence[Any], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        router(tmp_path, lines, **options).check_models(("small", "big"))
    assert caught.value.path is not None


def test_examples_are_relative_to_the_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router(tmp_path)
    file = tmp_path / "enginehouse.toml"
    file.write_text(
        "[plugins]\nallow = ['router']\n[plugins.router]\nembedder = 'e'\nexamples = 'examples.jsonl'\n"
        "labels = { easy = 'small' }",
        encoding="utf-8",
    )
    monkeypatch.chdir(Path("/"))
    semantic: Any = PluginRegistry.load(load_settings(file, {}).plugins).routers["semantic"]

    semantic.check_models(("small", "big"))
    assert len(semantic.examples()) == len(EXAMPLES)


# -- over HTTP ---------------------------------------------------------------------------------------


def settings_of(
    folder: Path, embedder: str = "e", models: tuple[str, ...] = (), embedding_model: ModelSettings | None = None
) -> Settings:
    router(folder)
    own = {"embedder": embedder, "examples": str(folder / "examples.jsonl"), "labels": {"easy": "small"}}
    script = write_script(folder / "hello.json", ["Hel", "lo"])
    return Settings(
        models={
            "e": embedding_model or ModelSettings(source="fake-pooler", backend="fake-pooler", isolation="thread"),
            "small": ModelSettings(source=script, backend="scripted"),
            "big": ModelSettings(source=script, backend="scripted"),
            "other": ModelSettings(source=script, backend="scripted"),
        },
        router=RouterSettings(strategy="semantic", models=models, default="small"),
        plugins=PluginsSettings(allow=("router", "remote"), options={"router": {**own, "num_neighbours": 1}}),
    )


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with served(settings_of(tmp_path_factory.mktemp("semantic")), timeout=30) as http:
        yield http


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.parametrize(
    ("text", "model", "line"),
    [
        ("Translate the word house into Spanish, please.", "small", 1),
        ("Prove the lemma about odd numbers by induction.", "big", 4),
    ],
)
def test_request_goes_to_the_model_of_the_nearest_example(
    client: httpx.Client, text: str, model: str, line: int
) -> None:
    explained = client.post("/v1/route", json=body(text)).json()
    answer = client.post("/v1/chat/completions", json=body(text))

    assert (explained["strategy"], explained["model"]) == ("semantic", model)
    assert explained["reason"].startswith(f"1 of the 1 nearest examples, margin 1.00; the nearest is line {line}, ")
    assert explained["features"]["similarity"] > 0.5
    assert [one["model"] for one in explained["candidates"]] == ["small", "big", "other"]  # not the embedder
    assert answer.headers["x-octomil-routed-model"] == model


def test_embedder_that_was_unloaded_is_loaded_again(client: httpx.Client) -> None:
    assert client.post("/admin/models/e/unload").status_code == 200
    assert client.post("/v1/route", json=body("Prove the lemma by induction.")).json()["model"] == "big"


def test_embedder_may_be_on_a_server_that_cannot_be_asked_to_shorten_texts(tmp_path: Path) -> None:
    def embed(texts: Sequence[str]) -> np.ndarray[Any, Any]:
        return np.array([[1.0, text.count("Prove"), text.count("Translate")] for text in texts], np.float32)

    with embedding_server(embed) as url:
        elsewhere = ModelSettings(source=url, backend="remote", options={"task": "embed"})
        with served(settings_of(tmp_path, embedding_model=elsewhere), timeout=30) as http:
            explained = http.post("/v1/route", json=body("Prove it.")).json()

    assert explained["model"] == "big"
    assert explained["features"]["similarity"] == pytest.approx(1)


def test_request_without_words_gets_the_default_model(client: httpx.Client) -> None:
    explained = client.post("/v1/route", json=body("   ")).json()

    assert (explained["model"], explained["reason"]) == ("small", "there is no example; the default model")


def test_embedder_for_another_task_is_reported_and_the_default_model_answers(tmp_path: Path) -> None:
    with served(settings_of(tmp_path, embedder="other", models=("small", "big")), timeout=30) as http:
        explained = http.post("/v1/route", json=body("Prove the lemma by induction.")).json()

    assert explained["model"] == "small"
    assert explained["reason"].startswith("the router failed; the default model comes first (its embedder: ")


def test_embedder_that_is_not_served_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs the model 'x' for embeddings"), served(settings_of(tmp_path, "x")):
        pass
