"""Stored responses over HTTP: retrieved, continued, deleted, resumed, cancelled; each key has its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.served import served
from enginehouse_testkit.waiting import wait_until

from .harness import WEATHER, Client, check_response, read_events


@pytest.fixture(scope="module")
def storing(models: dict[str, ModelSettings]) -> Iterator[Client]:
    plugins = PluginsSettings(allow=("parsers", "responses"), options={"responses": {"store": True}})
    models = {**models, "counted": models["slow"]}  # only one test uses it
    with served(Settings(models=models, plugins=plugins)) as http:
        yield Client(http)


def _get(client: Client, response_id: str, **query: Any) -> dict[str, Any]:
    answer = client.http.get(f"/v1/responses/{response_id}", params=query)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    check_response(response)
    return response


def _resumed(client: Client, response_id: str, after: int | None) -> list[dict[str, Any]]:
    query = {"stream": "true", **({} if after is None else {"starting_after": after})}
    with client.http.stream("GET", f"/v1/responses/{response_id}", params=query) as answer:
        assert answer.status_code == 200, answer.read()
        events, is_done = read_events(answer.iter_lines())
    assert is_done
    return events


def _broken_off(client: Client, model: str, num_events: int, **fields: Any) -> list[dict[str, Any]]:
    """The first events of a stream whose client leaves after them."""
    body = {"model": model, "input": "hi", "stream": True, **fields}
    lines: list[str] = []
    with client.http.stream("POST", "/v1/responses", json=body) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if sum(one.startswith("data:") for one in lines) == num_events:
                break
    return read_events(lines)[0]


def test_a_response_is_retrieved_as_it_was(storing: Client) -> None:
    for response in (storing.create("calls", tools=[WEATHER]), storing.stream("think").last):
        assert response["store"] is True
        assert _get(storing, response["id"]) == response


def test_what_is_not_stored_is_not_found(storing: Client) -> None:
    response = storing.create("say", store=False)

    assert response["store"] is False
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = storing.http.request(method, f"/v1/responses/{response['id']}{path}")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_chain_has_all_that_came_before(storing: Client, is_streamed: bool) -> None:
    """The prompt grows by each turn; its length, in bytes, is in the usage."""
    lengths, previous = [], None
    for text in ("one", "two", "three"):
        fields = {"previous_response_id": previous} if previous else {}
        response = storing.stream("say", text, **fields).last if is_streamed else storing.create("say", text, **fields)
        previous = response["id"]
        lengths.append(response["usage"]["input_tokens"])
    whole = [{"role": "user", "content": "one"}]
    for text in ("two", "three"):
        whole += [{"role": "assistant", "content": "Hello world!"}, {"role": "user", "content": text}]
    expected = storing.create("say", whole)["usage"]["input_tokens"]

    assert lengths[-1] == expected and lengths[0] < lengths[1] < lengths[2]


def test_instructions_are_not_inherited(storing: Client) -> None:
    first = storing.create("say", "one", instructions="Be very, very brief.")
    second = storing.create("say", "two", previous_response_id=first["id"])
    third = storing.create("say", "two", previous_response_id=storing.create("say", "one")["id"])

    assert second["instructions"] is None and second["usage"] == third["usage"]


def test_a_deleted_response_is_gone_and_later_ones_stay(storing: Client) -> None:
    first = storing.create("say", "one")
    second = storing.create("say", "two", previous_response_id=first["id"])
    deleted = storing.http.delete(f"/v1/responses/{first['id']}")

    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert storing.http.get(f"/v1/responses/{first['id']}").status_code == 404
    error = storing.refused("say", previous_response_id=first["id"])
    assert error["param"] == "previous_response_id"
    storing.create("say", "three", previous_response_id=second["id"])


def test_input_items_have_ids_and_pages(storing: Client) -> None:
    items = [{"role": "user", "content": f"m{number}"} for number in range(5)]
    path = f"/v1/responses/{storing.create('say', items)['id']}/input_items"
    page = storing.http.get(path, params={"order": "asc", "limit": 2}).json()
    rest = storing.http.get(path, params={"order": "asc", "after": page["last_id"]}).json()
    newest = storing.http.get(path, params={"limit": 1}).json()

    assert [item["content"][0]["text"] for item in page["data"]] == ["m0", "m1"] and page["has_more"]
    assert [item["content"][0]["text"] for item in rest["data"]] == ["m2", "m3", "m4"] and not rest["has_more"]
    assert newest["data"] == rest["data"][-1:] and page["first_id"] == page["data"][0]["id"]
    for query in ({"limit": "0"}, {"limit": "101"}, {"order": "up"}, {"after": "msg_none"}):
        assert storing.http.get(path, params=query).status_code == 400


def test_references_stand_for_stored_items(storing: Client) -> None:
    """The AI SDK sends these instead of what it got."""
    first = storing.create("calls", "one", tools=[WEATHER])
    output = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"} for item in first["output"][1:]
    ]
    asked = [{"role": "user", "content": "one"}]
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    referring = storing.create("say", [*asked, *references, *output])

    assert referring["usage"] == storing.create("say", [*asked, *first["output"], *output])["usage"]
    listed = storing.http.get(f"/v1/responses/{referring['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert listed[1:4] == first["output"]
    error = storing.refused("say", [*asked, {"type": "item_reference", "id": "msg_none"}])
    assert error["param"] == "input[1].id"


# -- streams that are taken up again -----------------------------------------------------------------


def test_a_stream_is_taken_up_after_any_event(storing: Client) -> None:
    stream = storing.stream("think-call", tools=[WEATHER])

    assert _resumed(storing, stream.last["id"], None) == stream.events
    for number in range(len(stream.events)):
        assert _resumed(storing, stream.last["id"], number) == stream.events[number + 1 :]


def test_a_generation_goes_on_without_its_client(storing: Client) -> None:
    """Broken off early, taken up while it goes on: together the undisturbed stream, but for ids."""
    first = _broken_off(storing, "slow", 12)
    response_id = first[0]["response"]["id"]
    assert _get(storing, response_id)["status"] == "in_progress"
    rest = _resumed(storing, response_id, first[-1]["sequence_number"])

    assert [event["sequence_number"] for event in [*first, *rest]] == list(range(len(first) + len(rest)))
    whole = storing.create("slow")["output"][0]["content"][0]["text"]
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == whole
    assert _get(storing, response_id) == rest[-1]["response"]


def test_metrics_count_a_generation_without_its_client(storing: Client) -> None:
    def num_tokens() -> float:
        lines = storing.http.get("/metrics").text.splitlines()
        name = 'enginehouse_completion_tokens_total{model="counted"}'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    first = _broken_off(storing, "counted", 5)
    _resumed(storing, first[0]["response"]["id"], None)

    wait_until(lambda: num_tokens() == 100, lambda: f"100 tokens, not {num_tokens()}")


def _wait_until_none_runs(client: Client) -> None:
    wait_until(lambda: client.http.get("/admin/requests").json()["data"] == [], "the end of the request")


def test_what_is_not_stored_ends_with_its_client(storing: Client) -> None:
    first = _broken_off(storing, "slow", 5, store=False)

    _wait_until_none_runs(storing)
    assert storing.http.get(f"/v1/responses/{first[0]['response']['id']}").status_code == 404


def test_a_failed_stream_is_retrieved_with_its_error(storing: Client) -> None:
    stream = storing.stream("breaks")

    assert stream.last["status"] == "failed" and stream.is_done
    assert _get(storing, stream.last["id"]) == stream.last


def test_a_response_that_was_not_streamed_has_no_events(storing: Client) -> None:
    response = storing.create("say")
    answer = storing.http.get(f"/v1/responses/{response['id']}", params={"stream": "true"})

    assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream"
    wrong = storing.http.get(f"/v1/responses/{response['id']}", params={"stream": "true", "starting_after": "x"})
    assert wrong.json()["error"]["param"] == "starting_after"
    wrong = storing.http.get(f"/v1/responses/{response['id']}", params={"stream": "maybe"})
    assert wrong.json()["error"]["message"] == "stream: must be true or false, not 'maybe'"
    query = {"stream": "false", "starting_after": "1", "include[]": "x"}
    told = storing.http.get(f"/v1/responses/{response['id']}", params=query).headers["x-enginehouse-ignored"]
    assert told == "starting_after, include[]"


# -- in the background -------------------------------------------------------------------------------


def test_a_response_in_the_background_is_made_after_its_answer(storing: Client) -> None:
    response = storing.create("slow", background=True)
    assert response["status"] == "queued" and response["output"] == []
    seen = {_get(storing, response["id"])["status"]}
    events = _resumed(storing, response["id"], None)

    assert seen <= {"queued", "in_progress"}
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "completed"
    assert _get(storing, response["id"]) == events[-1]["response"]
    # The connection is free meanwhile.
    other = storing.create("slow", background=True)
    assert storing.create("say")["status"] == "completed"
    assert storing.http.post(f"/v1/responses/{other['id']}/cancel").json()["status"] == "cancelled"


def test_a_response_in_the_background_is_cancelled(storing: Client) -> None:
    response = storing.create("slow", background=True)
    path = f"/v1/responses/{response['id']}/cancel"
    cancelled, again = storing.http.post(path).json(), storing.http.post(path).json()

    assert cancelled["status"] == "cancelled" and again == cancelled == _get(storing, response["id"])
    assert _resumed(storing, response["id"], None)[-1]["type"] == "response.incomplete"
    _wait_until_none_runs(storing)
    foreground = storing.create("say")
    answer = storing.http.post(f"/v1/responses/{foreground['id']}/cancel")
    assert answer.status_code == 400


def test_deleting_a_response_in_progress_ends_it(storing: Client) -> None:
    response = storing.create("slow", background=True)
    assert storing.http.delete(f"/v1/responses/{response['id']}").status_code == 200

    assert storing.http.get(f"/v1/responses/{response['id']}").status_code == 404
    _wait_until_none_runs(storing)


def test_a_response_in_progress_cannot_be_continued(storing: Client) -> None:
    response = storing.create("slow", background=True)

    assert storing.refused("say", previous_response_id=response["id"])["param"] == "previous_response_id"
    assert storing.http.post(f"/v1/responses/{response['id']}/cancel").status_code == 200


# -- keys and servers --------------------------------------------------------------------------------


def test_each_key_has_its_own_responses(models: dict[str, ModelSettings]) -> None:
    auth = AuthSettings(keys=tuple(KeySettings(name=name, key=f"sk-{name}-0123456789abcdef") for name in ("a", "b")))
    plugins = PluginsSettings(allow=("parsers", "responses"), options={"responses": {"store": True}})
    with served(Settings(models={"slow": models["slow"]}, plugins=plugins, auth=auth)) as http:
        ours, theirs = ({"authorization": f"Bearer sk-{name}-0123456789abcdef"} for name in ("a", "b"))
        body = {"model": "slow", "input": "hi", "background": True}
        response_id = http.post("/v1/responses", json=body, headers=ours).json()["id"]
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            theirs_answer = http.request(method, f"/v1/responses/{response_id}{path}", headers=theirs)
            unknown = http.request(method, f"/v1/responses/{response_id[:-1]}x{path}", headers=ours)
            assert theirs_answer.status_code == unknown.status_code == 404
            same = json.loads(unknown.text.replace(f"{response_id[:-1]}x", response_id))
            assert theirs_answer.json() == same
        answer = http.post(f"/v1/responses/{response_id}/cancel", headers=ours)
        assert answer.json()["status"] == "cancelled"


def test_without_a_store_the_answer_says_so(client: Client) -> None:
    response = client.create("say", store=True)
    answer = client.http.post("/v1/responses", json={"model": "say", "input": "hi", "store": True})

    assert response["store"] is False and "store" in answer.headers["x-enginehouse-ignored"]
    assert client.refused("say", previous_response_id=response["id"])["param"] == "previous_response_id"
    assert client.refused("say", background=True)["param"] == "background"
    assert client.http.get(f"/v1/responses/{response['id']}").status_code == 404


def test_a_file_keeps_responses_over_a_restart(models: dict[str, ModelSettings], tmp_path: Path) -> None:
    options = {"responses": {"file": str(tmp_path / "responses.sqlite")}}
    plugins = PluginsSettings(allow=("parsers", "responses"), options=options)
    settings = Settings(models={"say": models["say"]}, plugins=plugins)
    with served(settings) as http:
        first = Client(http).stream("say", "one").last
    with served(settings) as http:
        client = Client(http)
        assert _get(client, first["id"]) == first
        second = client.create("say", "two", previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > client.create("say", "two")["usage"]["input_tokens"]
        resumed = http.get(f"/v1/responses/{first['id']}", params={"stream": "true"})
        assert resumed.status_code == 400  # events are not kept over a restart


@pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")
def test_a_stream_is_taken_up_over_a_killed_worker() -> None:
    model = ModelSettings(source="fake", backend="fake", options={"step_delay_s": 0.02})
    plugins = PluginsSettings(allow=("parsers", "responses"), options={"responses": {"store": True}})
    fields = {"temperature": 0, "max_output_tokens": 60, "ignore_eos": True}
    with served(Settings(models={"m": model}, plugins=plugins)) as http:
        client = Client(http)
        undisturbed = client.stream("m", **fields)
        first = _broken_off(client, "m", 12, **fields)
        (worker,) = (child for child in psutil.Process().children() if "enginehouse.workers" in str(child.cmdline()))
        worker.kill()
        response_id = first[0]["response"]["id"]
        rest = _resumed(client, response_id, first[-1]["sequence_number"])
        events = [*first, *rest]
        for number in range(len(events)):
            assert _resumed(client, response_id, number) == events[number + 1 :]

    def deltas(events: list[dict[str, Any]]) -> str:
        return "".join(event.get("delta", "") for event in events)

    assert deltas(events) == deltas(list(undisturbed.events))
    assert rest[-1]["response"]["status"] == undisturbed.last["status"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_limits_count_a_generation_without_its_client(models: dict[str, ModelSettings]) -> None:
    auth = AuthSettings(keys=(KeySettings(name="a", key="sk-a-0123456789abcdef", max_concurrent=1),))
    plugins = PluginsSettings(allow=("parsers", "responses"), options={"responses": {"store": True}})
    headers = {"authorization": "Bearer sk-a-0123456789abcdef"}
    settings = Settings(models={name: models[name] for name in ("say", "slow")}, plugins=plugins, auth=auth)
    with served(settings, headers=headers) as http:
        client = Client(http)
        first = _broken_off(client, "slow", 5)
        assert client.refused("say", status=429)["code"]
        _resumed(client, first[0]["response"]["id"], None)

        wait_until(
            lambda: http.post("/v1/responses", json={"model": "say", "input": "hi"}).status_code == 200, "a place"
        )
