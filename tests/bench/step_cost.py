"""What core adds to a decode step: ``StepEngine`` over the llama.cpp runner beside ``llama_decode`` alone.

All subjects live in one process and take turns. The engine's step is everything between two forward passes:
scheduling, filling the batch, sampling, stop strings and events. Of the raw loop only filling the batch and
``llama_decode`` are timed.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from enginehouse.backend import ModelSource, Runner
from enginehouse.config import PluginsSettings
from enginehouse.engine.loop import StepEngine
from enginehouse.plugins import PluginRegistry
from enginehouse.types import EngineRequest, EngineSettings, SamplingParams, StopParams, TextDelta

from .machine import usable_cores
from .plan import Plan
from .raw_decoder import RawDecoder, extra_buffers_work
from .record import Comparison, Key, Record

__all__ = ["measure_step"]

_METRIC = "step, ms"
_MAX_SEQUENCES = 8
_NUM_PROMPT_TOKENS = 100
_NUM_WARM_UP_STEPS = 4


class _Subject(Protocol):
    name: str

    def time_steps(self, prompts: NDArray[np.int32], num_steps: int) -> list[float]:
        """Seconds of each of ``num_steps`` decode steps after the prompts, ``(num_sequences, num_tokens)``."""
        ...

    def close(self) -> None: ...


class _Raw:
    """``llama_decode``, with the most probable tokens chosen outside the timed part."""

    name = "llama_decode"

    def __init__(self, decoder: RawDecoder) -> None:
        self._decoder = decoder

    def time_steps(self, prompts: NDArray[np.int32], num_steps: int) -> list[float]:
        num_sequences, position = prompts.shape
        self._decoder.clear()
        token_ids = np.array([self._decoder.prefill(s, prompt.tolist()) for s, prompt in enumerate(prompts)], np.int32)
        seconds = []
        for _ in range(num_steps):
            began_s = time.perf_counter()
            self._decoder.step(token_ids, position)
            seconds.append(time.perf_counter() - began_s)
            token_ids = self._decoder.rows(num_sequences).argmax(axis=1).astype(np.int32)
            position += 1
        return seconds

    def close(self) -> None:
        self._decoder.close()


class _Engine:
    """``StepEngine``, greedy, without prefix cache so that every round finds an empty KV cache."""

    def __init__(self, name: str, model_file: Path, options: dict[str, object]) -> None:
        self.name = name
        backend = PluginRegistry.load(PluginsSettings()).backends["llamacpp"]
        settings = backend.options(context=8192, slots=_MAX_SEQUENCES, **options)
        runner = backend.open(ModelSource(str(model_file), model_file), settings, lambda share, what: None)
        assert isinstance(runner, Runner)
        self._engine = StepEngine(runner, EngineSettings(slots=_MAX_SEQUENCES, prefix_cache=False), {})

    def time_steps(self, prompts: NDArray[np.int32], num_steps: int) -> list[float]:
        request_ids = [str(number) for number in range(len(prompts))]
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            self._engine.add(_request(request_id), prompt.tolist())
        waiting = set(request_ids)
        while waiting:
            waiting -= {request_id for request_id, event in self._engine.step() if isinstance(event, TextDelta)}
        seconds = []
        for _ in range(num_steps):
            began_s = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - began_s)
        for request_id in request_ids:
            self._engine.cancel(request_id)
        return seconds

    def close(self) -> None:
        self._engine.close()


def _request(request_id: str) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, sampling=SamplingParams(temperature=0.0), stopping=StopParams(ignore_eos=True)
    )


def measure_step(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Milliseconds of a decode step at 1 and 8 sequences: raw, ours with as many threads, ours as it adapts."""
    num_threads, extra_buffers = len(usable_cores()), extra_buffers_work(plan.model_file)
    raw = _Raw(RawDecoder(plan.model_file, num_threads, _MAX_SEQUENCES, extra_buffers))
    fixed = _Engine("engine", plan.model_file, {"threads": num_threads})
    adaptive = _Engine("engine, adaptive threads", plan.model_file, {})
    subjects: list[_Subject] = [raw, fixed, adaptive]
    record = Record()
    for round_number, subject in plan.interleave(subjects):
        for num_sequences in (1, _MAX_SEQUENCES):
            seconds = subject.time_steps(_prompts(round_number, num_sequences), 12 if plan.quick else 100)
            milliseconds = 1e3 * statistics.median(seconds[_NUM_WARM_UP_STEPS:])
            record.add(Key(_scenario(num_sequences), subject.name, _METRIC), milliseconds)
            console.print(
                f"round {round_number + 1}/{plan.num_rounds}  {subject.name}, {num_sequences}: {milliseconds:.2f} ms"
            )
    for subject in subjects:
        subject.close()
    return record, [
        _compare(num_sequences, subject, raw, 1.05 if subject is fixed and num_sequences > 1 else None)
        for num_sequences in (1, _MAX_SEQUENCES)
        for subject in (fixed, adaptive)
    ]


def _scenario(num_sequences: int) -> str:
    return "1 sequence" if num_sequences == 1 else f"{num_sequences} sequences"


def _compare(num_sequences: int, subject: _Subject, baseline: _Subject, target: float | None) -> Comparison:
    key, base = (Key(_scenario(num_sequences), one.name, _METRIC) for one in (subject, baseline))
    return Comparison(key, base, target, target_is_upper=True)


def _prompts(seed: int, num_sequences: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(100, 40_000, (num_sequences, _NUM_PROMPT_TOKENS)).astype(np.int32)
