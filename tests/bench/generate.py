"""Decoding by the hf and mlx backends beside their libraries' own ``generate``, engine included.

All decode greedily from the same float32 weights and the same prompts, in one process, in turn. mlx and mlx-lm run one
model object: of two copies of the weights the one loaded first was 4 % slower, whoever loaded it. Only steps count: of
ours calls of ``StepEngine.step``, of transformers the times between two calls of its stopping criteria, of mlx-lm
those between two tokens of ``generate_step`` (one sequence) or two results of ``BatchGenerator`` (several), on which
its ``generate`` and ``batch_generate`` rest.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from rich.console import Console

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse.contract.types import EngineRequest, EngineSettings, SamplingParams, StopParams, TextDelta
from enginehouse.engine.loop import StepEngine
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings

from .machine import usable_cores
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_generate"]

_METRIC, _CPU_METRIC = "tokens/s", "tokens per s of CPU"
_NUM_PROMPT_TOKENS, _NUM_WARM_UP_STEPS = 100, 3
_SCENARIOS = {1: "1 sequence", 8: "8 sequences"}
_PAIRS = {"hf": "transformers", "mlx": "mlx-lm"}

Prompts = NDArray[np.int32]
"""Token ids, (num_sequences, num_tokens)."""

Decode = Callable[[Prompts, int, Callable[[], None]], None]
"""Computes prompts, then a number of steps, and calls a function after each."""


@frozen
class _Subject:
    """A way to decode: a backend of ours, or the library below it."""

    name: str
    decode: Decode

    def measure(self, seed: int, num_sequences: int, num_steps: int) -> tuple[float, float]:
        """Tokens per second, and per second of processor time, by the median step."""
        shape = (num_sequences, _NUM_PROMPT_TOKENS)
        prompts = np.random.default_rng(seed).integers(100, 40_000, shape).astype(np.int32)
        times_s: list[tuple[float, float]] = []

        def note() -> None:
            times_s.append((time.perf_counter(), time.process_time()))

        self.decode(prompts, _NUM_WARM_UP_STEPS + num_steps, note)
        spent_s = np.diff(np.array(times_s[_NUM_WARM_UP_STEPS - 1 :]), axis=0)
        wall_s, cpu_s = (statistics.median(column) for column in spent_s.T)
        return num_sequences / wall_s, num_sequences / cpu_s


def _open(backend_name: str, folder: Path, **options: Any) -> Runner:
    backend = PluginRegistry.load(PluginsSettings()).backends[backend_name]
    chosen = backend.options(context=1024, slots=max(_SCENARIOS), **options)
    runner = backend.open(ModelSource(str(folder), folder), chosen, lambda share, what: None)
    assert isinstance(runner, Runner)
    return runner


def _engine(runner: Runner) -> Decode:
    """Ours: the engine, without a prefix cache."""
    engine = StepEngine(runner, EngineSettings(slots=max(_SCENARIOS), prefix_cache=False), {})

    def decode(prompts: Prompts, num_steps: int, note: Callable[[], None]) -> None:
        waiting = {str(number) for number in range(len(prompts))}
        greedy, endless = SamplingParams(temperature=0.0), StopParams(ignore_eos=True)
        for number, prompt in enumerate(prompts):
            request = EngineRequest(request_id=str(number), sampling=greedy, stopping=endless)
            engine.add(request, prompt.tolist())
        while waiting:
            waiting -= {request_id for request_id, event in engine.step() if isinstance(event, TextDelta)}
        for _ in range(num_steps):
            engine.step()
            note()
        for number in range(len(prompts)):
            engine.cancel(str(number))

    return decode


def _transformers(folder: Path) -> Decode:
    """``model.generate``."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def decode(prompts: Prompts, num_steps: int, note: Callable[[], None]) -> None:
        class Note(StoppingCriteria):
            num_tokens = 0

            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **others: Any) -> torch.Tensor:
                if self.num_tokens:  # the first token is that of the prompt
                    note()
                self.num_tokens += 1
                return torch.zeros(len(input_ids), dtype=torch.bool)

        token_ids = torch.from_numpy(prompts).long()
        model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=1 + num_steps,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Note()]),
        )

    return decode


def _mlx_lm(model: Any) -> Decode:
    """``mlx_lm.generate`` and ``mlx_lm.batch_generate``, by what they iterate over."""
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator, generate_step

    def decode(prompts: Prompts, num_steps: int, note: Callable[[], None]) -> None:
        if len(prompts) == 1:
            for number, _ in enumerate(generate_step(mx.array(prompts[0]), model, max_tokens=1 + num_steps)):
                if number:
                    note()
            return
        generator = BatchGenerator(model, max_tokens=num_steps + 8, stop_tokens=[])
        generator.insert(prompts.tolist())
        num_noted = -1  # the first tokens are those of the prompts
        while num_noted < num_steps:
            if not (responses := generator.next_generated()):
                raise RuntimeError("mlx-lm ended before all steps were measured")
            if len(responses) == len(prompts):
                num_noted += 1
                if num_noted:
                    note()
        generator.close()

    return decode


def _write_weights(model_file: Path, folder: Path) -> Path:
    """The weights of a GGUF file in float32, as transformers and mlx-lm read them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: Any = {"pretrained_model_name_or_path": model_file.parent, "gguf_file": model_file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    model.hf_quantizer = None  # otherwise it refuses to be saved
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    return folder


def _subjects(folder: Path) -> Iterator[_Subject]:
    from enginehouse_mlx.runner import MlxRunner

    yield _Subject("hf", _engine(_open("hf", folder, threads=len(usable_cores()), device="cpu")))
    yield _Subject("transformers", _transformers(folder))
    runner = _open("mlx", folder)
    assert isinstance(runner, MlxRunner)
    yield _Subject("mlx", _engine(runner))
    yield _Subject("mlx-lm", _mlx_lm(runner.model.model))


def measure_generate(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Tokens per second of decode steps at 1 and 8 sequences: hf, transformers, mlx and mlx-lm."""
    record, num_steps = Record(), 8 if plan.quick else 30
    with tempfile.TemporaryDirectory() as folder:
        subjects = list(_subjects(_write_weights(plan.model_file, Path(folder))))
        for round_number, subject in plan.interleave(subjects):
            for num_sequences, scenario in _SCENARIOS.items():
                # computing the prompts takes minutes with MLX's own BLAS, in one call
                console.print(f"round {round_number + 1}/{plan.num_rounds}  {subject.name}, {scenario}: started")
                figures = subject.measure(round_number, num_sequences, num_steps)
                for metric, figure in zip((_METRIC, _CPU_METRIC), figures, strict=True):
                    record.add(Key(scenario, subject.name, metric), figure)
                console.print(
                    f"round {round_number + 1}/{plan.num_rounds}  {subject.name}, {scenario}:"
                    f" {figures[0]:.1f} tokens/s, {figures[1]:.1f} per s of CPU"
                )
    return record, [
        Comparison(Key(scenario, ours, metric), Key(scenario, library, metric), target)
        for metric, target in ((_METRIC, 1.0), (_CPU_METRIC, None))
        for scenario in _SCENARIOS.values()
        for ours, library in _PAIRS.items()
    ]
