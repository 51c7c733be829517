"""H32 to H34: concurrent requests, disconnecting clients, and repeated prompts."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from enginehouse.cli.target import Target
from enginehouse_conform.check import Check, require
from enginehouse_conform.reading import answered, content_of, forced, forced_text

__all__ = ["CHECKS"]

_NUM_AT_ONCE = 8
_NUM_LEAVING = 10
_PATIENCE_S = 5.0


def _own_text(target: Target) -> None:
    texts = [f"answer number {number}" for number in range(_NUM_AT_ONCE)]
    forced_text(target, texts[0])
    with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        answers = list(pool.map(lambda text: answered(target.chat(**forced(text))), texts))
    for text, data in zip(texts, answers, strict=True):
        require(content_of(data) == f'"{text}"', f"{content_of(data)!r} came for the request of {text!r}")
    require(len({data["id"] for data in answers}) == len(answers), "two answers have one id")


def _own_seed(target: Target) -> None:
    def draw(seed: int) -> str:
        return content_of(answered(target.chat(seed=seed, temperature=1.0, max_tokens=12)))

    alone = [draw(seed) for seed in range(_NUM_AT_ONCE)]
    with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        together = list(pool.map(draw, range(_NUM_AT_ONCE)))
    different = [seed for seed, pair in enumerate(zip(alone, together, strict=True)) if pair[0] != pair[1]]
    require(not different, f"{len(different)} of {_NUM_AT_ONCE} seeds give another text while others run")


def _leaving(target: Target) -> None:
    began = time.monotonic()
    answered(target.chat(max_tokens=4))
    usual_s = time.monotonic() - began
    body: dict[str, Any] = target.chat_body(stream=True, max_tokens=2000, temperature=1)
    for _ in range(_NUM_LEAVING):
        require(target.begin("/chat/completions", body, 200) == 200, "a long stream was refused")
    began = time.monotonic()
    answered(target.chat(max_tokens=4), "a request after clients that left")
    took_s = time.monotonic() - began
    limit_s = usual_s + _PATIENCE_S
    require(took_s < limit_s, f"after {_NUM_LEAVING} clients left, a request of {usual_s:.1f} s takes {took_s:.1f} s")


def _repeats(target: Target) -> None:
    start = "The harbour was quiet that morning, and the old captain told of storms. " * 12
    messages = [{"role": "user", "content": f"{start}What did he say?"}]
    first, again = (answered(target.chat(messages=messages, max_tokens=12)) for _ in range(2))
    require(content_of(first) == content_of(again), f"{content_of(first)!r} first, {content_of(again)!r} repeated")
    count = first["usage"]["prompt_tokens"]
    require(again["usage"]["prompt_tokens"] == count, "a repeated prompt counts otherwise")
    other = [{"role": "user", "content": f"{start}Who listened?"}]
    shared = answered(target.chat(messages=other, max_tokens=12))
    details = shared["usage"].get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    require(cached < shared["usage"]["prompt_tokens"], f"{cached} tokens of a new prompt are said to be cached")


CHECKS = (
    Check("H32", "Requests at the same time get their own text and id.", _own_text),
    Check("H32", "A seed gives the same text alone and beside others.", _own_seed),
    Check("H33", "Clients that leave free their slots: the next request is answered as soon as ever.", _leaving),
    Check("H34", "A repeated prompt gets the same answer and the same count.", _repeats),
)
