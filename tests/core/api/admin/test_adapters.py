"""Adapters over HTTP: their names in requests, lists and metrics, and adding and removing them while others run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from enginehouse_testkit.fake_adapters import write_fake_adapter
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.waiting import wait_until

from .conftest import Operated

Operate = Callable[..., Operated]
Serve = Callable[..., Operated]

CONFIG = """
[plugins]
allow = ["samplers", "llama_server", "router"]

[models.plain]
source = "plain.json"
backend = "scripted"

[models.x]
source = "fake"
backend = "fake"
isolation = "{isolation}"
adapters = {{sql = {{source = "sql.json"}}, tone = {{source = "tone.json", scale = 0.5}}}}
adapter_folders = ["more"]
max_adapters = 3
aliases = ["alias"]
mixing = "{mixing}"
"""


@pytest.fixture
def serve(operate: Operate, tmp_path: Path) -> Serve:
    (tmp_path / "more").mkdir()
    for place, name in enumerate(("sql.json", "tone.json", "more/new.json", "outside.json")):
        write_fake_adapter(tmp_path / name, place + 1)
    (tmp_path / "more" / "broken.json").write_text("{", encoding="utf-8")
    (tmp_path / "more" / "link.json").symlink_to(tmp_path / "outside.json")

    def start(mixing: str = "mixed", isolation: str = "thread", more: str = "") -> Operated:
        server = operate(CONFIG.format(mixing=mixing, isolation=isolation) + more)
        wait_ready(server.client)
        return server

    return start


def text_of(server: Operated, model: str = "x", **fields: Any) -> str:
    answer = server.ask(model, max_tokens=12, temperature=0, **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


@pytest.mark.parametrize("mixing", ["per_pass", "mixed"])
def test_every_spelling_means_the_same_adapter(serve: Serve, mixing: str) -> None:
    """The scale of the settings applies where a request gives none; 0 is the base model."""
    server = serve(mixing)
    base, sql, tone = (text_of(server, name) for name in ("x", "x:sql", "x:tone"))

    assert len({base, sql, tone}) == 3
    for fields in (
        {"adapters": "sql"},
        {"adapters": ["sql"]},
        {"adapters": {"sql": 1}},
        {"peft": "sql"},
        {"peft": {"sql": 1.0}},
        {"lora": [{"id": 0, "scale": 1.0}]},
        {"lora": [{"id": 0}]},
    ):
        assert text_of(server, **fields) == text_of(server, "alias", **fields) == sql, fields
    assert text_of(server, "alias:sql") == sql
    for fields in ({"adapters": {"sql": 0}}, {"lora": [{"id": 0, "scale": 0}]}, {"adapters": []}, {"peft": {}}):
        assert text_of(server, **fields) == base, fields
    for fields in ({"adapters": {"tone": 0.5}}, {"adapters": {"tone": None}}, {"lora": [{"id": 1, "scale": None}]}):
        assert text_of(server, **fields) == text_of(server, adapters="tone") == tone
    assert text_of(server, adapters={"tone": 1.0}) not in (tone, base)
    both = text_of(server, adapters={"sql": 0.7, "tone": 0.3})
    assert both not in (base, sql, tone) and both == text_of(
        server, lora=[{"id": 0, "scale": 0.7}, {"id": 1, "scale": 0.3}]
    )


def test_unknown_adapters_are_not_found_and_the_base_never_answers(serve: Serve) -> None:
    server = serve()
    for model, fields, param in (
        ("x:other", {}, "model"),
        ("x", {"adapters": "other"}, "adapters"),
        ("x", {"peft": "other"}, "peft"),
        ("x", {"lora": [{"id": 2}]}, "lora"),
    ):
        error = error_of(server.ask(model, **fields), 404)
        assert (error["code"], error["param"]) == ("adapter_not_found", param)
        assert "sql, tone" in error["message"]
    assert error_of(server.ask("y:sql"), 404)["code"] == "model_not_found"
    assert error_of(server.ask("plain:sql"), 404)["code"] == "model_not_found"


def test_wrong_values_are_refused_by_name(serve: Serve) -> None:
    server = serve()
    for fields, param in (
        ({"adapters": 3}, "adapters"),
        ({"adapters": {"sql": "1"}}, "adapters.sql"),
        ({"peft": ["sql"]}, "peft"),
        ({"peft": []}, "peft"),
        ({"lora": {}}, "lora"),
        ({"peft": {"sql": True}}, "peft.sql"),
        ({"lora": [{"scale": 1}]}, "lora[0]"),
        ({"lora": [{"id": 0, "scale": 1e9}]}, "lora[0].scale"),
        ({"adapters": ["sql", "sql"]}, "adapters"),
        ({"adapters": "sql", "peft": "sql"}, "peft"),
        ({"model": "x:sql", "adapters": "tone"}, "adapters"),
    ):
        assert error_of(server.ask("x", **fields) if "model" not in fields else server.ask(**fields), 400)["param"] == (
            param
        ), fields
    asked = server.ask("x", max_tokens=1, lora=[{"id": 0, "name": "tone"}])
    assert (asked.status_code, asked.headers["x-enginehouse-ignored"]) == (200, "lora[0].name")
    refused = error_of(server.ask("plain", peft="sql"), 400)
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "peft")


def test_lists_metrics_and_fingerprints_know_adapters(serve: Serve) -> None:
    server = serve()
    models = {model["id"]: model for model in server.client.get("/v1/models").json()["data"]}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    stamps = {
        name: server.client.post("/v1/chat/completions", json={"model": name, **chat}).json()["system_fingerprint"]
        for name in ("x", "x:sql", "x:tone")
    }
    expected = (
        'enginehouse_adapter_requests_total{adapter="sql",model="x"} 1.0',
        'enginehouse_loaded_adapters{model="x"} 2.0',  # reported by the worker after its answers
    )

    assert {name: model["parent"] for name, model in models.items()} == {
        "plain": None,
        "x": None,
        "x:sql": "x",
        "x:tone": "x",
    }
    assert server.client.get("/v1/models/x:sql").json()["parent"] == "x"
    assert len(set(stamps.values())) == 3 and all(stamp.startswith(stamps["x"]) for stamp in stamps.values())
    wait_until(lambda: all(line in server.client.get("/metrics").text for line in expected), expected)


def test_adapters_are_added_and_removed(serve: Serve, tmp_path: Path) -> None:
    """Only from the folders of the settings; a removed one is not found, and may be added again."""
    server = serve()
    base, outside = text_of(server), {"name": "o", "source": "../outside.json"}
    for source in ("../outside.json", "link.json", "missing", "/etc/passwd", "", "."):
        error = error_of(server.order("x", "adapters", name="o", source=source), 400)
        assert (error["code"], error["param"]) == ("adapter_refused", "source"), outside
    os.mkfifo(tmp_path / "more" / "pipe")
    for source, says in (("broken.json", "broken.json"), ("pipe", "'pipe' cannot be read: it is not a regular file")):
        error = error_of(server.order("x", "adapters", name="o", source=source), 400)
        assert error["param"] == "source" and says in error["message"]
    assert error_of(server.order("x", "adapters", name="a:b", source="new.json"), 400)["param"] == "name"
    assert error_of(server.order("x", "adapters", name="sql", source="new.json"), 409)["code"] == "conflict"
    assert error_of(server.order("plain", "adapters", name="sql", source="new.json"), 400)["param"] == "source"

    added = server.order("x", "adapters", name="new", source="new.json", scale=2)
    assert added.status_code == 200, added.text
    assert [(one["id"], one["name"], one["origin"]) for one in added.json()["data"]] == [
        (0, "sql", "settings"),
        (1, "tone", "settings"),
        (2, "new", "request"),
    ]
    new = text_of(server, "x:new")
    assert new != base and new == text_of(server, adapters={"new": 2})
    assert server.client.get("/admin/models/x/adapters").json() == added.json()
    removed = server.client.delete("/admin/models/x/adapters/sql")
    assert [one["name"] for one in removed.json()["data"]] == ["tone", "new"]
    assert error_of(server.ask("x:sql"), 404)["code"] == "adapter_not_found"
    assert error_of(server.client.delete("/admin/models/x/adapters/sql"), 404)["code"] == "adapter_not_found"
    assert [one["id"] for one in server.client.get("/lora-adapters", params={"model": "x"}).json()] == [1, 2]
    assert text_of(server, lora=[{"id": 2}]) == new
    assert error_of(server.ask("x", lora=[{"id": 0}]), 404)["code"] == "adapter_not_found"


def test_vllms_addresses(serve: Serve) -> None:
    server = serve()
    asked = {"lora_name": "new", "lora_path": "new.json", "base_model_name": "x"}
    loaded = server.client.post("/v1/load_lora_adapter", json=asked)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert text_of(server, "x:new") != text_of(server)
    unloaded = server.client.post("/v1/unload_lora_adapter", json={"lora_name": "new", "base_model_name": "x"})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert error_of(server.ask("x:new"), 404)["code"] == "adapter_not_found"


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"base_model_name": "y"}, 404, "base_model_name"),
        ({"base_model_name": "plain"}, 400, "lora_path"),
        ({"lora_name": "a:b"}, 400, "lora_name"),
        ({"lora_path": "missing"}, 400, "lora_path"),
        ({"load_inplace": True}, 400, "load_inplace"),
        ({"scale": 0.5}, 400, "scale"),
    ],
)
def test_refusals_of_vllms_addresses_name_their_fields(
    serve: Serve, changes: dict[str, Any], status: int, param: str
) -> None:
    asked = {"lora_name": "new", "lora_path": "new.json", "base_model_name": "x", "load_inplace": False, **changes}
    error = error_of(serve().client.post("/v1/load_lora_adapter", json=asked), status)

    assert error["param"] == param and "source" not in error["message"]


def test_requests_for_auto_go_to_a_model_that_has_the_adapter(serve: Serve, tmp_path: Path) -> None:
    """Others are refused as candidates; without any, the adapter is not found."""
    server = serve(
        more="""
