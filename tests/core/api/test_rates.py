"""Limits of callers over HTTP: refusals, what headers say, priorities, and models that a key may not use."""

import json
from collections.abc import Iterator

import httpx
import pytest

from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

from .harness import begin, chat

pytestmark = pytest.mark.usefixtures("within_a_minute")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def connect(tmp_path):
    """Call it with keys and limits; it gives a client of a server whose first model is ``m``, also called ``also``."""
    clients = []

    def make(*keys: KeySettings, **limits) -> Iterator[httpx.Client]:
        hello = write_script(tmp_path / "hello.json", ["Hel", "lo"])
        endless = write_script(tmp_path / "endless.json", ["a", {"delay_s": 0.02}], loop=True)
        settings = Settings(
            auth=AuthSettings(keys=keys),
            limits=LimitsSettings(**limits),
            models={
                "m": ModelSettings(source=hello, backend="scripted", aliases=("also",)),
                "other": ModelSettings(source=hello, backend="scripted"),
                "endless": ModelSettings(source=endless, backend="scripted"),
            },
            plugins=PluginsSettings(allow=()),
        )
        with served(settings, timeout=20) as client:
            yield client

    def connect(*keys: KeySettings, **limits) -> httpx.Client:
        clients.append(make(*keys, **limits))
        return next(clients[-1])

    yield connect
    for client in clients:
        for _ in client:
            pass


def key(name: str, **fields) -> KeySettings:
    return KeySettings(name=name, key=name, **fields)


def test_headers_say_what_is_left(connect) -> None:
    client = connect(key("alice", requests_per_minute=3, tokens_per_minute=10_000))
    response = client.post("/v1/chat/completions", json=chat(), headers=bearer("alice"))

    headers = response.headers
    assert response.status_code == 200
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-remaining-requests"] == "2"
    assert headers["x-ratelimit-limit-tokens"] == "10000"
    assert 9000 < int(headers["x-ratelimit-remaining-tokens"]) < 10_000
    assert headers["x-ratelimit-reset-requests"].endswith("s")


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_requests_are_told_when_to_come_back(connect, stream: bool) -> None:
    client = connect(key("alice", requests_per_minute=2), key("bob"))
    for _ in range(2):
        assert client.post("/v1/chat/completions", json=chat(stream=stream), headers=bearer("alice")).status_code == 200
    for path, body in (("/v1/chat/completions", chat(stream=stream)), ("/v1/completions", {"prompt": "a"})):
        refused = client.post(path, json=body, headers=bearer("alice"))
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert 1 <= int(refused.headers["retry-after"]) <= 121
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"

    assert client.post("/v1/chat/completions", json=chat(), headers=bearer("bob")).status_code == 200
    assert client.get("/v1/models", headers=bearer("alice")).status_code == 200  # only generating counts


def test_tokens_are_counted_as_they_were_used(connect) -> None:
    """What was reserved for a long answer comes back when the answer was short."""
    client = connect(key("alice", tokens_per_minute=1000))
    for _ in range(5):
        response = client.post("/v1/chat/completions", json=chat(max_tokens=900), headers=bearer("alice"))
        assert response.status_code == 200, response.text

    remaining = int(response.headers["x-ratelimit-remaining-tokens"])
    assert remaining < 1000 - 900


