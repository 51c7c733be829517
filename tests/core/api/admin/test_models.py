"""`/admin/models` over HTTP: what is shown, orders, conflicts, scopes, and what other addresses say meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .conftest import PLAIN, Operated

Operate = Callable[..., Operated]
FAKE = "org/fake:tag"


def error_of(response: httpx.Response) -> dict[str, Any]:
    return response.json()["error"]


def test_models_are_listed_before_and_after_they_are_loaded(operate: Operate) -> None:
    server = operate()
    before = server.models()[FAKE]
    shown = server.client.get(f"/v1/models/{FAKE}").json()
    answer = server.ask(FAKE)
    after = server.models()[FAKE]

    assert (before["state"], before["memory"], before["load"]) == ("unloaded", None, "lazy")
    assert (before["backend"], before["backend_reason"]) == ("fake", "named in the settings")
    assert (shown["state"], shown["max_context"], shown["parameters"]) == ("unloaded", None, None)
    assert answer.status_code == 200, answer.text
    assert (after["state"], after["num_running"]) == ("ready", 0)
    assert after["memory"] == {"device": "cpu", "bytes": 200 * 4096 * 8}
    assert after["idle_s"] >= 0
    assert server.client.get(f"/v1/models/{FAKE}").json()["parameters"]["temperature"]["value"] == 1


def test_memory_is_shown_by_device(operate: Operate) -> None:
    server = operate()
    server.order(FAKE, "load")
    memory = server.client.get("/admin/models").json()["memory"]

    assert memory == {"cpu": {"budget_bytes": 20_000_000, "held_bytes": 200 * 4096 * 8}}


def test_model_is_loaded_and_unloaded_by_name_and_alias(operate: Operate) -> None:
    server = operate()
    assert server.order(FAKE, "load").json()["state"] == "ready"
    assert server.order("gpt-plain", "unload").json()["id"] == "plain"
    assert server.models()["plain"]["state"] == "unloaded"
    assert server.client.get("/health").json()["status"] == "ok"
    assert (
        server.client.post(f"/admin/models/{FAKE}/unload", headers={"content-type": "application/json"}).json()["state"]
        == "unloaded"
    )
    answer = server.client.get(f"/admin/models/{FAKE}").json()
    assert (answer["state"], answer["idle_s"]) == ("unloaded", None)
    assert server.ask("gpt-plain").status_code == 200
    assert server.models()["plain"]["state"] == "ready"


def test_busy_model_conflicts_until_its_requests_are_drained_or_ended(operate: Operate) -> None:
    server = operate()
    body = {"model": "endless", "prompt": "x", "stream": True}
    lines: list[str] = []
    began = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) > 4:
                    began.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert began.wait(60)
    assert server.models()["endless"]["num_running"] == 1
    refused = server.order("endless", "unload")
    still = server.order("endless", "unload", drain=True, drain_s=0.05)
    ended = server.order("endless", "unload", force=True)
    reader.join(60)

    assert (refused.status_code, error_of(refused)["code"]) == (409, "conflict")
    assert "use drain to let them finish, or force to end them" in error_of(refused)["message"]
    assert (still.status_code, ended.status_code) == (409, 200)
    assert ended.json()["state"] == "unloaded"
    last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "model_unloaded"


def test_conflict_has_the_name_of_the_profile(operate: Operate) -> None:
    server = operate(
        PLAIN.replace('backend = "fake"', 'backend = "fake"\npin = true') + '\n[server]\nprofile = "octomil"\n'
    )
    server.order(FAKE, "load")
    refused = server.order(FAKE, "unload")

    assert (refused.status_code, error_of(refused)["code"]) == (409, "conflict")
    assert "is pinned" in error_of(refused)["message"]


def test_model_that_does_not_fit_is_refused_and_says_why(operate: Operate) -> None:
    server = operate(PLAIN.replace('"20MB"', '"6MB"'))
    for response in (server.ask(FAKE), server.order(FAKE, "load")):
        assert response.status_code == 507
        assert error_of(response)["code"] == "model_too_large"
        assert "needs 6.2 MiB of memory (cpu); the budget is 5.7 MiB" in error_of(response)["message"]
    assert "needs 6.2 MiB" in server.models()[FAKE]["error"]
    assert server.ask("plain").status_code == 200


def test_busy_models_in_the_way_are_told_with_a_time_to_come_back(operate: Operate) -> None:
    text = (
        PLAIN.replace('"20MB"', '"7MB"').replace("drain_s = 5", "drain_s = 0.05")
        + """
