"""What grows with a request's body or its answer is done beside the event loop, so that streams go on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from enginehouse.api.generation.assembly import Choice
from enginehouse.api.openai import tokens
from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openai.chat_assembler import ChatAssembler
from enginehouse.api.openai.completion_assembler import CompletionAssembler
from enginehouse.api.openai.completions import CompletionBody
from enginehouse.contract.surface import Piece
from enginehouse.contract.types import TokenLogprob
from enginehouse.pipeline import prompting
from enginehouse.serving.background import run_in_thread

from .conftest import Endpoints

MESSAGES = [{"role": "user", "content": "Hi"}]
LARGE = {"pad": "x" * 300_000}  # no field that anybody knows, so it changes nothing else


def is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bool]]:
    """Name of what is done to whether each time was on the event loop."""
    seen: dict[str, list[bool]] = {}

    def spy(name: str, done: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            seen.setdefault(name, []).append(is_on_loop())
            return done(*arguments, **named)

        return noted

    for owner, name in (
        (ChatBody, "chat"),
        (CompletionBody, "prompts"),
        (tokens, "read_token_ids"),
        (ChatAssembler, "whole"),
        (CompletionAssembler, "whole"),
        (prompting, "plan_chat"),
    ):
        monkeypatch.setattr(owner, name, spy(name, getattr(owner, name)))
    return seen


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, "chat"),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, "prompts"),
        ("/v1/route", {"messages": MESSAGES}, "chat"),
        ("/v1/apply-template", {"messages": MESSAGES}, "chat"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, "plan_chat"),
        ("/v1/apply-template", {"messages": MESSAGES}, "plan_chat"),
        ("/v1/tokenize", {"messages": MESSAGES}, "chat"),
        ("/v1/detokenize", {"tokens": [1, 2]}, "read_token_ids"),
    ],
)
def test_large_bodies_are_read_beside_the_event_loop(
    fake: Endpoints, places: dict[str, list[bool]], path: str, body: dict[str, Any], what: str
) -> None:
    fake.answer(path, **body)
    fake.answer(path, **body, **LARGE)

    assert places[what] == [True, False]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}),
        ("/v1/completions", {"prompt": "Hi", "logprobs": 1}),
        ("/v1/completions", {"prompt": "word " * 120, "prompt_logprobs": 0, "max_tokens": 1}),
    ],
    ids=["chat", "completion", "prompt"],
)
def test_many_log_probabilities_are_written_beside_it(
    fake: Endpoints, places: dict[str, list[bool]], path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginehouse.api.generation.response._MANY_LOGPROBS", 10)
    answers = [fake.answer(path, **{"max_tokens": 30, **body}, ignore_eos=True) for _ in range(2)]
    fake.answer(path, **{**body, "max_tokens": 2, "prompt": "Hi", "messages": MESSAGES, **_only(path)})

    assert places["whole"] == [False, False, True]
    assert "logprob" in str(answers[0])


def _only(path: str) -> dict[str, Any]:
    """The other endpoint's prompt, left out."""
    return {"prompt": None} if "chat" in path else {"messages": None}


async def test_the_event_loop_is_free_meanwhile() -> None:
    free = threading.Event()
    working = asyncio.create_task(run_in_thread(True, lambda: free.wait(30)))
    await asyncio.sleep(0)  # it has begun, and waits for what only the event loop can do
    free.set()

    assert await working
    assert await run_in_thread(False, is_on_loop)


def test_log_probabilities_are_collected_in_place() -> None:
    """A copy per token would take as long as the square of the answer's length."""
    choice, entry = Choice(0), TokenLogprob(0, b"x", -0.5)
    choice.add(Piece(0, "x", (entry,)))
    first = choice.logprobs
    choice.add(Piece(0, "x", (entry, entry)))

    assert choice.logprobs is first
    assert choice.logprobs == [entry] * 3
