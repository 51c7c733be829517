"""One server, every surface: what has a word in several APIs comes out equal through each of them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from attrs import evolve, field, frozen, mutable

from enginehouse.settings.config import ModelSettings, PluginsSettings, RouterSettings, ServerSettings, Settings
from enginehouse.settings.features import DrafterSettings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served
from enginehouse_testkit.waiting import wait_until

PLUGINS = (
    "anthropic",
    "compress",
    "llama_server",
    "llguidance",
    "ollama",
    "parsers",
    "responses",
    "router",
    "samplers",
    "speculate",
)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
THINKS = ["<think>", "plan", " A", "</think>", "\n\n"]
CALL = ["I look.", "\n", '<tool_call>\n{"name": "look", "arguments": {"at": "x', ' y"}}', "\n</tool_call>"]
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FUNCTION = {"name": "look", "description": "Look.", "parameters": LOOK}
SCHEMA = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False}
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose model ``script`` thinks, answers or calls, and whose model ``fake`` has a worker."""
    folder = tmp_path_factory.mktemp("surfaces")
    (folder / "t.jinja").write_text(TEMPLATE, encoding="utf-8")
    source = write_script(
        folder / "s.json", [*THINKS, "Answer", " 7"], replies={"You can call functions": [*THINKS, *CALL]}
    )
    repeating = ModelSettings(
        source="fake",
        backend="fake",
        isolation="thread",
        options={"step_delay_s": 0.005},
        defaults={"logit_bias": {"101": 100.0, "102": 100.0}},
    )
    models = {
        "script": ModelSettings(source=source, backend="scripted", chat_template=str(folder / "t.jinja")),
        "fake": ModelSettings(source="fake", backend="fake", slots=8, options={"step_delay_s": 0.02}),
        "plain": repeating,
        "gaps": evolve(repeating, options={"infill_tokens": ["<prefix>", "<suffix>", "<middle>"]}, defaults={}),
        "drafted": evolve(repeating, drafters=(DrafterSettings(name="prompt-lookup", options={"min_match": 1}),)),
        "slow": ModelSettings(source=write_script(folder / "l.json", [{"delay_s": 0.5}, "late"]), backend="scripted"),
    }
    settings = Settings(
        models=models,
        plugins=PluginsSettings(allow=PLUGINS),
        router=RouterSettings(strategy="rules", models=("script", "fake")),
        server=ServerSettings(ping_s=0.1),
    )
    with served(settings) as client:
        yield client


@mutable
class Said:
    """What a client has read."""

    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(factory=list)

    def call(self, name: str, arguments: Any) -> None:
        """Note a call."""
        self.calls.append({"name": name, "arguments": arguments})

    def done(self) -> Said:
        """Arguments that came as text are objects from now on."""
        for call in self.calls:
            if isinstance(call["arguments"], str):
                call["arguments"] = json.loads(call["arguments"])
        self.text = self.text.strip()
        return self


def read_chat(said: Said, data: dict[str, Any]) -> None:
    for choice in data.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or {}
        said.text += part.get("content") or ""
        said.thinking += part.get("reasoning_content") or ""
        for call in part.get("tool_calls") or ():
            if call["function"].get("name"):
                said.call(call["function"]["name"], "")
            said.calls[-1]["arguments"] += call["function"].get("arguments") or ""


def read_responses(said: Said, data: dict[str, Any]) -> None:
    if data.get("type") == "response.output_text.delta":
        said.text += data["delta"]
    items = data.get("output", [data["item"]] if data.get("type") == "response.output_item.done" else [])
    for item in items:
        text = "".join(part["text"] for part in item.get("content") or ())
        if item["type"] == "reasoning":
            said.thinking += text
        elif item["type"] == "function_call":
            said.call(item["name"], item["arguments"])
        elif "output" in data:
            said.text += text


