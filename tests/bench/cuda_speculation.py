"""Drafts from repetition on one GPU: a part of ``bench.cuda``, which opens the model.

How fast a model runs does not depend on its weights, but what it writes does: random ones never repeat themselves. So
the weights are changed in place, where recorded graphs read them as well, until each token is followed by the next of
its block. The embeddings become so large that what the layers add hardly turns the residual stream, and the row of the
output projection that belongs to the following token points along the embedding. Every layer is computed as before.

Two engines on the same runner, one with drafts and one without, get the same requests in turn. They live on from round
to round, as a server's engine does, and have learned what their steps cost.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.nn.functional import normalize

from enginehouse.contract.backend import Draw, Span
from enginehouse.contract.drafter import BoundDrafter, DraftContext
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse_speculate.prompt_lookup import PromptLookupDrafter, PromptLookupOptions

from .statistics import estimate, estimate_ratio

__all__ = [
    "FIRST_WORD",
    "NUM_ANSWER",
    "NUM_PROMPT",
    "Subject",
    "chain_tokens",
    "measure_speculation",
    "speeds_of",
    "step_lines",
]

_NUM_ROUNDS = 5
NUM_PROMPT, NUM_ANSWER = 450, 300
FIRST_WORD = 300  # ids below are single bytes, which wait for others until they are text
_BLOCK = 50
_EMBEDDING_RMS = 100.0  # what 32 layers of random weights add has 17
TOP_LOGIT = 30.0  # as sure as models are of what they quote; the other logits are within 3 of 0
_NUM_SHOWN = 6

_WARM = SamplingParams(temperature=0.6, seed=1)
_SAMPLING = {"greedy": SamplingParams(temperature=0.0), "temperature 0.6": _WARM}


def measure_speculation(runner: Any, embeddings: Tensor, head: Tensor) -> Iterator[str]:
    """Lines about every scenario.

    Args:
        runner: of a model with random weights, with four slots or more.
        embeddings: its weights, (vocab_size, hidden_size); changed.
        head: of its output projection, of the same shape and not the same tensor; changed.
    """
    vocab_size = embeddings.shape[0]
    chain_tokens(embeddings, head, _BLOCK)
    for num_clients in (1, 4):
        for what, sampling in _SAMPLING.items():
            scenario = f"a text that repeats {_BLOCK} tokens, {num_clients} at once, {what}"
            yield from _compare(runner, scenario, _random_prompt, num_clients, sampling)
    chain_tokens(embeddings, head, vocab_size)
    for num_clients in (1, 4):
        scenario = f"a text that never repeats, {num_clients} at once, temperature 0.6"
        yield from _compare(runner, scenario, _random_prompt, num_clients, _WARM)
    scenario = "a text whose prompt misleads every second token, 1 at once, temperature 0.6"
    yield from _compare(runner, scenario, _misleading_prompt, 1, _WARM)


def chain_tokens(embeddings: Tensor, head: Tensor, block: int) -> None:
    """Let each token be followed by the next of its ``block``, the last by the first; changes both tensors in place."""
    if embeddings.data_ptr() == head.data_ptr():
        raise ValueError("a model whose embeddings are its output projection cannot follow one token by another")
    vocab_size, width = embeddings.shape
    token_ids = torch.arange(vocab_size, device=head.device)
    begins = token_ids - token_ids % block
    following = begins + (token_ids - begins + 1) % torch.clamp(vocab_size - begins, max=block)
    with torch.inference_mode():
        directions = normalize(embeddings.float(), dim=1)
        embeddings.copy_(directions * (_EMBEDDING_RMS * math.sqrt(width)))
        head.index_copy_(0, following, (directions * (TOP_LOGIT / math.sqrt(width))).to(head.dtype))


_MakePrompt = Callable[[np.random.Generator, int], list[int]]


def _random_prompt(rng: np.random.Generator, vocab_size: int) -> list[int]:
    found: list[int] = rng.integers(FIRST_WORD, vocab_size - 1, NUM_PROMPT).tolist()
    return found


def _misleading_prompt(rng: np.random.Generator, vocab_size: int) -> list[int]:
    """Pairs of tokens that the answer will have, each with another token behind it than there."""
    last = int(rng.integers(FIRST_WORD, vocab_size - 2 * NUM_ANSWER))
    firsts = rng.permutation(np.arange(last + 1, last + NUM_ANSWER, 2))[: NUM_PROMPT // 3]
    others = rng.integers(FIRST_WORD, vocab_size - 1, len(firsts))
    found: list[int] = np.stack([firsts, firsts + 1, others], 1).reshape(-1).tolist()
    return [*found[: NUM_PROMPT - 1], last]


def _compare(
    runner: Any, scenario: str, make_prompt: _MakePrompt, num_clients: int, sampling: SamplingParams
) -> Iterator[str]:
    """Both engines in turn on the prompts of each round; the round before the first is not counted."""
    lookup = PromptLookupDrafter().bind(DraftContext(runner, num_clients), PromptLookupOptions())
    plain, drafted = Subject.over(runner, {}), Subject.over(runner, {"prompt-lookup": lookup})
    rng = np.random.default_rng(0)
    num_same = 0
    for round_number in range(-1, _NUM_ROUNDS):
        prompts = [make_prompt(rng, runner.info.vocab_size) for _ in range(num_clients)]
        turn = (plain, drafted) if round_number % 2 else (drafted, plain)
        answers = {subject is drafted: subject.run(prompts, sampling) for subject in turn}
        if round_number < 0:
            plain.forget()
            drafted.forget()
            continue
        num_same += sum(one == other for one, other in zip(answers[False], answers[True], strict=True))
    yield f"speculation, {scenario}: {speeds_of(plain, drafted)}"
    yield (
        f"  drafted {drafted.num_drafted} tokens, accepted {drafted.num_accepted} of them, for "
        f"{drafted.num_tokens} tokens; the same token ids as without drafts: {num_same} of "
        f"{num_clients * _NUM_ROUNDS} sequences"
    )
    yield from step_lines("without drafts", plain.steps)
    yield from step_lines("with drafts", drafted.steps)


def speeds_of(plain: Subject, drafted: Subject) -> str:
    ratio = estimate_ratio(drafted.speeds, plain.speeds)
    return (
        f"{estimate(plain.speeds).median:.1f} tok/s without, {estimate(drafted.speeds).median:.1f} tok/s with drafts, "
        f"ratio {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    )


@frozen
class _StepTimes:
    """Where the time of one engine step went.

    Attributes:
        num_tokens: that it computed.
        has_drafts: whether some of them were drafted.
        seconds: all of it.
        launching_s: in ``forward``, until it returned.
        waiting_s: for the device: for the logits of drafted tokens, or for tokens that the device drew.
        copying_s: logits of drafted tokens to the host.
    """

    num_tokens: int
    has_drafts: bool
    seconds: float = 0.0
    launching_s: float = 0.0
    waiting_s: float = 0.0
    copying_s: float = 0.0


def step_lines(whose: str, steps: Sequence[_StepTimes]) -> Iterator[str]:
    """The most frequent kinds of steps, medians in milliseconds."""
    kinds: dict[tuple[bool, int], list[_StepTimes]] = {}
    for step in steps:
        kinds.setdefault((step.has_drafts, step.num_tokens), []).append(step)
    frequent = sorted(kinds, key=lambda kind: -len(kinds[kind]))[:_NUM_SHOWN]
    for has_drafts, num_tokens in sorted(frequent):
        own = kinds[has_drafts, num_tokens]
        rests = [one.seconds - one.launching_s - one.waiting_s - one.copying_s for one in own]
        yield (
            f"  {whose}, {len(own)} steps of {num_tokens} tokens{', drafts among them' if has_drafts else ''}: "
            f"{_median_ms([one.seconds for one in own])} ms; launching {_median_ms([one.launching_s for one in own])}, "
            f"waiting {_median_ms([one.waiting_s for one in own])}, "
            f"copying rows {_median_ms([one.copying_s for one in own])}, all else {_median_ms(rests)}"
        )


def _median_ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f}"


@define(eq=False)
class Subject:
    """An engine with or without drafts, and what it has shown.

    Attributes:
        speeds: of each run, tokens behind the moment at which every client had its first, over the time since then.
        steps: of all runs, those that computed prompts left out.
    """

    _runner: _Watched
    _engine: StepEngine
    speeds: list[float] = field(factory=list)
    steps: list[_StepTimes] = field(factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    num_tokens: int = 0

    @classmethod
    def over(cls, runner: Any, drafters: Mapping[str, BoundDrafter]) -> Subject:
        """With an engine of its own. The runner is used by one engine at a time, and stays open."""
        watched: Any = _Watched(runner)
        return cls(watched, StepEngine(watched, EngineSettings(slots=4, prefix_cache=False), {}, drafters=drafters))

    def forget(self) -> None:
        """What was run before was a warm-up; the engine keeps what it has learned."""
        self.speeds, self.steps = [], []
        self.num_drafted = self.num_accepted = self.num_tokens = 0

    def run(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[list[int]]:
        """Give the prompts to the engine at once; the token ids of their answers."""
        stopping = StopParams(max_tokens=NUM_ANSWER, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            self._engine.add(EngineRequest(request_id=str(index), sampling=sampling, stopping=stopping), prompt)
        answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        num_before, began, ended = 0, 0.0, 0.0  # until every client has its first token
        while self._engine.has_work():
            ended = self._step(answers)
            if not began and all(answers.values()):
                num_before, began = sum(map(len, answers.values())), ended
        self.speeds.append((sum(map(len, answers.values())) - num_before) / (ended - began))
        return list(answers.values())

    def _step(self, answers: dict[str, list[int]]) -> float:
        """One step, whose tokens are appended to ``answers``; when it ended."""
        started = time.perf_counter()
        outputs = self._engine.step()
        ended = time.perf_counter()
        times = self._runner.take()
        if times is not None:
            self.steps.append(evolve(times, seconds=ended - started))
        for request_id, event in outputs:
            if isinstance(event, EnginehouseError):
                raise event
            if isinstance(event, TextDelta):
                answers[request_id] += event.token_ids
            elif isinstance(event, RequestFinished):
                self.num_drafted += event.usage.drafted_tokens
                self.num_accepted += event.usage.accepted_draft_tokens
                self.num_tokens += event.usage.completion_tokens
        return ended


class _Watched:
    """A runner that notes where the time of each step goes."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._times: _StepTimes | None = None
        self.waiting_s = self.copying_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def take(self) -> _StepTimes | None:
        """What was noted since the last time; None where no pass was run, or one over prompts."""
        times, self._times = self._times, None
        waiting_s, self.waiting_s = self.waiting_s, 0.0
        copying_s, self.copying_s = self.copying_s, 0.0
        return None if times is None else evolve(times, waiting_s=waiting_s, copying_s=copying_s)

    def wait(self) -> None:
        """Until the device is done, before rows are read: copying is then copying only."""
        started = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.waiting_s += time.perf_counter() - started

    def forward(self, spans: Sequence[Span]) -> _WatchedRows:
        """As the runner does."""
        started = time.perf_counter()
        rows = self._runner.forward(spans)
        launching_s = time.perf_counter() - started
        if all(span.num_tokens == 1 or span.outputs == "all" for span in spans):
            has_drafts = any(span.num_tokens > 1 for span in spans)
            self._times = _StepTimes(sum(span.num_tokens for span in spans), has_drafts, launching_s=launching_s)
        return _WatchedRows(self, rows)

    def sample(self, output: _WatchedRows, draws: Sequence[Draw]) -> _WatchedDrawn:
        """As the runner does."""
        return _WatchedDrawn(self, self._runner.sample(output.rows, draws))


@frozen(eq=False)
class _WatchedRows:
    """Rows of logits; nothing is launched before they are read, so that waiting for the device costs nothing more."""

    watched: _Watched
    rows: Any

    @property
    def num_rows(self) -> int:
        return int(self.rows.num_rows)

    def select(self, rows: Sequence[int]) -> _WatchedRows:
        """Only these rows; choosing them waits for the device as well."""
        self.watched.wait()
        return _WatchedRows(self.watched, self.rows.select(rows))

    def host(self) -> Any:
        """The rows in host memory."""
        self.watched.wait()
        started = time.perf_counter()
        rows = self.rows.host()
        self.watched.copying_s += time.perf_counter() - started
        return rows


@frozen(eq=False)
class _WatchedDrawn:
    """Tokens on their way to the host."""

    watched: _Watched
    drawn: Any

    def host(self) -> Any:
        """Wait for the tokens."""
        started = time.perf_counter()
        sampled = self.drawn.host()
        self.watched.waiting_s += time.perf_counter() - started
        return sampled
