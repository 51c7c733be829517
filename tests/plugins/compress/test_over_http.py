"""The request field ``compression`` and the mark ``compress: false``, and what answers, log and metrics tell."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from attrs import evolve

from enginehouse.contract.errors import ConfigError
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings, load_settings
from enginehouse_compress.lossless import LosslessCompressor
from enginehouse_compress.options import CompressOptions
from enginehouse_compress.scored import ScoredCompressor
from enginehouse_compress.semantic import SemanticCompressor
from enginehouse_compress.settings import CompressorSettings, read_settings
from enginehouse_testkit.embedding_server import embedding_server
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

from .methods import Failing, Halving, Scoring

TEXT = "0123456789" * 40 + "\n\nWhat is it?"
HALF = {"method": "halving", "ratio": 0.5}


def _semantic(embedder: str) -> dict[str, Any]:
    return {"method": "semantic", "when": "asked", "embedder": embedder}


@pytest.fixture(scope="module")
def embedder() -> Iterator[str]:
    """A server with OpenAI's address for embeddings: of each text, how many there are of some letters."""
    letters = "aeioufmrst"
    with embedding_server(lambda texts: np.array([[1 + text.count(one) for one in letters] for text in texts])) as url:
        yield url


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, embedder: str) -> Iterator[httpx.Client]:
    script = write_script(tmp_path_factory.mktemp("scripts") / "hello.json", ["Hel", "lo"])
    overflow = {"method": "halving", "when": "overflow"}
    settings = Settings(
        models={
            "m": ModelSettings(source=script, backend="scripted"),
            "small": ModelSettings(source=script, backend="scripted", context=300, compressor=overflow),
            "fake": ModelSettings(source=script, backend="fake", isolation="thread"),
            "semantic": ModelSettings(source=script, backend="scripted", compressor=_semantic("embedder")),
            "late": ModelSettings(source=script, backend="scripted", compressor=_semantic("lazy")),
            "wrong": ModelSettings(source=script, backend="scripted", compressor=_semantic("m")),
            "embedder": ModelSettings(source="fake-pooler", backend="fake-pooler", isolation="thread"),
            "lazy": ModelSettings(source="fake-pooler", backend="fake-pooler", isolation="thread", load="lazy"),
            "foreign": ModelSettings(source=script, backend="scripted", compressor=_semantic("elsewhere")),
            "elsewhere": ModelSettings(source=embedder, backend="remote", options={"task": "embed"}),
        },
        limits=LimitsSettings(tokens_per_minute=10_000_000),
        plugins=PluginsSettings(allow=("compress", "remote")),
    )
    methods = {method.name: method for method in (Halving(), Failing(), Scoring(), SemanticCompressor())}
    registry = evolve(PluginRegistry.for_settings(settings), compressors=methods)
    with served(settings, registry, timeout=30) as http:
        yield http


