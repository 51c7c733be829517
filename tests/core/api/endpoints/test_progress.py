"""``return_progress``: the prefill of a prompt, as it goes on."""

from __future__ import annotations

import json

import pytest

from .conftest import Endpoints

PROMPT = "word " * 150


def text_of(chunk: dict) -> str | None:
    (choice,) = chunk["choices"] or [{}]
    return choice.get("text") or choice.get("delta", {}).get("content")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_reports_the_prefill(fake: Endpoints, path: str) -> None:
    def events(salt: str) -> list[dict]:
        body = {"prompt": PROMPT, "max_tokens": 2, "return_progress": True, "cache_salt": salt}
        *chunks, _ = fake.stream(path, **body, stream_options={"include_usage": True})
        return [json.loads(chunk) for chunk in chunks]

    first, again = events(path), events(path)
    counts = [[chunk["prompt_progress"] for chunk in run if "prompt_progress" in chunk] for run in (first, again)]
    begins = next(number for number, chunk in enumerate(first) if text_of(chunk))

    assert not any("prompt_progress" in chunk for chunk in first[begins:])
    for run, progress in zip((first, again), counts, strict=True):
        usage = run[-1]["usage"]
        assert {one["total"] for one in progress} == {usage["prompt_tokens"]}
        assert [one["processed"] for one in progress] == sorted({one["processed"] for one in progress})
        assert progress[-1]["processed"] == usage["prompt_tokens"]
        assert progress[-1]["cache"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert counts[0][0]["cache"] == 0 < counts[1][0]["cache"]


def test_only_streams_report_it(fake: Endpoints) -> None:
    assert fake.refusal("/v1/completions", prompt="a", return_progress=True)["param"] == "return_progress"
