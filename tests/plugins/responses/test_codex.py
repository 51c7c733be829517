"""Codex's requests, in the shape of its version 0.171: a command, a patch, and a prefix that stays in the cache.

`tests/outside` runs Codex itself; this needs nothing but the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.served import served

from .harness import APPLY_PATCH, Client

LONG = "You are a coding agent. You and the user share a workspace. " * 20
FIELDS: dict[str, Any] = {
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a22810-9b7f-7dd3-94eb-e64485c7e502",
    "text": {"verbosity": "low"},
    "client_metadata": {"session_id": "s", "thread_id": "t"},
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files. This is a FREEFORM tool.",
            "format": {"type": "grammar", "syntax": "lark", "definition": APPLY_PATCH},
        },
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Tools for agents.",
            "tools": [{"type": "function", "name": "close_agent", "strict": False, "parameters": {"type": "object"}}],
        },
        {"type": "tool_search", "execution": "client", "description": "Searches tools.", "parameters": {}},
        {"type": "web_search", "external_web_access": True, "search_content_types": ["text", "image"]},
    ],
}


def _message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": f"msg_{len(text)}", "role": role, "content": [{"type": kind, "text": text}]}


FIRST = [
    _message("developer", LONG),
    _message("developer", "<skills_instructions>A skill is a folder.</skills_instructions>"),
    _message("user", "<environment_context><cwd>/work</cwd></environment_context>"),
    _message("user", "Greet, then add a file."),
]
SECOND = [
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "AAAA"},
    {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "call_1", "id": "fc_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "alpha"},
    {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_2",
        "name": "apply_patch",
        "input": "*** Begin",
    },
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Success."},
]


@pytest.fixture(scope="module")
def computing() -> Iterator[Client]:
    """A model that computes nonsense, behind the real engine and its prefix cache."""
    model = ModelSettings(source="fake", backend="fake", options={"context": 16384})
    plugins = PluginsSettings(allow=("parsers", "responses"))
    with served(Settings(models={"fake": model}, plugins=plugins)) as http:
        yield Client(http)


def test_the_next_turn_finds_its_prefix_in_the_cache(computing: Client) -> None:
    fields = {**FIELDS, "tools": [FIELDS["tools"][0], *FIELDS["tools"][2:]], "max_output_tokens": 3}
    first = computing.stream("fake", FIRST, **fields)
    second = computing.stream("fake", [*FIRST, *SECOND[:3]], **fields)

    assert first.headers["x-enginehouse-ignored"] == "client_metadata, tools[2], tools[3]"
    num_prompt = first.last["usage"]["input_tokens"]
    usage = second.last["usage"]
    assert usage["input_tokens"] > num_prompt
    assert usage["input_tokens_details"]["cached_tokens"] > 0.95 * num_prompt
    assert sum(usage["input_tokens_details"].values()) == usage["input_tokens"]


def test_a_whole_session_is_taken(client: Client) -> None:
    stream = client.stream("patch", [*FIRST, *SECOND, _message("assistant", "Done.")], **FIELDS)

    assert [item["type"] for item in stream.last["output"]] == ["custom_tool_call"] and stream.is_done