[models.bare]
source = "fake"
backend = "fake"
mixing = "mixed"

[router]
strategy = "load"
models = ["bare", "x"]
"""
    )
    body = {"model": "auto", "adapters": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    routed = server.client.post("/v1/route", json=body).json()
    answer = server.client.post("/v1/chat/completions", json=body)
    unknown = {**body, "adapters": "other"}

    assert routed["model"] == "x" and routed["attempts"] == ["x"]
    assert "has no adapter 'sql'" in next(one["refused"] for one in routed["candidates"] if one["model"] == "bare")
    assert (answer.status_code, answer.json()["model"]) == (200, "x")
    for address in ("/v1/route", "/v1/chat/completions"):
        assert error_of(server.client.post(address, json=unknown), 404)["param"] == "adapters"


def test_adapter_removed_under_load_serves_its_requests_to_the_end(serve: Serve) -> None:
    """Streams that use it give the same text as before; later requests do not find it."""
    server = serve(more="step_delay_s = 0.01\n")
    body = {"model": "x:sql", "prompt": "x", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    expected = server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with contextlib.ExitStack() as opened:
        streams = []
        for number in range(4):
            asked = {**body, "stream": True, "cache_salt": str(number)}
            streams.append(opened.enter_context(server.client.stream("POST", "/v1/completions", json=asked)))
        assert server.client.delete("/admin/models/x/adapters/sql").status_code == 200
        assert error_of(server.ask("x:sql"), 404)["code"] == "adapter_not_found"
        events = [[line[6:] for line in stream.iter_lines() if line.startswith("data: {")] for stream in streams]
    texts = ["".join(json.loads(event)["choices"][0]["text"] for event in one) for one in events]

    assert texts == [expected] * 4


def test_answer_with_an_adapter_continues_when_its_worker_dies(serve: Serve, tmp_path: Path) -> None:
    """The next worker has the adapter, and continues the same text."""
    faults = f'faults = {{abort_at_step = 12, latch = "{tmp_path / "latch"}"}}\n'
    server = serve(isolation="process", more=faults)
    with_fault = text_of(server, "x:sql")

    assert (tmp_path / "latch").exists()
    assert server.models()["x"]["num_restarts"] == 1
    assert with_fault == text_of(server, "x:sql", cache_prompt=False)


def test_keys_may_be_limited_to_an_adapter(serve: Serve) -> None:
    auth = '[auth]\nkeys = [{name = "sql", key = "sql", models = ["x:sql"]}, {name = "x", key = "x", models = ["x"]}]\n'
    server = serve(more=auth)

    def ask(key: str, model: str, **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": model, "prompt": "x", "max_tokens": 1, **fields}
        return server.client.post("/v1/completions", json=body, headers=headers)

    assert [ask("sql", name).status_code for name in ("x:sql", "x:tone", "x")] == [200, 404, 404]
    assert ask("sql", "x", adapters="sql").status_code == 404
    assert [ask("x", name).status_code for name in ("x:sql", "x:tone", "x")] == [200, 200, 200]
    listed = server.client.get("/v1/models", headers={"authorization": "Bearer sql"}).json()["data"]
    assert [model["id"] for model in listed] == ["x:sql"]
    for address in ("/props", "/lora-adapters"):
        shown = server.client.get(address, params={"model": "x:sql"}, headers={"authorization": "Bearer sql"})
        assert shown.status_code == 200, shown.text
    body = {"lora_name": "new", "lora_path": "new.json"}
    refused = server.client.post("/v1/load_lora_adapter", json=body, headers={"authorization": "Bearer x"})
    assert refused.status_code == 403


def test_octoais_example_with_peft_by_the_openai_sdk(serve: Serve) -> None:
    """The page's chat, streamed, with its ``peft``; once more with the adapter as model."""
    server = serve()
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "Why is the sky blue?"}]

    def ask(model: str, **extra: Any) -> str:
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=16, temperature=0, stream=True, extra_body=extra
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    assert ask("x", peft="sql") == ask("x:sql") != ask("x")


