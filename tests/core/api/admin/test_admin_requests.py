"""What runs, as an operator sees it: lists, partial answers, cancelling, closing reasoning, slots."""

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from attrs import evolve
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from enginehouse.cli import main
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

ADMIN = {"authorization": "Bearer operator-key"}
USER = {"authorization": "Bearer user-key"}
KEYS = (
    KeySettings(name="operator", key="operator-key", scopes=("infer", "metrics", "admin")),
    KeySettings(name="user", key="user-key"),
)
THINKING = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}<think>\n"
SECRET = "nobody else may read this"


def chat(**fields) -> dict:
    return {"messages": [{"role": "user", "content": SECRET}], "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("admin")
    (folder / "thinking.jinja").write_text(THINKING)
    ticks = write_script(folder / "ticks.json", [" tick", {"delay_s": 0.01}], loop=True)
    fake = ModelSettings(
        source=str(folder),
        backend="fake",
        isolation="thread",
        context=4096,
        slots=2,
        options={"step_delay_s": 0.01},
        aliases=("nick",),
    )
    return Settings(
        auth=AuthSettings(keys=KEYS),
        models={
            "fake": fake,
            "thinker": evolve(fake, aliases=(), chat_template=str(folder / "thinking.jinja")),
            "ticks": ModelSettings(source=ticks, backend="scripted", slots=1),
        },
        plugins=PluginsSettings(allow=("parsers",)),
    )


def connect(settings: Settings) -> Iterator[httpx.Client]:
    with served(settings, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def client(settings: Settings) -> Iterator[httpx.Client]:
    yield from connect(settings)


@pytest.fixture
def ask(client: httpx.Client) -> Iterator:
    """Call it with a body: it sends the request beside the test and returns the answer's future."""
    with ThreadPoolExecutor() as pool:
        ids: list[str] = []

        def send(request_id: str, **fields) -> Future[httpx.Response]:
            ids.append(request_id)
            headers = USER | {"x-request-id": request_id}
            return pool.submit(client.post, "/v1/chat/completions", json=chat(**fields), headers=headers)

        yield send
        for request_id in ids:
            client.post(f"/admin/requests/{request_id}/cancel", headers=ADMIN)


def shown(client: httpx.Client, request_id: str) -> dict:
    answer = client.get(f"/admin/requests/{request_id}", headers=ADMIN)
    return answer.json() if answer.status_code == 200 else {}


def wait_for(client: httpx.Client, request_id: str, phase: str, *, in_all_choices: bool = False) -> dict:
    """Until the request is in that phase; a second choice waits for the prompt of the first."""
    deadline = time.monotonic() + 60
    while True:
        found = shown(client, request_id)
        phases = [choice["phase"] for choice in found["choices"]] if in_all_choices and found else []
        if found.get("phase") == phase and set(phases) <= {phase}:
            return found
        assert time.monotonic() < deadline, f"never in {phase}: {found}"
        time.sleep(0.01)


def wait_idle(client: httpx.Client, model: str) -> dict:
    deadline = time.monotonic() + 60
    while True:
        listed = client.get("/admin/slots", headers=ADMIN).json()["data"]
        found = next(entry for entry in listed if entry["model"] == model)
        if not found["sequences"]:
            return found
        assert time.monotonic() < deadline, f"something still runs: {found}"
        time.sleep(0.01)


# -- lists --------------------------------------------------------------------------------------------


def test_running_requests_are_listed(client: httpx.Client, ask) -> None:
    ask("seen", model="nick", n=2, stream=True, priority=3)
    wait_for(client, "seen", "decode", in_all_choices=True)

    listed = client.get("/admin/requests", headers=ADMIN).json()

    assert listed["object"] == "list"
    (entry,) = [entry for entry in listed["data"] if entry["request_id"] == "seen"]
    assert entry["id"].startswith("chatcmpl-")
    assert (entry["model"], entry["key"], entry["endpoint"]) == ("fake", "user", "/chat/completions")
    assert entry["stream"] is True and entry["client_gone"] is False and entry["priority"] == 3
    assert entry["age_s"] > 0 and entry["prompt_tokens"] > 10 and entry["cached_tokens"] >= 0
    assert [choice["index"] for choice in entry["choices"]] == [0, 1]
    for choice in entry["choices"]:
        assert choice["phase"] == "decode" and choice["completion_tokens"] >= 0
    assert SECRET not in json.dumps(listed)


def test_a_waiting_request_is_queued_and_can_be_cancelled(client: httpx.Client, ask) -> None:
    running = [ask(f"first-{n}", model="fake") for n in range(2)]
    for n in range(2):
        wait_for(client, f"first-{n}", "decode")
    waiting = ask("waiting", model="fake")

    found = wait_for(client, "waiting", "queued")
    assert client.post("/admin/requests/waiting/cancel", headers=ADMIN).json()["cancelled"] is True

    assert found["choices"][0]["phase"] == "queued"
    assert waiting.result(60).status_code == 410
    assert not any(answer.done() for answer in running), "the others go on"


def test_an_engine_that_shows_nothing_is_judged_by_what_arrived(client: httpx.Client, ask) -> None:
    ask("scripted", model="ticks", stream=True)
    found = wait_for(client, "scripted", "decode")

    assert found["choices"][0]["completion_tokens"] is None and found["cached_tokens"] is None
    (slots,) = [e for e in client.get("/admin/slots", headers=ADMIN).json()["data"] if e["model"] == "ticks"]
    assert slots["inspectable"] is False and slots["slots"] is None


def test_an_id_of_the_answer_finds_the_request_too(client: httpx.Client, ask) -> None:
    ask("by-both", model="fake")
    own = wait_for(client, "by-both", "decode")["id"]

    assert shown(client, own)["request_id"] == "by-both"


def test_several_requests_of_one_id_are_distinguished_by_their_own(client: httpx.Client, ask) -> None:
    ask("twin", model="fake")
    own = wait_for(client, "twin", "decode")["id"]
    ask("twin", model="fake")
    deadline = time.monotonic() + 60
    while (answer := client.get("/admin/requests/twin", headers=ADMIN)).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    assert answer.status_code == 400 and own in answer.json()["error"]["message"]
    for entry in client.get("/admin/requests", headers=ADMIN).json()["data"]:
        client.post(f"/admin/requests/{entry['id']}/cancel", headers=ADMIN)


# -- prompts and partial answers ----------------------------------------------------------------------


def test_prompts_are_shown_only_where_the_settings_say_so(client: httpx.Client, settings: Settings, ask) -> None:
    ask("hidden", model="fake")
    wait_for(client, "hidden", "decode")
    answer = client.get("/admin/requests/hidden", headers=ADMIN)

    assert SECRET not in answer.text and answer.json()["prompts"] is None

    open_settings = evolve(settings, server=ServerSettings(show_prompts=True))
    with contextlib.contextmanager(connect)(open_settings) as other, ThreadPoolExecutor() as pool:
        body = {"prompt": [SECRET, "b"], "model": "ticks"}
        asked = pool.submit(other.post, "/v1/completions", json=body, headers=USER | {"x-request-id": "open"})
        deadline = time.monotonic() + 60
        while not (found := shown(other, "open")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        other.post("/admin/requests/open/cancel", headers=ADMIN)

        assert found["prompts"] == [SECRET, "b"]
        assert len(found["choices"]) == 2
        assert asked.result(60).status_code == 410


@pytest.mark.parametrize("stream", [True, False])
def test_what_has_been_said_so_far(client: httpx.Client, ask, stream: bool) -> None:
    ask("talking", model="ticks", stream=stream)
    deadline = time.monotonic() + 60
    texts: list[str] = []
    while len(texts) < 3:
        answer = client.get("/admin/requests/talking/partial", headers=ADMIN)
        text = answer.json()["choices"][0]["text"] if answer.json().get("choices") else ""
        if text and (not texts or text != texts[-1]):
            texts.append(text)
        assert time.monotonic() < deadline
        time.sleep(0.02)

    assert all(set(text.split()) == {"tick"} for text in texts)
    assert texts == sorted(texts, key=len), "it only grows"


# -- cancelling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["fake", "ticks"])
def test_cancelling_a_whole_answer_is_an_error_that_is_not_repeated(client: httpx.Client, ask, model: str) -> None:
    answer = ask("whole", model=model)
    wait_for(client, "whole", "decode")

    assert client.post("/admin/requests/whole/cancel", headers=ADMIN).status_code == 200

    assert answer.result(60).status_code == 410
    assert answer.result().json()["error"]["code"] == "request_cancelled"
    assert answer.result().headers["x-request-id"] == "whole"
    if model == "fake":
        assert wait_idle(client, "fake")["slots_in_use"] == 0


def test_cancelling_a_stream_ends_it_with_an_error_event(client: httpx.Client, ask) -> None:
    answer = ask("stream", model="fake", stream=True)
    wait_for(client, "stream", "decode")
    client.post("/admin/requests/stream/cancel", headers=ADMIN)
    events = [line for line in answer.result(60).text.split("\n\n") if line.startswith("data: ")]

    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "request_cancelled"
    assert "[DONE]" not in answer.result().text
    wait_idle(client, "fake")


def test_what_does_not_run_is_not_found(client: httpx.Client) -> None:
    for path, method in (
        ("/admin/requests/none", "GET"),
        ("/admin/requests/none/partial", "GET"),
        ("/admin/requests/none/cancel", "POST"),
        ("/admin/requests/none/stop-thinking", "POST"),
    ):
        answer = client.request(method, path, headers=ADMIN)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "request_not_running"


@pytest.mark.parametrize("action", ["cancel", "stop-thinking"])
def test_orders_take_no_fields(client: httpx.Client, action: str) -> None:
    answer = client.post(f"/admin/requests/none/{action}", headers=ADMIN, json={"reason": "x"})

    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reason"
    assert client.post(f"/admin/requests/none/{action}", headers=ADMIN, json={}).status_code == 404


@pytest.mark.parametrize("path", ["/admin/requests", "/admin/requests/x", "/admin/requests/x/partial", "/admin/slots"])
def test_users_may_not_look(client: httpx.Client, path: str) -> None:
    assert client.get(path, headers=USER).status_code == 403
    assert client.get(path).status_code == 401


# -- reasoning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_is_closed_and_the_answer_follows(client: httpx.Client, ask, stream: bool) -> None:
    answer = ask("thinking", model="thinker", stream=stream, logprobs=not stream)
    deadline = time.monotonic() + 60
    while not any(choice["is_thinking"] for choice in shown(client, "thinking").get("choices", ())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    partial = client.get("/admin/requests/thinking/partial", headers=ADMIN).json()["choices"][0]

    order = client.post("/admin/requests/thinking/stop-thinking", headers=ADMIN)
    assert order.status_code == 200 and order.json()["choices_stopped"] == 1
    again = client.post("/admin/requests/thinking/stop-thinking", headers=ADMIN)

    assert again.status_code == 409 and again.json()["error"]["code"] == "not_thinking"
    assert partial["text"] == ""
    deadline = time.monotonic() + 60
    while not (found := client.get("/admin/requests/thinking/partial", headers=ADMIN).json()["choices"][0])["text"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    assert found["reasoning"].startswith(partial["reasoning"].rstrip())
    client.post("/admin/requests/thinking/cancel", headers=ADMIN)
    answer.result(60)


def test_a_request_that_does_not_think_is_a_conflict(client: httpx.Client, ask) -> None:
    for name, model in (("plain", "fake"), ("script", "ticks")):
        ask(name, model=model)
        wait_for(client, name, "decode")

        assert client.post(f"/admin/requests/{name}/stop-thinking", headers=ADMIN).status_code == 409


def test_a_request_whose_worker_died_is_paused_and_can_be_cancelled(tmp_path: Path) -> None:
    # The request would still run when the next worker is there.
    options = {"faults": {"abort_at_step": 8}, "open_delay_s": 2.0, "step_delay_s": 0.1}
    model = ModelSettings(source=str(tmp_path), backend="fake", context=512, options=options)
    settings = Settings(auth=AuthSettings(keys=KEYS), models={"m": model}, plugins=PluginsSettings(allow=()))
    with contextlib.contextmanager(connect)(settings) as client, ThreadPoolExecutor() as pool:
        headers = USER | {"x-request-id": "lost"}
        answer = pool.submit(client.post, "/v1/chat/completions", json=chat(max_tokens=400), headers=headers)

        found = wait_for(client, "lost", "paused")
        client.post("/admin/requests/lost/cancel", headers=ADMIN)

        assert found["model"] == "m" and answer.result(60).status_code == 410


# -- slots --------------------------------------------------------------------------------------------


def test_slots_and_what_the_prefix_cache_keeps(client: httpx.Client, ask) -> None:
    for _ in range(2):
        done = client.post("/v1/chat/completions", json=chat(model="fake", max_tokens=3, cache_salt="s"), headers=USER)
        assert done.status_code == 200
    ask("holding", model="fake")
    own = wait_for(client, "holding", "decode")["id"]
    listed = client.get("/admin/slots", headers=ADMIN).json()["data"]
    (found,) = [entry for entry in listed if entry["model"] == "fake"]

    assert (found["slots"], found["slots_in_use"], found["requests_waiting"]) == (2, 1, 0)
    (sequence,) = found["sequences"]
    assert sequence["request_id"] == own and sequence["phase"] == "decode"
    assert sequence["kv_tokens"] >= sequence["prompt_tokens"]
    salted = [entry for entry in found["prefixes"] if entry["salt_hash"]]
    assert salted and {entry["namespace"] for entry in salted} == {"user"}
    assert salted[0]["tokens"] > 10 and sum(entry["hits"] for entry in salted) >= 1
    assert "s" not in [entry["salt_hash"] for entry in salted]
    assert found["free_tokens"] < found["cache_tokens"]


# -- the command --------------------------------------------------------------------------------------


def run(client: httpx.Client, *arguments: str) -> Result:
    options = ["--url", str(client.base_url), "--key", "operator-key"]
    return CliRunner().invoke(main, ["requests", *arguments, *options], catch_exceptions=False)


def test_requests_on_the_command_line(client: httpx.Client, ask) -> None:
    answer = ask("from-afar", model="fake")
    own = wait_for(client, "from-afar", "decode")["id"]

    listed = run(client, "list", "--json")
    table = run(client, "list")
    cancelled = run(client, "cancel", "from-afar")
    status = answer.result(60).status_code
    deadline = time.monotonic() + 60
    while (again := run(client, "cancel", "from-afar")).exit_code == 0:  # it is still leaving
        assert time.monotonic() < deadline

    assert own in [request["id"] for request in json.loads(listed.stdout)["data"]]
    assert "fake" in table.output and "decode" in table.output
    assert cancelled.stdout == f"{own} is cancelled\n" and status == 410
    assert again.exit_code == 2 and "from-afar" in again.output


# -- the document -------------------------------------------------------------------------------------


def test_answers_are_of_the_documents_schemas(client: httpx.Client, ask) -> None:
    document = client.get("/schema", headers=USER).json()
    ask("documented", model="fake", n=2)
    ask("documented-too", model="ticks")
    wait_for(client, "documented", "decode")
    wait_for(client, "documented-too", "decode")
    for path in ("/admin/requests", "/admin/requests/documented", "/admin/requests/documented/partial", "/admin/slots"):
        template = path.replace("documented", "{request_id}")
        schema = document["paths"][template]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        answer = client.get(path, headers=ADMIN).json()

        Draft202012Validator({**schema, "components": document["components"]}).validate(answer)
        properties = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
        assert set(answer) == set(properties), "and nothing else"
