"""Times to the first token with the prefix cache: the fifth turn of a chat, and a long prompt after a restart."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from attrs import frozen
from rich.console import Console

from .peers import RunningPeer, running
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_prefix"]

_METRIC = "ms to the first token"
_CHAT, _EVEN, _DOCUMENT = "chat", "chat, no system prompt", "2,000 tokens"
_FIRST, _FIFTH, _UNCACHED = "turn 1", "turn 5", "turn 5, not cached"
_COLD, _RESTARTED, _WARM = "cold", "after a restart", "in memory"
_NUM_TURNS = 5
_SYSTEM_WORDS, _TURN_WORDS, _DOCUMENT_WORDS = 120, 60, 1950
_SENTENCE = (
    "the river ran under old bridges and past small houses where people lived who worked in gardens fields shops "
    "every morning someone opened a window looked at the sky and said that it would rain before evening came again"
)
_CONFIG = """
[models.bench]
source = "{source}"
context = 4096
prefix_cache_dir = "{saved}"
"""


@frozen
class _Server:
    """Ours, with a disk tier in a folder of its own."""

    model_file: Path
    saved: Path
    name: str = "enginehouse"
    ready_path: str = "/health"

    def command(self, port: int, folder: Path) -> list[str]:
        """See :class:`Peer`."""
        config = folder / "prefix.toml"
        config.write_text(_CONFIG.format(source=self.model_file, saved=self.saved))
        return [sys.executable, "-m", "enginehouse", "serve", "--config", str(config), "--port", str(port)]


def measure_prefix(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Each round starts a server twice, the first time with an empty folder."""
    record = Record()
    server = _Server(plan.model_file, plan.folder / "saved")
    for number in range(plan.num_rounds):
        shutil.rmtree(server.saved, ignore_errors=True)
        figures = _round(server, plan, random.Random(number))
        shutil.rmtree(server.saved, ignore_errors=True)
        for (scenario, subject), value in figures.items():
            record.add(Key(scenario, subject, _METRIC), value)
        shown = ", ".join(f"{subject} {value:.0f}" for (_, subject), value in figures.items())
        console.print(f"round {number + 1}/{plan.num_rounds}  {shown} ms")

    def compare(scenario: str, subject: str, baseline: str, target: float | None) -> Comparison:
        keys = (Key(scenario, name, _METRIC) for name in (subject, baseline))
        return Comparison(*keys, target, target_is_upper=True)

    return record, [
        compare(_CHAT, _FIFTH, _FIRST, 1.3),
        compare(_CHAT, _FIFTH, _UNCACHED, None),
        compare(_EVEN, _FIFTH, _FIRST, None),
        compare(_DOCUMENT, _RESTARTED, _COLD, 0.2),
        compare(_DOCUMENT, _WARM, _COLD, None),
    ]


def _round(server: _Server, plan: Plan, rng: random.Random) -> dict[tuple[str, str], float]:
    """One figure each, in milliseconds."""
    figures: dict[tuple[str, str], float] = {}
    document = _text(rng, _DOCUMENT_WORDS)
    with running(server, plan.folder / "logs") as one:
        _first_token_ms(one, [_user(_text(rng, 40))], 4)  # warm-up, as after the restart
        figures[_DOCUMENT, _COLD] = _first_token_ms(one, [_user(document + " What is this about?")], 4)[0]
        for scenario in (_CHAT, _EVEN):
            chat = _chat(one, plan, rng, has_system_prompt=scenario == _CHAT)
            figures.update({(scenario, name): value for name, value in chat.items()})
    with running(server, plan.folder / "logs") as one:
        _first_token_ms(one, [_user(_text(rng, 40))], 4)
        figures[_DOCUMENT, _RESTARTED] = _first_token_ms(one, [_user(document + " Who lived there?")], 4)[0]
        figures[_DOCUMENT, _WARM] = _first_token_ms(one, [_user(document + " When was it?")], 4)[0]
    return figures


def _chat(server: RunningPeer, plan: Plan, rng: random.Random, *, has_system_prompt: bool) -> dict[str, float]:
    """A conversation whose messages are all of one length; without a system prompt, turns bring equally many tokens."""
    messages = [{"role": "system", "content": _text(rng, _SYSTEM_WORDS)}] if has_system_prompt else []
    figures: dict[str, float] = {}
    for turn in range(1, _NUM_TURNS + 1):
        messages.append(_user(_text(rng, _TURN_WORDS)))
        first_ms, answer = _first_token_ms(server, messages, 16 if plan.quick else 64)
        if turn == 1:
            figures[_FIRST] = first_ms
        if turn == _NUM_TURNS:
            figures[_FIFTH] = first_ms
            figures[_UNCACHED] = _first_token_ms(server, messages, 4, cache_prompt=False)[0]
        messages.append({"role": "assistant", "content": answer})
    return figures


def _first_token_ms(
    server: RunningPeer, messages: list[dict[str, str]], max_tokens: int, **fields: Any
) -> tuple[float, str]:
    """Milliseconds until the first text of a streamed answer, as its client sees it, and the whole answer."""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True, **fields}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    began, first_s, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
                if text and not first_s:
                    first_s = time.perf_counter() - began
    return 1000 * first_s, text


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(_SENTENCE.split(), k=num_words))