def test_settings_with_a_damaged_adapter_name_it(serve: Serve, tmp_path: Path) -> None:
    """The model fails, and says which setting is wrong."""
    (tmp_path / "sql.json").write_text("{}", encoding="utf-8")
    server = serve()
    wait_until(lambda: server.models()["x"]["state"] == "failed", "a model that has failed")

    assert "models.x.adapters.sql: " in server.models()["x"]["error"]
    assert "sql.json" in server.models()["x"]["error"]


def test_prompts_are_cached_for_each_adapter_separately(serve: Serve) -> None:
    """``/tokenize`` reports what the named adapters have cached; the base and other adapters have nothing."""
    server = serve()
    prompt = "one prompt that is long enough to be kept in the prefix cache " * 4

    def cached(**fields: Any) -> int:
        body = {"model": "x", "prompt": prompt, "details": True, **fields}
        answer = server.client.post("/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["details"]["cached_tokens"])

    assert server.ask("x:sql", prompt=prompt, max_tokens=1).status_code == 200
    assert cached(model="x:sql") == cached(adapters="sql") == cached(lora=[{"id": 0}]) > 0
    assert cached() == cached(peft="tone") == cached(adapters={"sql": 0.5}) == 0
    unknown = {"model": "x:other", "prompt": prompt, "details": True}
    assert error_of(server.client.post("/tokenize", json=unknown), 404)["code"] == "adapter_not_found"


def test_llama_servers_list_has_ids_names_and_scales(serve: Serve) -> None:
    server = serve()
    listed = server.client.get("/lora-adapters", params={"model": "x"})
    assert listed.json() == [{"id": 0, "path": "sql", "scale": 1.0}, {"id": 1, "path": "tone", "scale": 0.5}]
    assert server.client.get("/lora-adapters").json() == []
    assert error_of(server.client.get("/lora-adapters", params={"model": "y"}), 404)["code"] == 404