[models.second]
source = "fake"
backend = "fake"
isolation = "thread"
load = "lazy"
step_delay_s = 0.05
"""
    )
    server = operate(text)
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"model": "second", "prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 500},
        timeout=30,
    ) as stream:
        chunks = stream.iter_raw()
        next(chunks)
        refused = server.ask(FAKE)

    assert refused.status_code == 503
    assert error_of(refused)["code"] == "insufficient_memory"
    assert "'second' holds 6.2 MiB; 'second' was busy for 0.05 s" in error_of(refused)["message"]
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"now": True}, "now"),
        ({"drain": "yes"}, "drain"),
        ({"drain_s": -1}, "drain_s"),
        ({"force": 1}, "force"),
    ],
)
def test_wrong_fields_are_named(operate: Operate, body: dict, param: str) -> None:
    server = operate()
    refused = server.client.post("/admin/models/plain/unload", json=body)

    assert (refused.status_code, error_of(refused)["param"]) == (400, param)
    assert server.models()["plain"]["state"] == "ready"
    refused = server.client.post("/admin/models/plain/load", json={"force": True})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "force")


def test_unknown_models_and_orders_are_not_found(operate: Operate) -> None:
    server = operate()
    for method, path, code in (
        ("POST", "/admin/models/nobody/load", "model_not_found"),
        ("POST", "/admin/models/nobody/unload", "model_not_found"),
        ("GET", "/admin/models/nobody", "model_not_found"),
        ("POST", "/admin/models/plain/explode", "not_found"),
        ("POST", "/admin/models/load", "not_found"),
    ):
        refused = server.client.request(method, path, json={} if method == "POST" else None)
        assert (refused.status_code, error_of(refused)["code"]) == (404, code), path


def test_admin_addresses_need_the_scope_admin(operate: Operate) -> None:
    server = operate(PLAIN + '\n[auth]\nkeys = ["plain-key", {name = "boss", key = "boss-key", scopes = ["admin"]}]\n')
    plain, boss = ({"authorization": f"Bearer {key}"} for key in ("plain-key", "boss-key"))
    for method, path in (
        ("GET", "/admin/models"),
        ("GET", "/admin/models/plain"),
        ("GET", "/admin/events"),
        ("POST", "/admin/models/plain/load"),
        ("POST", "/admin/reload"),
    ):
        body = {} if method == "POST" else None
        assert server.client.request(method, path, headers=plain, json=body).status_code == 403, path
        assert server.client.request(method, path, json=body).status_code == 401, path
        if path != "/admin/events":
            assert server.client.request(method, path, headers=boss, json=body).status_code == 200, path


def test_server_is_healthy_while_a_request_loads_a_model(operate: Operate) -> None:
    server = operate(PLAIN.replace('load = "lazy"', 'load = "lazy"\nopen_delay_s = 1.5'))
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(server.ask(FAKE)))
    asking.start()
    seen = set()
    while asking.is_alive():
        health = server.client.get("/health")
        seen.add((health.json()["models"][FAKE]["state"], health.status_code))
    asking.join()

    assert {("loading", 200)} <= seen <= {("unloaded", 200), ("loading", 200), ("ready", 200)}
    assert answers[0].status_code == 200, answers[0].text


def test_events_stream_what_happens_to_models(operate: Operate) -> None:
    server = operate()
    events = []
    with httpx.stream("GET", f"{server.url}/admin/events", timeout=30) as stream:
        lines = stream.iter_lines()
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert next(lines) == ": ping"
        server.order(FAKE, "load")
        server.order(FAKE, "unload")
        for line in lines:
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if events[-1]["kind"] == "unloaded":
                    break

    kinds = [event["kind"] for event in events]
    assert kinds[0] == "loading"
    assert kinds[-2:] == ["ready", "unloaded"]
    assert {(event["model"], event["instance"]) for event in events} == {(FAKE, server.models()[FAKE]["instance"])}
    assert "imagining weights" in {event["text"] for event in events}
    assert all(event["at"] > 1e9 and 0 <= event["progress"] <= 1 for event in events)


def test_order_that_takes_long_is_told_of_the_end_of_the_server(operate: Operate, caplog) -> None:
    """Operations wait for what they have started; who asked for one hears that it will not be done."""
    slow = "[models.slow]\nsource = 'fake'\nbackend = 'fake'\nload = 'lazy'\nopen_delay_s = 60\n"
    server = operate(f"{PLAIN}{slow}[server]\nshutdown_s = 1.0\n")
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(httpx.post, f"{server.url}/admin/models/slow/load", json={}, timeout=30)
        while server.models()["slow"]["state"] != "loading":
            pass
        server.stop()
        answer = asked.result(30)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_stopping")
    assert not [record for record in caplog.records if record.exc_info]


def test_events_do_not_hold_up_the_end_of_the_server(operate: Operate) -> None:
    server = operate()
    ended = threading.Event()

    def listen() -> None:
        with httpx.stream("GET", f"{server.url}/admin/events", timeout=30) as stream:
            for _ in stream.iter_lines():
                started.set()
        ended.set()

    started = threading.Event()
    thread = threading.Thread(target=listen)
    thread.start()
    assert started.wait(60)
    server.stop()
    thread.join(60)

    assert ended.is_set(), "the stream has a proper end"
