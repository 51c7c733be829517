"""Checks of APIs other than chats: our server passes all, and each fault of another one is caught."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from attrs import evolve
from click.testing import CliRunner

from enginehouse.cli import main
from enginehouse.cli.target import connect
from enginehouse.settings.config import AuthSettings, ModelSettings, PluginsSettings, Settings
from enginehouse_conform.catalogue import CHECKS_BY_API
from enginehouse_conform.running import run_checks
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

KEY = "key-for-checks"
APIS = ("responses", "messages", "ollama")
PLUGINS = ("anthropic", "llamacpp", "llguidance", "ollama", "parsers", "pooling", "responses", "starter")
REAL = {"responses": ("R03", "R07"), "messages": ("M03", "M06"), "ollama": ("O04", "O08")}
"""What depends on the model most; the others take long with a real one."""
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSettings]:
    folder = tmp_path_factory.mktemp("models")
    lamp = '{"on": true, "level": 5}'
    call = ['<tool_call>\n{"name": "set_lamp", "arguments": ', lamp[:9], lamp[9:], "}\n</tool_call>"]
    (folder / "t.jinja").write_text("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}")
    script = write_script(folder / "s.json", ["The ", "sea ", "is ", "calm"], replies={"You can call functions": call})
    scripted = ModelSettings(source=script, backend="scripted", chat_template=str(folder / "t.jinja"))
    fake = ModelSettings(source=str(folder), backend="fake", isolation="thread", context=2048)
    options = {"dimension_choices": [16], "prompts": {"query": "query: "}}
    pooler = ModelSettings(source="fake-pooler", backend="fake-pooler", isolation="thread", options=options)
    return {"fake": fake, "scripted": scripted, "embedder": evolve(pooler, rerank="cosine"), "plain": pooler}


@pytest.fixture(scope="module")
def good(models: dict[str, ModelSettings]) -> Iterator[str]:
    """Our server, with a store."""
    plugins = PluginsSettings(allow=PLUGINS, options={"responses": {"store": True}})
    with served(Settings(auth=AuthSettings(keys=(KEY,)), models=models, plugins=plugins)) as client:
        yield str(client.base_url)


def not_passed(url: str, api: str, model: str, numbers: tuple[str, ...] = ()) -> dict[str, str]:
    """Number to detail of each check that fails, is refused or skipped."""
    checks = [check for check in CHECKS_BY_API[api] if not numbers or check.behaviour in numbers]
    results = run_checks(connect(url, model, KEY), checks, timeout_s=60)
    return {one.behaviour: f"{one.outcome}: {one.detail}" for one in results if one.outcome != "passed"}


@pytest.mark.llguidance
@pytest.mark.parametrize("model", ["fake", "scripted"])
@pytest.mark.parametrize("api", APIS)
def test_our_server_passes_every_check(good: str, api: str, model: str) -> None:
    found = not_passed(good, api, model)

    found.pop("O13", None)  # the model makes no embeddings
    if model == "scripted":  # its answers obey no schema, and its engine has no cache
        for number in ("M14", "M15", "O08", "R09"):
            found.pop(number, None)
    assert found == {}


def test_our_embeddings_pass_every_check(good: str) -> None:
    refused = not_passed(good, "embeddings", "plain", ("E13",))

    assert not_passed(good, "embeddings", "embedder") == {}
    assert not_passed(good, "ollama", "embedder", ("O13",)) == {}
    assert refused["E13"].startswith("refused: ")  # an embedding model reranks only if its settings say so


@pytest.mark.llamacpp
@pytest.mark.llguidance
def test_a_real_model_makes_calls_and_items_in_order() -> None:
    models = {"starter": ModelSettings(source="starter", context=2048)}
    with served(
        Settings(auth=AuthSettings(keys=(KEY,)), models=models, plugins=PluginsSettings(allow=PLUGINS))
    ) as client:
        found = {api: not_passed(str(client.base_url), api, "starter", REAL[api]) for api in APIS}

    assert found == {"responses": {}, "messages": {}, "ollama": {}}


def test_a_server_without_a_store_is_skipped_where_one_is_needed(models: dict[str, ModelSettings]) -> None:
    plugins = PluginsSettings(allow=("parsers", "responses"))
    with served(Settings(auth=AuthSettings(keys=(KEY,)), models=models, plugins=plugins)) as client:
        found = not_passed(str(client.base_url), "responses", "scripted", ("R12", "R13", "R14"))

    assert found.keys() == {"R13", "R14"}
    assert all(detail == "skipped: the server stores no responses (store is false)" for detail in found.values())


# -- servers with one fault --------------------------------------------------------------------------


class Sent(dict[str, Any]):
    """The body of a request, with its path."""

    path = ""


@contextlib.contextmanager
def faulty(url: str, fault: Callable[[Sent, Any], Any]) -> Iterator[str]:
    """Our server with one fault: ``fault`` returns what comes instead of a body or of events, or a status."""
    upstream = httpx.Client(base_url=url, timeout=60, trust_env=False)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._forward(b"")

        do_DELETE = do_GET

        def do_POST(self) -> None:
            self._forward(self.rfile.read(int(self.headers["content-length"])))

        def _forward(self, body: bytes) -> None:
            sent = Sent(as_json(body) or {})
            sent.path = self.path
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            answer = upstream.request(self.command, self.path, content=body, headers=headers)
            kind = answer.headers.get("content-type", "")
            changed = fault(sent, parsed(answer.text, kind))
            status = changed if isinstance(changed, int) else answer.status_code
            data = json.dumps({"error": "no"}).encode() if isinstance(changed, int) else written(changed, kind)
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    with upstream, server:  # which waits for its requests
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def as_json(body: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(body)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def parsed(text: str, kind: str) -> Any:
    if kind.startswith("text/event-stream"):
        data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        return [one if one == "[DONE]" else json.loads(one) for one in data]
    if kind.startswith("application/x-ndjson"):
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text) if kind.startswith("application/json") else text


def written(data: Any, kind: str) -> bytes:
    if kind.startswith("text/event-stream"):
        return "".join(
            f"data: {one}\n\n" if isinstance(one, str) else f"event: {one['type']}\ndata: {json.dumps(one)}\n\n"
            for one in data
        ).encode()
    if kind.startswith("application/x-ndjson"):
        return "".join(f"{json.dumps(one)}\n" for one in data).encode()
    return data.encode() if isinstance(data, str) else json.dumps(data).encode()


def whole(change: Callable[[dict[str, Any]], Any], has: str) -> Callable[[Sent, Any], Any]:
    """A fault of whole bodies with the member ``has``; a result that is not None takes the place of the body."""

    def fault(sent: Sent, data: Any) -> Any:
        changed = change(data) if isinstance(data, dict) and has in data else None
        return data if changed is None else changed

    return fault


def lacking(name: str, has: str) -> Callable[[Sent, Any], Any]:
    """A fault of whole bodies with the member ``has``: they lack another one."""
    return whole(lambda data: {one: value for one, value in data.items() if one != name}, has)


def streamed(change: Callable[[Events], Any]) -> Callable[[Sent, Any], Any]:
    """A fault of streams."""

    def fault(sent: Sent, data: Any) -> Any:
        changed = change(data) if isinstance(data, list) and len(data) > 1 else None
        return data if changed is None else changed

    return fault


def refusing(is_refused: Callable[[Sent], bool], status: int = 400) -> Callable[[Sent, Any], Any]:
    """A fault that refuses requests."""
    return lambda sent, data: status if is_refused(sent) else data


def without(kind: str) -> Callable[[Events], Events]:
    """The events without those of a type."""
    return lambda events: [event for event in events if event == "[DONE]" or event["type"] != kind]


def last_response(events: Events) -> dict[str, Any]:
    response: dict[str, Any] = events[-2]["response"]
    return response


def every(name: str, value: Any) -> Callable[[Events], None]:
    """Each event that has a member gets another value of it."""

    def change(events: Events) -> None:
        for event in events:
            if name in event:
                event[name] = value

    return change


def cut_call(events: Events) -> None:
    """The arguments of the call in ``output_item.done`` are not those of its deltas."""
    for event in events:
        if isinstance(event, dict) and event["type"] == "response.output_item.done":
            event["item"]["arguments"] = "{}"


def one_step(data: Any) -> Any:
    """Each prompt has as many tokens as the one before."""
    for response in [data] if isinstance(data, dict) else [last_response(data)]:
        if response.get("usage"):
            response["usage"]["input_tokens"] = 9
    return data


def lost_piece(events: Events) -> Events:
    """The first piece of the arguments is lost."""
    first = next(one for one in events if one.get("delta", {}).get("type") == "input_json_delta")
    return [event for event in events if event is not first]


def text_arguments(data: dict[str, Any]) -> None:
    """The arguments of a call are a text."""
    for call in data["message"].get("tool_calls", ()):
        call["function"]["arguments"] = "{}"


def billed(sent: Sent, data: Any) -> Any:
    """The billing block counts."""
    if isinstance(sent.get("system"), list) and isinstance(data, dict) and "usage" in data:
        data["usage"]["cache_read_input_tokens"] = 0 if "bbbbb" in str(sent["system"]) else 5
    return data


RESPONSES: list[tuple[str, str, Callable[[Sent, Any], Any]]] = [
    ("R01", "lacks metadata", lacking("metadata", "output")),
    ("R01", "'resp_'", whole(lambda data: data.update(id="chatcmpl-1"), "output")),
    ("R02", "lacks", streamed(lambda events: events[0].update(response={"id": events[0]["response"]["id"]}))),
    ("R02", "sequence numbers", streamed(lambda events: [events[0], *events[2:]])),
    ("R02", "[DONE]", streamed(lambda events: events[:-1])),
    ("R02", "the id of a response changes", streamed(lambda events: last_response(events).update(id="resp_2"))),
    ("R02", "no usage", streamed(lambda events: last_response(events).update(usage=None))),
    ("R03", "items of the final response", streamed(lambda events: last_response(events)["output"][0].update(id="m"))),
    ("R03", "before its item is added", streamed(without("response.output_item.added"))),
    ("R03", "with an open item", streamed(without("response.output_item.done"))),
    ("R03", "content_index 1", streamed(every("content_index", 1))),
    ("R03", "output_index 1", streamed(every("output_index", 1))),
    ("R03", "is of 'x'", streamed(every("item_id", "x"))),
    ("R03", "its deltas", streamed(every("text", "other"))),
    ("R04", "whole and", whole(lambda data: data["output"][0]["content"][0].update(text="other"), "output")),
    ("R05", "do not add up", whole(lambda data: data["usage"].update(total_tokens=1), "output")),
    ("R06", "are counted", whole(lambda data: data.update(input_tokens=1), "input_tokens")),
    ("R07", "no call", whole(lambda data: data.update(output=[]), "output")),
    ("R07", "not valid JSON", whole(lambda data: data["output"][0].update(arguments='{"on"'), "output")),
    ("R07", "text of its deltas", streamed(cut_call)),
    ("R08", "namespace", refusing(lambda sent: "namespace" in str(sent.get("tools")))),
    ("R08", "web_search", refusing(lambda sent: "web_search" in str(sent.get("tools")))),
    ("R10", "not in the prompt", whole(lambda data: data["usage"].update(input_tokens=9), "output")),
    ("R11", "without an error object", whole(lambda data: {"detail": "no"}, "error")),
    ("R12", "500", refusing(lambda sent: "resp_none" in sent.path, 500)),
    ("R12", "previous_response_id", lambda sent, data: 200 if sent.get("previous_response_id") else data),
    ("R13", "with 404", refusing(lambda sent: "/responses/resp_" in sent.path, 404)),
    ("R13", "does not say", whole(lambda data: data.update(deleted=False), "deleted")),
    ("R14", "earlier turns", lambda sent, data: one_step(data)),
]


MESSAGES: list[tuple[str, str, Callable[[Sent, Any], Any]]] = [
    ("M01", "lacks stop_sequence", lacking("stop_sequence", "content")),
    ("M01", "'msg_'", whole(lambda data: data.update(id="chatcmpl-1"), "content")),
    ("M02", "begins with", streamed(lambda events: [events[0], *events])),
    ("M02", "ends with", streamed(without("message_delta"))),
    ("M02", "has content", streamed(lambda events: events[0]["message"].update(content=[{"type": "text"}]))),
    ("M03", "no open block", streamed(without("content_block_start"))),
    ("M03", "a block is open", streamed(without("content_block_stop"))),
    ("M03", "the index 1", streamed(every("index", 1))),
    ("M03", "has a 'thinking_delta'", streamed(every("delta", {"type": "thinking_delta", "thinking": ""}))),
    ("M04", "whole and", whole(lambda data: data["content"][0].update(text="other"), "content")),
    ("M05", "stop_sequence is None", whole(lambda data: data.update(stop_sequence=None), "content")),
    ("M05", "made 5 tokens", whole(lambda data: data["usage"].update(output_tokens=5), "content")),
    ("M06", "do not join", streamed(lost_piece)),
    ("M06", "2 calls", whole(lambda data: data["content"].append(data["content"][0]), "content")),
    ("M06", "empty text", whole(lambda data: data["content"].insert(0, {"type": "text", "text": ""}), "content")),
    ("M06", "not an object", whole(lambda data: data["content"][0].update(input="{}"), "content")),
    ("M07", "not in the prompt", whole(lambda data: data["usage"].update(input_tokens=9), "content")),
    ("M08", "role 'system'", refusing(lambda sent: "'role': 'system'" in str(sent.get("messages")))),
    ("M08", "foreign signature", refusing(lambda sent: "signature" in str(sent.get("messages")))),
    ("M08", "10,000,000", refusing(lambda sent: sent.get("max_tokens") == 10_000_000)),
    ("M09", "thinking", whole(lambda data: data["content"].append({"type": "thinking"}), "content")),
    ("M10", "are counted", whole(lambda data: {"input_tokens": 1}, "input_tokens")),
    ("M11", "not an error of this API", lacking("type", "error")),
    ("M11", "the error has the type", whole(lambda data: data["error"].update(type="invalid"), "error")),
    ("M12", "beta=true", refusing(lambda sent: "beta" in sent.path, 404)),
    ("M13", "shape", whole(lambda data: {"object": "list", "data": data["data"]}, "has_more")),
    ("M14", "keeps prompts from the cache", billed),
]


OLLAMA: list[tuple[str, str, Callable[[Sent, Any], Any]]] = [
    ("O01", "the version", whole(lambda data: data.update(version="dev"), "version")),
    ("O02", "lacks digest", whole(lambda data: data["models"][0].pop("digest") and None, "models")),
    ("O02", "context_length", whole(lambda data: data.update(model_info={"general.architecture": "x"}), "model_info")),
    ("O03", "integers for total", whole(lambda data: data.update(total_duration=0.5), "total_duration")),
    ("O03", "longer than", whole(lambda data: data.update(eval_duration=10**12), "total_duration")),
    ("O04", "before the last one has", streamed(lambda events: events[0].update(total_duration=1))),
    ("O04", "not done", streamed(lambda events: events[:-1])),
    ("O05", "whole and", whole(lambda data: data["message"].update(content="other"), "message")),
    ("O06", "num_predict", whole(lambda data: data.update(eval_count=99), "message")),
    ("O07", ":latest", refusing(lambda sent: str(sent.get("model")).endswith(":latest"), 404)),
    ("O09", "not an object", whole(text_arguments, "message")),
    ("O10", "no text 'error'", whole(lambda data: data.update(error={"message": "no"}), "error")),
    ("O11", "done_reason", whole(lambda data: data.update(done_reason="stop"), "message")),
    ("O12", "think: false", refusing(lambda sent: "think" in sent)),
    ("O13", "no text 'error'", whole(lambda data: {"error": None}, "error")),
]


def some_vectors(sent: Sent) -> dict[str, Any]:
    """An answer of a server that takes everything."""
    given = sent.get("input")
    number = len(given) if isinstance(given, list) and given else 1
    data = [{"object": "embedding", "index": index, "embedding": [0.6, 0.8]} for index in range(number)]
    return {"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": 3, "total_tokens": 3}}


def embedded(change: Callable[[Sent, list[dict[str, Any]]], Any]) -> Callable[[Sent, Any], Any]:
    """A fault of vectors: ``change`` gets the items."""

    def fault(sent: Sent, data: Any) -> Any:
        if isinstance(data, dict) and "data" in data and "input" in sent:
            change(sent, data["data"])
        return data

    return fault


def doubled(sent: Sent, items: list[dict[str, Any]]) -> None:
    for item in items:
        if isinstance(item["embedding"], list):
            item["embedding"] = [2 * one for one in item["embedding"]]


def beside_others(sent: Sent, items: list[dict[str, Any]]) -> None:
    if len(items) > 1:
        items[0]["embedding"] = items[-1]["embedding"]


EMBEDDINGS: list[tuple[str, str, Callable[[Sent, Any], Any]]] = [
    ("E01", "usage is", whole(lambda data: data.update(usage={"prompt_tokens": 0, "total_tokens": 0}), "data")),
    ("E02", "has the length 2.0", embedded(doubled)),
    ("E03", "the indexes of four texts are [3, 2, 1, 0]", embedded(lambda sent, items: items.reverse())),
    ("E04", "beside a long one", embedded(beside_others)),
    (
        "E05",
        "and three times 3",
        whole(lambda data: data.update(usage={"prompt_tokens": 3, "total_tokens": 3}), "data"),
    ),
    ("E06", "gives list", lambda sent, data: some_vectors(sent) if "input" in sent else data),
    ("E07", "refused", refusing(lambda sent: isinstance(sent.get("input"), list) and sent["input"][0] == 5)),
    ("E08", "the input ''", lambda sent, data: some_vectors(sent) if "error" in data else data),
    ("E09", "without an error object", lambda sent, data: some_vectors(sent) if "error" in data else data),
    ("E10", "gives 32 numbers", embedded(lambda sent, items: items[0].update(embedding=[0.1] * 32))),
    ("E12", "was answered with 400", refusing(lambda sent: sent.get("model") == "no-such-model")),
    ("E13", "not sorted", whole(lambda data: data["results"].reverse(), "results")),
]
FAULTS = [
    (api, *fault)
    for api, faults in (
        ("responses", RESPONSES),
        ("messages", MESSAGES),
        ("ollama", OLLAMA),
        ("embeddings", EMBEDDINGS),
    )
    for fault in faults
]


@pytest.mark.parametrize(("api", "number", "detail", "fault"), FAULTS, ids=[f"{one[1]}-{one[2]}" for one in FAULTS])
def test_a_fault_is_caught(good: str, api: str, number: str, detail: str, fault: Callable[[Sent, Any], Any]) -> None:
    with faulty(good, fault) as url:
        found = not_passed(url, api, "embedder" if api == "embeddings" else "scripted", (number,))

    assert found.keys() == {number}
    assert found[number].startswith("failed: ") or detail == "refused"
    assert detail in found[number]


def test_command_has_the_api_as_an_option(good: str) -> None:
    asked = ["conform", good, "--key", KEY, "--model", "scripted"]
    passed = CliRunner().invoke(main, [*asked, "--api", "messages", "--only", "M01"])
    unknown = CliRunner().invoke(main, [*asked, "--api", "ollama", "--only", "M01"])

    assert (passed.exit_code, unknown.exit_code) == (0, 2)
    assert "1 passed" in passed.output and "O01" in unknown.output


def test_every_check_has_a_number_and_one_sentence() -> None:
    for api in (*APIS, "embeddings"):
        checks = CHECKS_BY_API[api]
        assert len({check.sentence for check in checks}) == len(checks)
        assert all(check.sentence.endswith(".") and check.behaviour[0] == api[0].upper() for check in checks)
        assert [check.behaviour for check in checks] == sorted(check.behaviour for check in checks)
