"""Log-probabilities of tokens that are part of a character, at every place where the limit may cut it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from enginehouse.settings.config import ModelSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

DRAWN = [b"a", b"\x80", *(bytes([byte]) for byte in "é🧑".encode()), b"b", b"\xd8"]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    source = write_script(tmp_path_factory.mktemp("cut") / "script.json", [{"bytes": [*token]} for token in DRAWN])
    models = {"m": ModelSettings(source=source, backend="scripted", tool_parser="default")}
    with served(Settings(models=models), timeout=30) as connected:
        yield connected


@pytest.mark.parametrize("num_tokens", range(1, len(DRAWN) + 1))
@pytest.mark.parametrize("api", ["completions", "chat", "chat with tools"])
def test_each_token_has_its_entry(client: httpx.Client, api: str, num_tokens: int) -> None:
    body = {"model": "m", "max_tokens": num_tokens}
    if api == "completions":
        answer = client.post("/v1/completions", json={**body, "prompt": "x", "logprobs": 0}).json()
        num_entries = len(answer["choices"][0]["logprobs"]["tokens"])
    else:
        body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        tools = {"tools": [TOOL]} if api == "chat with tools" else {}
        answer = client.post("/v1/chat/completions", json={**body, **tools}).json()
        entries = answer["choices"][0]["logprobs"]["content"]
        assert [bytes(entry["bytes"]) for entry in entries] == DRAWN[:num_tokens]
        num_entries = len(entries)

    assert answer["usage"]["completion_tokens"] == num_entries == num_tokens