def test_a_request_for_more_tokens_than_are_left_is_refused(connect) -> None:
    client = connect(key("alice", tokens_per_minute=100))
    with client.stream(
        "POST", "/v1/chat/completions", json=chat(model="endless", max_tokens=90, stream=True), headers=bearer("alice")
    ) as running:
        begin(running)
        refused = client.post("/v1/chat/completions", json=chat(max_tokens=50), headers=bearer("alice"))

    assert refused.status_code == 429
    assert "100 tokens per minute" in refused.json()["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"messages": 1}, chat(temperature="hot"), chat(model="none")])
def test_refused_requests_do_not_hold_a_place(connect, body: dict) -> None:
    client = connect(key("alice", max_concurrent=1))
    for _ in range(3):
        assert client.post("/v1/chat/completions", json=body, headers=bearer("alice")).status_code in (400, 404)

    assert client.post("/v1/chat/completions", json=chat(), headers=bearer("alice")).status_code == 200


def test_requests_at_once(connect) -> None:
    client = connect(key("alice", max_concurrent=1), key("bob"), max_concurrent=2)
    endless = chat(model="endless", max_tokens=100_000, stream=True)
    with client.stream("POST", "/v1/chat/completions", json=endless, headers=bearer("alice")) as first:
        begin(first)
        refused = client.post("/v1/chat/completions", json=chat(), headers=bearer("alice"))
        assert refused.status_code == 429 and "retry-after" in refused.headers
        with client.stream("POST", "/v1/chat/completions", json=endless, headers=bearer("bob")) as second:
            begin(second)
            refused = client.post("/v1/chat/completions", json=chat(), headers=bearer("bob"))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_overloaded"
            assert int(refused.headers["retry-after"]) >= 1

    for _ in range(100):  # whoever left is noticed soon
        served = client.post("/v1/chat/completions", json=chat(), headers=bearer("alice"))
        if served.status_code == 200:
            break
    assert served.status_code == 200


@pytest.mark.parametrize("path", ["/tokenize", "/v1/detokenize", "/v1/apply-template", "/v1/route"])
def test_requests_at_once_cannot_be_passed_by_at_another_address(connect, path: str) -> None:
    client = connect(key("alice", max_concurrent=1, requests_per_minute=1))
    endless = chat(model="endless", max_tokens=100_000, stream=True)
    with client.stream("POST", "/v1/chat/completions", json=endless, headers=bearer("alice")) as first:
        begin(first)
        refused = client.post(path, json={}, headers=bearer("alice"))
    assert refused.status_code == 429 and "retry-after" in refused.headers
    for _ in range(100):  # whoever left is noticed soon; what is no answer uses up no rate
        answer = client.post(path, json={"no": "body"}, headers=bearer("alice"))
        if answer.status_code != 429:
            break
    assert answer.status_code == 400
    assert "x-ratelimit-limit-requests" not in answer.headers


def test_limits_are_looked_at_before_the_body(connect) -> None:
    """A refusal must cost nothing."""
    client = connect(key("alice", requests_per_minute=1))
    assert client.post("/v1/chat/completions", json=chat(), headers=bearer("alice")).status_code == 200
    refused = client.post(
        "/v1/chat/completions", content=b"no json", headers={**bearer("alice"), "content-type": "application/json"}
    )

    assert refused.status_code == 429


def test_a_server_without_keys_has_limits_too(connect) -> None:
    client = connect(requests_per_minute=1)
    assert client.post("/v1/chat/completions", json=chat()).status_code == 200
    refused = client.post("/v1/chat/completions", json=chat())

    assert refused.status_code == 429
    assert "All callers together" in refused.json()["error"]["message"]


def test_codes_are_those_of_the_profile(connect) -> None:
    client = connect(key("alice", requests_per_minute=1, profile="octomil"))
    client.post("/v1/chat/completions", json=chat(), headers=bearer("alice"))
    refused = client.post("/v1/chat/completions", json=chat(), headers=bearer("alice"))

    assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limited"


def test_how_urgent_a_request_may_be_is_the_keys_right(connect) -> None:
    client = connect(key("usual"), key("urgent", priority=-5))
    for name, priority, status in (("usual", 0, 200), ("usual", 3, 200), ("usual", -1, 400), ("urgent", -5, 200)):
        response = client.post("/v1/chat/completions", json=chat(priority=priority), headers=bearer(name))
        assert response.status_code == status, response.text
    refused = client.post("/v1/chat/completions", json=chat(priority=-6), headers=bearer("urgent"))

    assert refused.json()["error"]["param"] == "priority"


def names(client: httpx.Client, name: str) -> list:
    return [(one["id"], one["aliases"]) for one in client.get("/v1/models", headers=bearer(name)).json()["data"]]


def test_other_models_do_not_exist_for_a_key(connect) -> None:
    client = connect(key("all"), key("m", models=("m",)), key("alias", models=("also", "other")))
    assert names(client, "all") == [("m", ["also"]), ("other", []), ("endless", [])]
    assert names(client, "m") == [("m", ["also"])]
    assert names(client, "alias") == [("also", []), ("other", [])]
    may = {"m": {"m", "also", None}, "alias": {"also", "other"}, "all": {"m", "also", "other", None}}
    for name, allowed in may.items():
        for model in ("m", "also", "other", None):
            expected = 200 if model in allowed else 404
            body = {} if model is None else {"model": model}
            requests = [
                ("/v1/chat/completions", chat(**body)),
                ("/v1/completions", {"prompt": "a", **body}),
                ("/tokenize", {"content": "a", **body}),
                ("/detokenize", {"tokens": [1], **body}),
            ]
            for path, sent in requests:
                response = client.post(path, json=sent, headers=bearer(name))
                assert response.status_code == expected, (name, model, path, response.text)
            if model is not None:
                assert client.get(f"/v1/models/{model}", headers=bearer(name)).status_code == expected


def test_a_key_for_a_model_that_is_not_served_is_told_at_the_start(connect, caplog: pytest.LogCaptureFixture) -> None:
    connect(key("batch", models=("m", "also", "mm")))

    assert [record.message for record in caplog.records if "batch" in record.message] == [
        "the key 'batch' may use the model 'mm', which is not served"
    ]


def test_a_model_that_is_hidden_is_answered_like_one_that_does_not_exist(connect) -> None:
    client = connect(key("m", models=("m",)))

    def answer(model: str) -> tuple[int, str]:
        response = client.post("/v1/chat/completions", json=chat(model=model), headers=bearer("m"))
        return response.status_code, json.dumps(response.json()).replace(model, "NAME")

    assert answer("other") == answer("none-such")


def test_health_names_models_to_those_who_may_use_them(connect) -> None:
    client = connect(key("m", models=("m",)), key("all"))
    seen = {name: client.get("/health", headers=bearer(name)).json() for name in ("m", "all", "nobody")}

    assert {health["status"] for health in seen.values()} == {"ok"}
    assert [list(health["models"]) for health in seen.values()] == [["m"], ["m", "other", "endless"], []]
