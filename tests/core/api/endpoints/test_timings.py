"""``timings_per_token``: llama-server's ``timings`` in chats and completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Endpoints

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_responses_and_chunks_have_timings(fake: Endpoints, path: str, options: dict[str, Any] | None) -> None:
    body = {**BODIES[path], "max_tokens": 4, "ignore_eos": True, "temperature": 0, "timings_per_token": True}
    whole = fake.answer(path, **body)
    *lines, _ = fake.stream(path, **body, stream_options=options)
    *chunks, last = [chunk["timings"] for chunk in map(json.loads, lines) if "timings" in chunk]

    assert whole["timings"]["predicted_n"] == last["predicted_n"] == 4
    assert last["prompt_n"] + last["cache_n"] == whole["usage"]["prompt_tokens"]
    assert last["predicted_ms"] > 0
    assert [one["predicted_n"] for one in chunks] == sorted(one["predicted_n"] for one in chunks) != []
    assert "timings" not in fake.answer(path, **{**body, "timings_per_token": False})
