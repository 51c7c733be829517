"""A hybrid model through the whole server: conversations and choices begin at checkpoints, also after a restart."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginehouse.settings.config import ModelSettings, Settings
from enginehouse_testkit.served import served

pytestmark = [pytest.mark.hf, pytest.mark.slow, pytest.mark.timeout(400)]  # starting a server takes 17 s

_TEMPLATE = (
    "{% for message in messages %}<start_of_turn>{{ message['role'] }}\n{{ message['content'] }}<end_of_turn>\n"
    "{% endfor %}<start_of_turn>assistant\n"
)
_SYSTEM = "You answer questions about mountains, rivers and the towns between them, in one line."
_QUESTION = "Which river passes through the largest town, and where does it end?"


def _ask(client: httpx.Client, *turns: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": _SYSTEM}]
    messages += [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]
    body = {"model": "hybrid", "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _said(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def _cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_conversation_begins_at_checkpoints(random_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(random_model("qwen3_5_text"), tmp_path / "hybrid"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    options = {"device": "cpu", "threads": 1}
    (tmp_path / "kept").mkdir()
    shape: dict[str, Any] = {"context": 512, "slots": 4, "prefix_cache_dir": str(tmp_path / "kept")}
    settings = Settings(models={"hybrid": ModelSettings(source=str(folder), backend="hf", options=options, **shape)})
    with served(settings, timeout=60) as client:
        first = _ask(client, _QUESTION, cache_prompt=False)
        assert _cached(first) == 0
        (said,) = _said(_ask(client, _QUESTION))
        assert [said] == _said(first)

        again = _ask(client, _QUESTION, n=2)
        assert _said(again) == [said, said]
        more = _ask(client, _QUESTION, said, "And the second largest?")
        other = _ask(client, "Name a mountain that no river begins at.")
        for turns, answer in (((_QUESTION,), again), ((_QUESTION, said, "And the second largest?"), more)):
            assert _cached(answer) > 40, turns
        assert 16 <= _cached(other) < _cached(again)
        fresh = _ask(client, _QUESTION, said, "And the second largest?", cache_prompt=False)
        assert _cached(fresh) == 0 and _said(fresh) == _said(more)
    with served(settings, timeout=60) as client:
        restarted = _ask(client, _QUESTION, said, "And the second largest?")
        assert _cached(restarted) > 40 and _said(restarted) == _said(more)
