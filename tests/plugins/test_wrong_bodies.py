"""One server, every surface: a wrong value at any place of a body is the client's error, or has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

PLUGINS = (
    "anthropic",
    "compress",
    "llama_server",
    "llguidance",
    "ollama",
    "parsers",
    "pooling",
    "responses",
    "samplers",
)
CALLING = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if tools %}<tool_call>{% endif %}"
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Look.", "parameters": LOOK, "strict": False}
TOOL = {"type": "function", "function": FUNCTION}
PIXEL = "iVBORw0KGgo="
PICTURE = f"data:image/png;base64,{PIXEL}"
SHARED = {
    "temperature": 0.5,
    "seed": 1,
    "stop": ["x"],
    "stop_regex": "x+",
    "samplers": ["typical_p", "top_k", "temperature"],
    "top_k": 4,
} | {
    "logit_bias": {"5": 1.0},
    "typical_p": 0.9,
    "compression": {"method": "lossless"},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Go."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
        ],
        "max_tokens": 3,
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
        "chat_template_kwargs": {"a": 1},
        **SHARED,
    },
    "/v1/completions": {"prompt": ["Hi"], "max_tokens": 3, "logprobs": 1, "echo": False, "suffix": "", **SHARED},
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "seen"}]},
            {"type": "custom_tool_call", "call_id": "d", "name": "free", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
        ],
        "max_output_tokens": 3,
        "tools": [
            {"type": "function", **FUNCTION},
            {"type": "custom", "name": "free", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
            {"type": "namespace", "name": "ns", "tools": [{"type": "function", **FUNCTION}]},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        **SHARED,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "Go.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "s"}],
                        "is_error": True,
                    },
                    {
                        "type": "document",
                        "title": "T",
                        "source": {"type": "text", "media_type": "text/plain", "data": "d"},
                    },
                    {
                        "type": "search_result",
                        "source": "s",
                        "title": "t",
                        "content": [{"type": "text", "text": "x"}],
                    },
                ],
            },
        ],
        "max_tokens": 3,
        "tools": [{"name": "look", "description": "Look.", "input_schema": LOOK, "cache_control": None}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 3, "display": "omitted"},
        "output_config": {"effort": "low"},
        "metadata": {"user_id": "u"},
        "stop_sequences": ["x"],
        **{name: value for name, value in SHARED.items() if name != "stop"},
    },
    "/api/chat": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [{"function": {"name": "look"}}]},
            {"role": "tool", "content": "seen", "tool_name": "look"},
        ],
        "tools": [TOOL],
        "keep_alive": "5m",
        "options": {**SHARED, "num_predict": 3, "num_ctx": 100},
        "logprobs": True,
        "top_logprobs": 1,
    },
    "/api/generate": {"prompt": "Hi", "system": "Go.", "suffix": "", "raw": False, "options": {**SHARED}},
    "/completion": {"prompt": ["Hi"], "n_predict": 3, "n_probs": 1, "n_cmpl": 1}
    | {"response_fields": ["content"], "lora": [], **SHARED},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "t", "filename": "f"}]},
    "/v1/embeddings": {"model": "embed", "input": ["Hi", [5, 6]], "encoding_format": "base64", "dimensions": 8}
    | {"normalize": True, "prompt_name": "query", "add_special_tokens": True, "priority": 0, "user": "u"}
    | {"truncate": "end", "truncation_direction": "right", "truncate_prompt_tokens": 9},
    "/embedding": {"model": "embed", "content": "Hi", "embd_normalize": 2, "input_type": "query"},
    "/embed": {"model": "embed", "inputs": ["Hi"], "truncate": True},
    "/v2/embed": {"model": "embed", "texts": ["Hi"], "embedding_types": ["float"], "output_dimension": 8},
    "/v1/rerank": {"model": "rerank", "query": "Hi", "documents": ["a", {"text": "b"}], "top_n": 1}
    | {"return_documents": True, "raw_scores": True, "max_tokens_per_doc": 5},
    "/v1/score": {"model": "rerank", "text_1": ["a"], "text_2": ["b", "c"], "use_activation": False},
    "/v1/classify": {"model": "classify", "input": ["Hi"], "raw_scores": False},
    "/predict": {"model": "classify", "inputs": [["Hi"]]},
    "/api/embed": {"model": "embed", "input": ["Hi"], "truncate": True, "options": {"num_ctx": 5}, "dimensions": 8},
    "/api/embeddings": {"model": "embed", "prompt": "Hi", "keep_alive": "5m"},
}
MORE: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": LOOK}}},
        {"structured_outputs": {"choice": ["a"], "json_object": False}},
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "Hi"}]}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png,{PIXEL}"}}]}
            ]
        },
    ],
    "/v1/responses": [
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": LOOK}}},
        {"tool_choice": {"type": "custom", "name": "free"}},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}]},
    ],
    "/v1/messages": [
        {"output_config": {"format": {"type": "json_schema", "schema": LOOK}}},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
                    ],
                }
            ]
        },
    ],
    "/api/chat": [
        {"format": LOOK},
        {"think": "low"},
        {"messages": [{"role": "user", "content": "Hi", "images": [PIXEL]}]},
    ],
    "/completion": [
        {"json_schema": LOOK},
        {"prompt": {"prompt_string": "x"}},
        {"prompt": [[1, "x"]], "compression": False},
        {"logit_bias": [["x", False]]},
    ],
}
"""Members with which the script does not answer; each is changed alone."""
WRONG: tuple[Any, ...] = (None, True, -1, 2**70, 1.5, "", "\u0000\u2028\\", [], [{}], {"type": []})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a body."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a body with another value at a place."""
    if not path:
        return value
    copy = dict(body) if isinstance(body, dict) else list(body)
    copy[path[0]] = changed(body[path[0]], path[1:], value)
    return copy


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with a script, which answers at once and follows no constraint, and a small queue."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "t.jinja").write_text(CALLING, encoding="utf-8")
    source = write_script(folder / "s.json", ["Answer", " 7"])
    models = {
        "script": ModelSettings(source=source, backend="scripted", chat_template=str(folder / "t.jinja")),
        "fake": ModelSettings(source="fake", backend="fake", isolation="thread"),
    }
    for task in ("embed", "rerank", "classify"):
        options = {"task": task, "dimension_choices": [8], "prompts": {"query": "query: "}}
        models[task] = ModelSettings(source="fake-pooler", backend="fake-pooler", isolation="thread", options=options)
    limits = LimitsSettings(max_queue=20, max_choices=4)
    with served(Settings(models=models, plugins=PluginsSettings(allow=PLUGINS), limits=limits)) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_value_at_any_place_is_no_fault_of_the_server(client: httpx.Client, path: str) -> None:
    """Nor a silence: an error says what is wrong. The script has no tokens for gaps, so that it refuses each."""
    body = {"model": "script", "stream": False, **BODIES[path]}
    bodies = [body, *({**body, **more} for more in MORE.get(path, ()))]
    cases = [changed(body, place, value) for place in places(body) for value in WRONG]
    for more in MORE.get(path, ()):
        cases += [{**body, **changed(more, place, value)} for place in places(more) for value in WRONG]
    faults, statuses = [], []
    for case in (*bodies, *cases):
        answer = client.post(path, json=case)
        statuses.append(answer.status_code)
        if answer.status_code >= 500 or (answer.status_code >= 400 and len(answer.text) < 20):
            faults.append((case, answer.status_code, answer.text))

    assert statuses[0] == 200 or path == "/infill", client.post(path, json=body).text
    assert not faults, f"{len(faults)} of {len(cases)}: {faults[:9]}"


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"n": 2**31}, "n: "),
        ("/v1/completions", {"best_of": 2**31}, "best_of: "),
        ("/v1/completions", {"prompt": ["x"] * 21}, "prompt: "),
        ("/v1/responses", {"stop_regex": ["x"] * 17}, "stop_regex: "),
        ("/v1/messages", {"stop_sequences": ["x"] * 65}, "stop_sequences: "),
        ("/api/chat", {"options": {"stop": ["x"] * 17}}, "options.stop: "),
        (
            "/api/chat",
            {"options": {"logit_bias": {str(one): 1 for one in range(70_000)}}},
            "options.logit_bias: ",
        ),
        ("/completion", {"n_cmpl": 2**31}, "n_cmpl: "),
        ("/completion", {"n": 2**31, "n_cmpl": None}, "n_cmpl: "),
        ("/completion", {"prompt": ["x"] * 21}, "prompt: "),
        ("/infill", {"n_cmpl": 5}, "n_cmpl: "),
    ],
)
def test_what_a_small_body_could_make_large_is_refused(
    client: httpx.Client, path: str, fields: dict[str, Any], named: str
) -> None:
    answer = client.post(path, json={**BODIES[path], "model": "script", "stream": False, **fields})

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error if isinstance(error, str) else error["message"]).startswith(named)
