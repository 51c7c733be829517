"""Programs that decode steps on demand and time each: ``python -m bench.steppers NAME GGUF THREADS``.

Nothing is imported before it is needed: what a program imports decides how llama.cpp's threads behave.

Names: ``llama_decode`` (the raw loop), ``engine`` (``StepEngine`` over the llama.cpp runner with that many threads)
and ``adaptive`` (the same with threads as it chooses them). Each is a process of its own, as settings of the
threading library hold per process. A line ``SEED NUM_SEQUENCES NUM_STEPS`` on standard input is answered with a
line of JSON: the seconds of each step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["EngineStepper", "RawStepper", "Stepper"]

_MAX_SEQUENCES = 8
_NUM_PROMPT_TOKENS = 100
_MIN_STEPS = 6
_LIMIT_S = 20.0  # on a disturbed machine a step can take seconds


class Stepper(Protocol):
    """Decodes several sequences at once."""

    def begin(self, prompts: NDArray[np.int32]) -> None:
        """Prefill ``prompts``, ``(num_sequences, num_tokens)``."""
        ...

    def step(self) -> None:
        """One more token for every sequence. This is timed."""
        ...

    def prepare(self) -> None:
        """What the next step needs but does not count."""
        ...

    def end(self) -> None:
        """Forget the sequences."""
        ...


class RawStepper:
    """``llama_decode``: only filling the batch and decoding it count, not the choice of the next tokens."""

    def __init__(self, model_file: Path, num_threads: int) -> None:
        from .raw_decoder import RawDecoder, extra_buffers_work

        extra_buffers = extra_buffers_work(model_file)
        self._decoder = RawDecoder(model_file, num_threads, _MAX_SEQUENCES, extra_buffers)
        self._token_ids = np.empty(0, np.int32)
        self._position = 0

    def begin(self, prompts: NDArray[np.int32]) -> None:
        """See :class:`Stepper`."""
        first = [self._decoder.prefill(sequence, prompt.tolist()) for sequence, prompt in enumerate(prompts)]
        self._token_ids = np.array(first, np.int32)
        self._position = prompts.shape[1]

    def step(self) -> None:
        """See :class:`Stepper`."""
        self._decoder.step(self._token_ids, self._position)

    def prepare(self) -> None:
        """See :class:`Stepper`."""
        self._token_ids = self._decoder.rows(len(self._token_ids)).argmax(axis=1).astype(np.int32)
        self._position += 1

    def end(self) -> None:
        """See :class:`Stepper`."""
        self._decoder.clear()


class EngineStepper:
    """``StepEngine``, greedy, without prefix cache so that every round finds an empty KV cache."""

    def __init__(self, model_file: Path, num_threads: int | None) -> None:
        from enginehouse.contract.backend import ModelSource, Runner
        from enginehouse.contract.types import EngineSettings
        from enginehouse.engine.loop import StepEngine
        from enginehouse.plugins import PluginRegistry
        from enginehouse.settings.config import PluginsSettings

        backend = PluginRegistry.load(PluginsSettings()).backends["llamacpp"]
        options = backend.options(context=8192, slots=_MAX_SEQUENCES, threads=num_threads)
        runner = backend.open(ModelSource(str(model_file), model_file), options, lambda share, what: None)
        assert isinstance(runner, Runner)
        self._engine = StepEngine(runner, EngineSettings(slots=_MAX_SEQUENCES, prefix_cache=False), {})
        self._request_ids: list[str] = []

    def begin(self, prompts: NDArray[np.int32]) -> None:
        """See :class:`Stepper`."""
        from enginehouse.contract.types import EngineRequest, SamplingParams, StopParams, TextDelta

        greedy, endless = SamplingParams(temperature=0.0), StopParams(ignore_eos=True)
        self._request_ids = [str(number) for number in range(len(prompts))]
        for request_id, prompt in zip(self._request_ids, prompts, strict=True):
            request = EngineRequest(request_id=request_id, sampling=greedy, stopping=endless)
            self._engine.add(request, prompt.tolist())
        waiting = set(self._request_ids)
        while waiting:
            waiting -= {request_id for request_id, event in self._engine.step() if isinstance(event, TextDelta)}

    def step(self) -> None:
        """See :class:`Stepper`."""
        self._engine.step()

    def prepare(self) -> None:
        """Nothing: an engine has chosen its tokens within the step."""

    def end(self) -> None:
        """See :class:`Stepper`."""
        for request_id in self._request_ids:
            self._engine.cancel(request_id)


_STEPPERS: dict[str, Callable[[Path, int], Stepper]] = {
    "llama_decode": RawStepper,
    "engine": EngineStepper,
    "adaptive": lambda model_file, num_threads: EngineStepper(model_file, None),
}


def _serve(stepper: Stepper) -> None:
    for line in sys.stdin:
        seed, num_sequences, num_steps = map(int, line.split())
        shape = (num_sequences, _NUM_PROMPT_TOKENS)
        stepper.begin(np.random.default_rng(seed).integers(100, 40_000, shape).astype(np.int32))
        seconds: list[float] = []
        while len(seconds) < num_steps and (len(seconds) < _MIN_STEPS or sum(seconds) < _LIMIT_S):
            began_s = time.perf_counter()
            stepper.step()
            seconds.append(time.perf_counter() - began_s)
            stepper.prepare()
        stepper.end()
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    _serve(_STEPPERS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3])))
