"""Answers with drafters beside the same answers without, one client, on one running server that has the model twice."""

from __future__ import annotations

import json
import random
import re
import sys
import urllib.request
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from attrs import frozen
from rich.console import Console

from core.behaviours.workloads import PROMPTS, Prompt

from .peers import RunningPeer, running
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_speculation"]

_PLAIN, _DRAFTED = "plain", "drafted"
_METRIC = "tokens/s"
_PREDICTED = "prediction, 10 % of its lines changed"
_ALL = "as many tokens of all the following"
_MIXED = ("chat", "edit", "json", "document", "conversation")
_CONFIG = """
[models.{name}]
source = "{source}"
context = 4096
prefix_cache = false
drafters = {drafters}
"""


@frozen
class _TwoModels:
    """One server with the model twice: with and without drafters. The idle one computes nothing."""

    model_file: Path
    name: str = "enginehouse"
    ready_path: str = "/health"

    def command(self, port: int, folder: Path) -> list[str]:
        """See :class:`Peer`."""
        config = folder / "speculation.toml"
        drafters = {_PLAIN: "[]", _DRAFTED: '["prediction", "prompt-lookup"]'}
        config.write_text(
            "".join(_CONFIG.format(name=name, source=self.model_file, drafters=d) for name, d in drafters.items())
        )
        return [sys.executable, "-m", "enginehouse", "serve", "--config", str(config), "--port", str(port)]


def measure_speculation(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Both models in turn on every prompt, round by round; an answer's time counts from its first token."""
    record = Record()
    with running(_TwoModels(plan.model_file), plan.folder / "logs") as server:
        scenarios = _Scenarios(server, plan.quick)
        for round_number in range(plan.num_rounds):
            speeds: dict[tuple[str, str], float] = {}
            for scenario, prompts in scenarios.of_round(round_number).items():
                for subject in (_PLAIN, _DRAFTED) if round_number % 2 else (_DRAFTED, _PLAIN):
                    speed = scenarios.tokens_per_s(subject, prompts)
                    record.add(Key(scenario, subject, _METRIC), speed)
                    speeds[scenario, subject] = speed
                    console.print(f"round {round_number + 1}/{plan.num_rounds}  {scenario}, {subject}: {speed:.1f}")
            for subject in (_PLAIN, _DRAFTED):
                record.add(Key(_ALL, subject, _METRIC), harmonic_mean(speeds[name, subject] for name in _MIXED))
    keys = [_PREDICTED, _ALL, *_MIXED]
    targets = {_PREDICTED: 1.5, _ALL: 0.97}
    return record, [
        Comparison(Key(name, _DRAFTED, _METRIC), Key(name, _PLAIN, _METRIC), targets.get(name)) for name in keys
    ]


class _Scenarios:
    """What is asked in every round."""

    def __init__(self, server: RunningPeer, quick: bool) -> None:
        self._server = server
        self._max_tokens = 60 if quick else 160
        self._long = [prompt for prompt in PROMPTS if prompt.name.startswith("chat")][: 2 if quick else 4]
        self._texts = {prompt.name: self._ask(_PLAIN, prompt, 400)["text"] for prompt in self._long}

    def of_round(self, round_number: int) -> dict[str, list[Prompt]]:
        """Prompts by scenario; each round takes others."""
        rng = random.Random(round_number)
        found = {
            _PREDICTED: [
                Prompt(one.name, one.messages, {"prediction": _prediction(_changed(self._texts[one.name], rng))})
                for one in self._long
            ]
        }
        for kind in _MIXED:
            prompts = [prompt for prompt in PROMPTS if prompt.name.startswith(kind)]
            first = 2 * round_number % len(prompts)
            found[kind] = [_without_prediction(prompt) for prompt in prompts[first : first + 2]]
        return found

    def tokens_per_s(self, model: str, prompts: list[Prompt]) -> float:
        """Tokens behind the first of each answer, over the time that they took."""
        answers = [self._ask(model, prompt, 400 if "prediction" in prompt.fields else None) for prompt in prompts]
        return sum(one["tokens"] - 1 for one in answers) / sum(one["seconds"] for one in answers)

    def _ask(self, model: str, prompt: Prompt, max_tokens: int | None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._server.url}/v1/chat/completions",
            json.dumps(prompt.body(model, max_tokens or self._max_tokens)).encode(),
            {"content-type": "application/json", "x-enginehouse-details": "true"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            data = json.load(response)
        return {
            "text": data["choices"][0]["message"]["content"],
            "tokens": data["usage"]["completion_tokens"],
            "seconds": data["enginehouse"]["timings_ms"]["decode"] / 1e3,
        }


def _without_prediction(prompt: Prompt) -> Prompt:
    fields = {name: value for name, value in prompt.fields.items() if name != "prediction"}
    return Prompt(prompt.name, prompt.messages, fields)


def _prediction(text: str) -> dict[str, str]:
    return {"type": "content", "content": text}


def _changed(text: str, rng: random.Random) -> str:
    """The text with one word replaced in a tenth of its lines; where there are few lines, of its sentences."""
    lines = text.splitlines(keepends=True)
    parts = lines if len(lines) >= 10 else re.split(r"(?<=[.!?:]) ", text)
    glue = "" if parts is lines else " "
    for index in rng.sample(range(len(parts)), max(1, len(parts) // 10)):
        words = parts[index].split(" ")
        words[rng.randrange(len(words))] = "something"
        parts[index] = " ".join(words)
    return glue.join(parts)