def chat(client: httpx.Client, content: Any = TEXT, address: str = "/v1", **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return client.post(f"{address}/chat/completions", json=body, headers={"X-Enginehouse-Details": "true"})


def test_answer_tells_of_compression(client: httpx.Client) -> None:
    plain = chat(client).json()
    answer = chat(client, compression=HALF).json()

    assert plain["enginehouse"]["compression"] is None
    told = answer["enginehouse"]["compression"]
    assert told.pop("ms") > 0
    figures = {"tokens_before": 413, "tokens_after": 212, "scored_tokens": 0}
    assert told == {"method": "halving", **figures, "failed": None}
    assert plain["usage"]["prompt_tokens"] - answer["usage"]["prompt_tokens"] == 413 - 212


def test_tokens_that_a_scorer_reads_are_told_and_count(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: what a compressor has said of the same texts is remembered."""
    clock = SimpleNamespace(time=lambda: 1_700_000_040.0)  # else what is used fades meanwhile
    for module in ("limits.aio.storage.memory", "enginehouse.api.http.admission.gate"):
        monkeypatch.setattr(f"{module}.time", clock)

    def used() -> int:
        refused = client.post("/v1/completions", json={"prompt": 1})
        return 10_000_000 - int(refused.headers["x-ratelimit-remaining-tokens"])

    for is_known in (False, True):
        before = used()
        answer = chat(client, model="fake", max_tokens=3, compression={"method": "scoring"}).json()
        scored = answer["enginehouse"]["compression"]["scored_tokens"]
        assert scored == 0 if is_known else scored > 100
        assert used() - before == answer["usage"]["total_tokens"] + scored
    before, other = used(), [{"role": "user", "content": f"Other: {TEXT}"}]
    dry = client.post("/v1/compress", json={"model": "fake", "messages": other, "compression": {"method": "scoring"}})
    assert used() - before == dry.json()["compression"]["scored_tokens"] > 100


@pytest.mark.parametrize("stream", [False, True])
def test_header_of_the_profile_octomil(client: httpx.Client, stream: bool) -> None:
    octomil = "/compat/octomil/v1"
    header = "X-Octomil-Compression"

    assert chat(client, address=octomil, stream=stream, compression=HALF).headers[header] == "true"
    assert header not in chat(client, address=octomil, stream=stream).headers
    assert header not in chat(client, "What?", address=octomil, stream=stream, compression=HALF).headers
    assert header not in chat(client, stream=stream, compression=HALF).headers


def test_parts_and_messages_can_be_kept_whole(client: httpx.Client) -> None:
    parts = [
        {"type": "text", "text": "a" * 100, "compress": False},
        {"type": "text", "text": "b" * 100},
        {"type": "text", "text": "\nWhat is it?", "compress": True},
    ]
    tokens = chat(client, parts, compression=HALF).json()["enginehouse"]["compression"]
    assert (tokens["tokens_before"], tokens["tokens_after"]) == (214, 111 + (214 - 111) // 2)

    body = {"model": "m", "compression": HALF, "messages": [{"role": "user", "content": TEXT, "compress": False}]}
    answer = client.post("/v1/chat/completions", json=body, headers={"X-Enginehouse-Details": "true"})
    assert answer.status_code == 200
    assert "x-enginehouse-ignored" not in answer.headers
    assert answer.json()["enginehouse"]["compression"]["tokens_after"] == 0  # there was nothing to shorten


def test_failure_is_told_and_the_answer_comes(client: httpx.Client) -> None:
    answer = chat(client, compression={"method": "failing"})

    assert answer.status_code == 200
    assert "'failing'" in answer.json()["enginehouse"]["compression"]["failed"]
    deadline = time.monotonic() + 60
    while 'enginehouse_failed_compressions_total{compressor="failing",model="m"} ' not in client.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prompt_that_does_not_fit(client: httpx.Client) -> None:
    fits = chat(client, model="small")
    refused = chat(client, model="small", compression=False)

    assert fits.json()["enginehouse"]["compression"]["method"] == "halving"
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("method", ["halving", "scoring", "failing"])
def test_dry_run_shows_what_a_generation_would_get(client: httpx.Client, method: str) -> None:
    body = {"model": "fake", "messages": [{"role": "system", "content": "Go."}, {"role": "user", "content": TEXT}]}
    dry = client.post("/v1/compress", json={**body, "compression": {"method": method}})
    system, user = dry.json()["messages"]
    details = dry.json()["compression"]
    asked = {**body, "messages": [system, user], "max_tokens": 1}
    given = client.post("/v1/chat/completions", json={**body, "compression": {"method": method}, "max_tokens": 1})

    assert (dry.json()["object"], dry.json()["model"]) == ("compression", "fake")
    assert details["method"] == method and (details["failed"] is None) == (method != "failing")
    assert system == {"role": "system", "content": "Go.", "is_shortened": False}
    assert user["is_shortened"] == (method != "failing") == (len(user["content"]) < len(TEXT))
    assert user["content"].endswith("What is it?")
    whole = client.post("/v1/chat/completions", json=asked)
    assert given.json()["usage"]["prompt_tokens"] == whole.json()["usage"]["prompt_tokens"]


def test_dry_run_of_raw_prompts_settings_and_errors(client: httpx.Client) -> None:
    raw = client.post("/v1/compress", json={"model": "m", "prompt": TEXT, "compression": HALF}).json()
    none = client.post("/v1/compress", json={"model": "m", "prompt": TEXT}).json()
    unknown = client.post("/v1/compress", json={"model": "m", "prompt": TEXT, "compression": {"method": "no"}})

    assert raw["prompt"].endswith("What is it?") and len(raw["prompt"]) < len(TEXT)
    assert none["prompt"] == TEXT and none["compression"] is None
    assert unknown.status_code == 400 and unknown.json()["error"]["param"] == "compression.method"


@pytest.mark.parametrize("model", ["semantic", "foreign"])
def test_dry_run_explains_parts(client: httpx.Client, model: str) -> None:
    """Also with an embedder on another server, which cannot be asked to shorten texts."""
    lines = ["Rain fell on the hill.", "The ferry leaves at six.", "Painters like green.", "`ferry`: a boat."]
    text = "\n".join(lines) + "\n\nWhen does the ferry leave?"
    body = {"model": model, "messages": [{"role": "system", "content": "Go."}, {"role": "user", "content": text}]}
    told = client.post("/v1/compress", json={**body, "compression": {"ratio": 0.4}}).json()
    (explained,) = told["texts"]
    parts = explained["parts"]
    left = "".join(text[start:end] for start, end in explained["kept"])

    assert explained["message"] == 1
    assert left == told["messages"][1]["content"]
    assert [text[part["start"] : part["end"]] for part in parts] == [*lines, "When does the ferry leave?"]
    assert [part["kept"] for part in parts] == [text[part["start"] : part["end"]] in left for part in parts]
    assert [part["reason"] for part in parts][-1] == "protected"
    scores = [part["score"] for part in parts[:-1]]
    assert lines[scores.index(max(scores))] in left
    at_least = 20 if model == "semantic" else 4  # a server of another kind may count a text as one token
    assert told["compression"]["scored_tokens"] > at_least
    assert told["compression"]["failed"] is None


def test_dry_run_of_a_prompt_that_does_not_fit(client: httpx.Client) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": TEXT}]}
    fits = client.post("/v1/compress", json=body).json()
    refused = client.post("/v1/compress", json={**body, "compression": False})

    assert fits["messages"][0]["is_shortened"]
    assert fits["texts"][0]["kept"][-1] == [402, len(TEXT)]
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("model", "problem"),
    [("late", "the embedder is not loaded"), ("wrong", "the embedder is a model for another task")],
)
def test_embedder_that_cannot_be_used_is_told(client: httpx.Client, model: str, problem: str) -> None:
    answer = chat(client, model=model, compression=True)

    assert answer.status_code == 200
    assert answer.json()["enginehouse"]["compression"]["failed"] == problem


def test_method_that_needs_an_embedder_is_refused_without_one(client: httpx.Client) -> None:
    answer = chat(client, compression={"method": "semantic"})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "compression.method"
    assert "embedder" in answer.json()["error"]["message"]


def test_log_and_metrics_count_tokens(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "enginehouse.access"):
        answer = chat(client, compression=HALF).json()
        deadline = time.monotonic() + 60
        while not (records := [r for r in caplog.records if answer["id"] in r.getMessage()]):
            assert time.monotonic() < deadline  # the line is written behind the response, perhaps behind older ones
            time.sleep(0.01)
    after = answer["usage"]["prompt_tokens"]

    (record,) = records
    assert record.access["compressed_tokens_before"] == after + 201  # type: ignore[attr-defined]
    assert record.access["compressed_tokens_after"] == after  # type: ignore[attr-defined]
    assert 'enginehouse_compressed_tokens_before_total{compressor="halving",model=' in client.get("/metrics").text


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("yes", "compression"),
        (1, "compression"),
        ([], "compression"),
        ({"method": 1}, "compression.method"),
        ({"method": "halving", "ratio": 0}, "compression.ratio"),
        ({"method": "halving", "ratio": 1.5}, "compression.ratio"),
        ({"method": "halving", "ratio": "0.5"}, "compression.ratio"),
        ({"method": "other"}, "compression.method"),
        (True, "compression.method"),
    ],
)
def test_wrong_values_are_refused(client: httpx.Client, value: Any, param: str) -> None:
    answer = chat(client, compression=value)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_mark_must_be_true_or_false(client: httpx.Client) -> None:
    answer = chat(client, [{"type": "text", "text": "a", "compress": "no"}])

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].compress"


def test_unknown_members_are_listed(client: httpx.Client) -> None:
    answer = chat(client, compression={**HALF, "strength": 2})

    assert answer.headers["x-enginehouse-ignored"] == "compression.strength"


def test_completions_are_shortened_and_not_repeated(client: httpx.Client) -> None:
    body = {"model": "m", "prompt": TEXT, "compression": HALF, "max_tokens": 2}
    answer = client.post("/v1/completions", json=body)
    repeated = client.post("/v1/completions", json={**body, "echo": True})

    assert answer.json()["usage"]["prompt_tokens"] == 212
    assert (repeated.status_code, repeated.json()["error"]["param"]) == (400, "echo")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('compressor = "lossless"', CompressorSettings(method="lossless")),
        (
            'compressor = { method = "lossless", when = "overflow", system = true, scorer = "m" }',
            CompressorSettings(method="lossless", when="overflow", system=True, scorer="m"),
        ),
        (
            'compressor = { method = "scored", ratio = 0.3, min_tokens = 9 }',
            CompressorSettings(method="scored", ratio=0.3, min_tokens=9),
        ),
    ],
)
def test_settings_are_a_name_or_a_table(tmp_path: Path, text: str, expected: CompressorSettings) -> None:
    assert read(tmp_path, text) == {"m": expected}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("compressor = 1", "models.m.compressor"),
        ("compressor = { ratio = 0.5 }", "models.m.compressor"),
        ('compressor = { method = "scored", ratio = 0 }', "models.m.compressor.ratio"),
        ('compressor = { method = "lossless", ratio = 0.5 }', "models.m.compressor.ratio"),
        ('compressor = { method = "scored", when = "never" }', "models.m.compressor.when"),
        ('compressor = { method = "scored", raito = 0.5 }', "models.m.compressor.raito"),
        ('compressor = { method = "scored", scorer = "x" }', "models.m.compressor.scorer"),
        ('compressor = { method = "skored" }', "models.m.compressor"),
        ('compressor = { method = "semantic", embedder = "x" }', "models.m.compressor.embedder"),
        ('compressor = { method = "semantic" }', "models.m.compressor.embedder"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, text: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert caught.value.path == path


def test_setting_without_the_plugin_is_refused_at_start(tmp_path: Path) -> None:
    model = ModelSettings(source=write_script(tmp_path / "s.json", ["a"]), backend="scripted", compressor="lossless")
    settings = Settings(models={"m": model}, plugins=PluginsSettings(allow=()))

    with pytest.raises(ConfigError, match="the plugin 'compress' is not loaded"), served(settings):
        pass


def read(folder: Path, text: str) -> dict[str, CompressorSettings]:
    """Read one model's settings from a file, as the plugin does at start."""
    file = folder / "enginehouse.toml"
    file.write_text(f'[models.m]\nsource = "x"\n{text}\n')
    models = {name: model.compressor for name, model in load_settings(file, {}).models.items()}
    methods = (LosslessCompressor(), ScoredCompressor(CompressOptions()), SemanticCompressor())
    return read_settings(models, {method.name: method for method in methods})