def read_messages(said: Said, data: dict[str, Any]) -> None:
    for block in data.get("content", ()):
        said.text += block.get("text", "")
        said.thinking += block.get("thinking", "")
        if block["type"] == "tool_use":
            said.call(block["name"], block["input"])
    begun, delta = data.get("content_block", {}), data.get("delta", {})
    if begun.get("type") == "tool_use":
        said.call(begun["name"], "")
    said.text += delta.get("text", "")
    said.thinking += delta.get("thinking", "")
    if "partial_json" in delta:
        said.calls[-1]["arguments"] += delta["partial_json"]


def read_ollama(said: Said, data: dict[str, Any]) -> None:
    said.text += data["message"]["content"]
    said.thinking += data["message"].get("thinking", "")
    for call in data["message"].get("tool_calls", ()):
        said.call(call["function"]["name"], call["function"]["arguments"])


def read_text(said: Said, data: dict[str, Any]) -> None:
    said.text += data.get("content", "") + "".join(choice["text"] for choice in data.get("choices", ()))


@frozen
class Surface:
    """The words of one API. An empty one: the API has no word for it.

    Attributes:
        usual: the body of a short greedy request.
        tools, structured, thinks, words: fields of this name in the table of the documentation.
    """

    path: str
    read: Callable[[Said, dict[str, Any]], None]
    usual: dict[str, Any]
    tools: dict[str, Any] = field(factory=dict)
    structured: dict[str, Any] = field(factory=dict)
    thinks: dict[str, Any] = field(factory=dict)
    words: dict[str, Any] = field(factory=dict)

    def ask(self, client: httpx.Client, model: str, *, stream: bool, **fields: Any) -> Said:
        """Return what a client reads in the end."""
        body = {**self.usual, **fields, "model": model, "stream": stream}
        said = Said()
        if stream:
            for data in self.events(client, body):
                self.read(said, data)
            return said.done()
        answer = client.post(self.path, json=body, headers={"x-enginehouse-details": "true"})
        assert answer.status_code == 200, answer.text
        assert "x-enginehouse-ignored" not in answer.headers
        times = answer.json()["enginehouse"]["timings_ms"]
        assert 0 < times["first_token"] <= times["total"]
        assert answer.headers.get("x-octomil-routed-model") == ("script" if model == "auto" else None)
        self.read(said, answer.json())
        return said.done()

    def details(self, client: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
        """Return the member ``enginehouse`` of a response."""
        body = {**self.usual, **fields, "model": model, "stream": False}
        answer = client.post(self.path, json=body, headers={"x-enginehouse-details": "true"})
        assert answer.status_code == 200, answer.text
        details: dict[str, Any] = answer.json()["enginehouse"]
        return details

    def events(self, client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream."""
        with client.stream("POST", self.path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers.get("x-octomil-routed-model") == ("script" if body["model"] == "auto" else None)
            for line in answer.iter_lines():
                data = line.removeprefix("data: ").strip()  # a ping is a space
                if data.startswith("{"):
                    yield json.loads(data)


PARAMETERS = {"seed": 1, "stop": ["stop"], "stop_regex": "st.p", "repeat_last_n": 9, "typical_p": 0.9} | {
    "post_sampling_probs": True
}
TIMED = {"timings_per_token": True}
COMMON = {**PARAMETERS, "compression": False} | {
    "cache_prompt": True,
    "prompt_cache_key": "k",
    "priority": 0,
}
MESSAGES = [{"role": "user", "content": "Go on, 4."}]


TOOL = {"type": "function", "function": FUNCTION}
FORM = {"type": "json_schema", "name": "t", "schema": SCHEMA}
SURFACES = {
    "chat": Surface(
        "/v1/chat/completions",
        read_chat,
        {"messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS},
        {"tools": [TOOL]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}},
        {"enable_thinking": True},
        COMMON
        | {"logprobs": True, "top_logprobs": 1, "thinking_budget": 9, "n": 1, "parallel_tool_calls": False}
        | {"tools": [TOOL], "tool_choice": "auto", "return_progress": False, "grammar": None, "prediction": None}
        | {"reasoning_effort": "low", "return_token_ids": True}
        | TIMED,
    ),
    "responses": Surface(
        "/v1/responses",
        read_responses,
        {"input": "Go on, 4.", "temperature": 0, "max_output_tokens": NUM_TOKENS},
        {"tools": [{"type": "function", **FUNCTION}]},
        {"text": {"format": FORM}},
        {"reasoning": {"effort": "high"}},
        COMMON
        | {"top_logprobs": 1, "include": ["message.output_text.logprobs"], "thinking_budget": 9, "instructions": "Go."}
        | {"parallel_tool_calls": False, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto"}
        | {"enable_thinking": True, "truncation": "auto"}
        | TIMED,
    ),
    "messages": Surface(
        "/v1/messages",
        read_messages,
        {"messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS},
        {"tools": [{"name": "look", "description": "Look.", "input_schema": LOOK}]},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"thinking": {"type": "adaptive"}},
        {name: value for name, value in PARAMETERS.items() if name not in ("stop", "post_sampling_probs")}
        | {"stop_sequences": ["stop"], "compression": False, "system": "Go."}
        | TIMED
        | {"thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "low"}}
        | {"tools": [{"name": "look", "input_schema": LOOK}]}
        | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
    "ollama": Surface(
        "/api/chat",
        read_ollama,
        {"messages": MESSAGES, "options": {"temperature": 0, "num_predict": NUM_TOKENS}},
        {"tools": [TOOL]},
        {"format": SCHEMA},
        {"think": True},
        {"options": {**PARAMETERS, "num_predict": 8}, "compression": False}
        | {"logprobs": True, "top_logprobs": 1}
        | TIMED,
    ),
    "completions": Surface(
        "/v1/completions",
        read_text,
        {"prompt": "Go on, 4.", "temperature": 0, "max_tokens": NUM_TOKENS},
        structured={"json_schema": SCHEMA},
    ),
    "llama-server": Surface(
        "/completion",
        read_text,
        {"prompt": "Go on, 4.", "temperature": 0, "n_predict": NUM_TOKENS},
        structured={"json_schema": SCHEMA},
        words={**PARAMETERS, "compression": False, "cache_prompt": True}
        | {
            "n_probs": 1,
            "n_cmpl": 1,
            "return_progress": False,
            "timings_per_token": True,
            "grammar": "",
        },
    ),
}
CHATS = [name for name, surface in SURFACES.items() if surface.tools]


def of_user(content: Any, **more: Any) -> dict[str, Any]:
    """The members of a chat of one message."""
    return {"messages": [{"role": "user", "content": content, **more}]}


PROMPTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "chat": of_user,
    "responses": lambda text: {"input": text},
    "messages": of_user,
    "ollama": of_user,
    "completions": lambda text: {"prompt": text},
    "llama-server": lambda text: {"prompt": text},
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP4z8AAAAMBAQD3A0FDAAAAAElFTkSuQmCC"
LINK = f"data:image/png;base64,{PIXEL}"
BASE64 = {"type": "base64", "media_type": "image/png", "data": PIXEL}
IMAGES = {
    "chat": of_user([{"type": "image_url", "image_url": {"url": LINK}}]),
    "responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": LINK}]}]},
    "messages": of_user([{"type": "image", "source": BASE64}]),
    "ollama": of_user("", images=[PIXEL]),
}
"""The members with an image, for the APIs that have one."""
either_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@either_way
@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("model", ["script", "auto"])
def test_thinking_and_a_call_come_out_equal(client: httpx.Client, name: str, model: str, stream: bool) -> None:
    surface = SURFACES[name]

    called = surface.ask(client, model, stream=stream, **surface.tools, **surface.thinks)
    assert called == Said("I look.", "plan A", [{"name": "look", "arguments": {"at": "x y"}}])
    assert surface.ask(client, model, stream=stream, **surface.thinks) == Said("Answer 7", "plan A")


@either_way
@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("chat", {"stop_regex": "l.n|er? \\d"}),
        ("responses", {"stop_regex": ["l.n", "er? \\d"]}),
        ("messages", {"stop_regex": ["l.n", "er? \\d"]}),
        ("ollama", {"options": {"stop_regex": "l.n|er? \\d"}}),
    ],
)
def test_an_expression_ends_the_answer_but_not_the_thinking(
    client: httpx.Client, name: str, stop: dict[str, Any], stream: bool
) -> None:
    """The thinking holds a match, too."""
    surface = SURFACES[name]

    assert surface.ask(client, "script", stream=stream, **surface.thinks, **stop) == Said("Answ", "plan A")


@pytest.mark.parametrize("name", SURFACES)
def test_words_of_the_table_have_an_effect(client: httpx.Client, name: str) -> None:
    """None is listed as ignored, or refused."""
    assert SURFACES[name].ask(client, "script", stream=False, **SURFACES[name].words).text


@pytest.mark.parametrize("name", SURFACES)
def test_streams_report_the_prefill_and_say_the_same(client: httpx.Client, name: str) -> None:
    surface = SURFACES[name]
    body = {**surface.usual, "model": "fake", "stream": True}
    plain, timed, progress = Said(), Said(), []
    for data in surface.events(client, body):
        surface.read(plain, data)
    for data in surface.events(client, {**body, "return_progress": True}):
        surface.read(timed, data)
        if "prompt_progress" in data:
            progress.append(data["prompt_progress"])

    assert timed == plain
    assert [one["processed"] for one in progress] == sorted({one["processed"] for one in progress})
    assert progress[-1]["processed"] == progress[-1]["total"] > progress[-1]["cache"]


@pytest.mark.parametrize("name", SURFACES)
def test_progress_without_a_stream_is_refused_or_listed_as_ignored(client: httpx.Client, name: str) -> None:
    surface = SURFACES[name]
    answer = client.post(
        surface.path, json={**surface.usual, "model": "script", "stream": False, "return_progress": True}
    )

    if name in ("chat", "completions"):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "return_progress"
    else:
        assert answer.status_code == 200
        assert answer.headers["x-enginehouse-ignored"] == "return_progress"


UNUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("chat", {"post_sampling_probs": True}, ["post_sampling_probs"]),
    ("chat", {"post_sampling_probs": True, "logprobs": True}, []),
    ("chat", {"post_sampling_probs": False}, []),
    ("completions", {"post_sampling_probs": True}, ["post_sampling_probs"]),
    ("responses", {"post_sampling_probs": True}, ["post_sampling_probs"]),
    ("responses", {"post_sampling_probs": True, "top_logprobs": 1}, []),
    ("messages", {"post_sampling_probs": True}, ["post_sampling_probs"]),
    ("messages", {"thinking": {"type": "adaptive", "budget_tokens": 9}}, ["thinking.budget_tokens"]),
    ("ollama", {"options": {"post_sampling_probs": True}}, ["options.post_sampling_probs"]),
    ("ollama", {"top_logprobs": 3}, ["top_logprobs"]),
    ("ollama", of_user("Hi", thinking="x", tool_name="y"), ["messages[0].thinking", "messages[0].tool_name"]),
    ("llama-server", {"post_sampling_probs": True}, ["post_sampling_probs"]),
    ("llama-server", {"n_predict": 4, "max_tokens": 5, "n_probs": 1, "logprobs": 1}, ["max_tokens"]),
]
"""What acts only together with another member, or gives way to one: an API, a body, and the members that it lists."""


@pytest.mark.parametrize(("name", "fields", "unused"), UNUSED)
def test_members_that_cannot_act_are_listed_as_ignored(
    client: httpx.Client, name: str, fields: dict[str, Any], unused: list[str]
) -> None:
    surface = SURFACES[name]
    answer = client.post(surface.path, json={**surface.usual, "model": "script", "stream": False, **fields})

    assert answer.status_code == 200, answer.text
    listed = answer.headers.get("x-enginehouse-ignored", "")
    assert [one for one in listed.split(", ") if one] == unused


@pytest.mark.parametrize("name", SURFACES)
def test_streams_have_timings_and_say_the_same(client: httpx.Client, name: str) -> None:
    surface = SURFACES[name]
    body = {**surface.usual, "model": "fake", "stream": True}
    plain, timed, counts, last = Said(), Said(), [], {}
    for data in surface.events(client, body):
        surface.read(plain, data)
    for data in surface.events(client, {**body, **TIMED}):
        before = len(timed.text)
        surface.read(timed, data)
        last = data.get("response", {}).get("timings") or data.get("timings") or last
        if len(timed.text) > before:
            counts.append(data["timings"]["predicted_n"])

    assert timed == plain
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] <= NUM_TOKENS
    assert last["predicted_n"] == NUM_TOKENS


@either_way
@pytest.mark.parametrize("name", [name for name in SURFACES if name not in CHATS])
def test_texts_are_routed_as_chats_are(client: httpx.Client, name: str, stream: bool) -> None:
    surface = SURFACES[name]

    assert surface.ask(client, "auto", stream=stream) == surface.ask(client, "script", stream=stream)


def test_a_gap_is_filled_equally(client: httpx.Client) -> None:
    """Other files and ``prompt`` come before the gap."""
    file, options = {"filename": "x.py", "text": "one"}, {"temperature": 0, "num_predict": 8}
    usual = {"prompt": "x.py\none\ndef f", "suffix": "return 4", "temperature": 0, "max_tokens": 8}
    parts = {"input_extra": [file], "input_prefix": "def", "prompt": " f", "input_suffix": "return 4"}

    def ask(path: str, **body: Any) -> Any:
        answer = client.post(path, json={"model": "gaps", "stream": False, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    expected = ask("/v1/completions", **usual)
    text, num_tokens = expected["choices"][0]["text"], expected["usage"]["prompt_tokens"]
    infill = ask("/infill", **parts, temperature=0, n_predict=8)
    generated = ask("/api/generate", prompt=usual["prompt"], suffix=usual["suffix"], options=options)

    assert num_tokens > ask("/v1/completions", **{**usual, "suffix": None})["usage"]["prompt_tokens"] + 8
    assert (infill["content"], infill["tokens_evaluated"]) == (text, num_tokens)
    assert (generated["response"], generated["prompt_eval_count"]) == (text, num_tokens)


@pytest.mark.parametrize("name", SURFACES)
def test_prompts_are_compressed(client: httpx.Client, name: str) -> None:
    long = PROMPTS[name]("The same long paragraph, said again and again. " * 3 + "\n\n" + "Go on, 4.")
    told = SURFACES[name].details(client, "script", **long, compression={"method": "lossless"})

    assert told["compression"]["method"] == "lossless"


@pytest.mark.parametrize("name", SURFACES)
def test_drafts_are_used_and_change_nothing(client: httpx.Client, name: str) -> None:
    """Whether a step has drafts depends on measured times, so that one request may do without."""
    surface, repeated = SURFACES[name], PROMPTS[name]("one two three " * 12)

    def has_drafted() -> bool:
        told = surface.details(client, "drafted", **repeated)
        return bool(told["optimizations"]["drafted_tokens"] > 0)

    wait_until(has_drafted, "a response with drafts")
    plain, drafted = (surface.ask(client, model, stream=True, **repeated) for model in ("plain", "drafted"))
    assert drafted == plain


@pytest.mark.parametrize("name", SURFACES)
def test_pings_come_while_the_prompt_is_read(client: httpx.Client, name: str) -> None:
    body = {**SURFACES[name].usual, "model": "slow", "stream": True}
    with client.stream("POST", SURFACES[name].path, json=body) as answer:
        before, _, _ = b"".join(answer.iter_raw()).partition(b"late")
    ping = {"messages": b"event: ping", "ollama": b"  "}.get(name, b": ping")

    assert before.count(ping) >= 1


class Eye(BaseHTTPRequestHandler):
    """A server of a model that takes images: says how many it got."""

    def do_GET(self) -> None:
        self.say(b'{"object":"list","data":[{"id":"eye","owned_by":"somebody"}]}', "application/json")

    def do_POST(self) -> None:
        data = json.loads(self.rfile.read(int(self.headers["content-length"])))
        found = json.dumps(data["messages"]).count(PIXEL)
        choice = {"index": 0, "delta": {"content": f"{found} image"}, "finish_reason": None}
        chunks = [{"choices": [choice]}, {"choices": [{**choice, "delta": {}, "finish_reason": "stop"}]}]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self.say("".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")

    def say(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def seeing() -> Iterator[httpx.Client]:
    """A server whose model takes images."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Eye)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
    source = f"http://127.0.0.1:{server.server_port}"
    models = {"eye": ModelSettings(source=source, backend="remote", options={"images": True})}
    with served(Settings(models=models, plugins=PluginsSettings(allow=(*PLUGINS, "remote")))) as client:
        yield client
    server.shutdown()
    server.server_close()


@pytest.mark.remote
@either_way
@pytest.mark.parametrize("name", IMAGES)
def test_images_reach_a_model_that_takes_them(seeing: httpx.Client, name: str, stream: bool) -> None:
    assert SURFACES[name].ask(seeing, "eye", stream=stream, **IMAGES[name]).text == "1 image"


TESTED = {
    "images": list(IMAGES),
    "tools": CHATS,
    "structured output": list(SURFACES),
    "thinking": CHATS,
    "routing": list(SURFACES),
    "compression": list(SURFACES),
    "drafts": list(SURFACES),
    "resumption after a crash of a worker": list(SURFACES),
    "progress of the prompt": list(SURFACES),
}
"""Rows of the table of the documentation to the APIs for which they are tested here."""


def test_the_table_of_the_documentation_says_what_is_tested() -> None:
    text = (Path(__file__).parents[2] / "docs" / "surfaces.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    names = ["chat", "responses", "messages", "ollama", "llama-server"]
    said = {row[0]: [name for name, cell in zip(names, row[1:], strict=True) if cell != "-"] for row in rows}

    for row, tested in TESTED.items():
        assert said[row] == [name for name in names if name in tested], row


@pytest.mark.llguidance
@either_way
@pytest.mark.parametrize("name", SURFACES)
def test_structured_output_comes_out_equal(client: httpx.Client, name: str, stream: bool) -> None:
    said = SURFACES[name].ask(client, "fake", stream=stream, **SURFACES[name].structured)

    assert json.loads(said.text) == {"ok": True}


@pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")
def test_answers_go_on_over_a_killed_worker(client: httpx.Client) -> None:
    begun: dict[str, int] = {}

    def follow(name: str) -> Said:
        surface, said = SURFACES[name], Said()
        for data in surface.events(client, {**surface.usual, "model": "fake", "stream": True}):
            surface.read(said, data)
            begun[name] = len(said.text)
        return said.done()

    with ThreadPoolExecutor(len(SURFACES)) as pool:
        undisturbed = dict(zip(SURFACES, pool.map(follow, SURFACES), strict=True))
        begun.clear()
        answers = {name: pool.submit(follow, name) for name in SURFACES}
        wait_until(lambda: all(begun.get(name) for name in SURFACES), "the beginning of every stream")
        is_early = not any(answer.done() for answer in answers.values())
        for child in psutil.Process().children():
            if "enginehouse.workers" in str(child.cmdline()):
                child.kill()
        said = {name: answer.result() for name, answer in answers.items()}

    assert is_early
    assert said == undisturbed
    assert len({str(undisturbed[name]) for name in CHATS}) == 1
    assert undisturbed["llama-server"] == undisturbed["completions"]
