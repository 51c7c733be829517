"""What adapters cost: CPU time of a decode step with 1, 2 and 4 of them over the base model, on three backends.

Four sequences get one token each per step. With ``k`` adapters, sequence ``i`` has adapter ``i % k``: hf and mlx
compute them in one pass, llama.cpp in one pass for each, in the order of the scheduler. Its passes are also measured
group after group, where the context keeps its set: their sum is what the turns are compared with. One thread, so that
no time is spent waiting. The first pass of each measurement is not counted: it joins the weights of the adapters.

``--wide`` takes the shape of Llama-3.2-1B with random weights: on llama.cpp in ``Q8_0``, on hf in bfloat16.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from rich.console import Console

from enginehouse.contract.adapters import AdapterKeeper, AdapterSet
from enginehouse.contract.backend import ModelSource, Runner, Span
from enginehouse.engine.turns import AdapterTurns
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings
from enginehouse_backendkit.gguf_reader import GgufReader, reading
from enginehouse_testkit.gguf_writer import write_gguf

from .cuda_models import SHAPES, write_shape
from .gguf_models import write_gguf_model
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_adapters"]

_METRIC = "step, ms of CPU"
_NUM_SEQUENCES, _RANK, _PROMPT_TOKENS = 4, 16, 32
_NUMBERS = (1, 2, 4)
_SHAPE, _WIDE_SHAPE = "smollm2-135m", "llama-3.2-1b"
_HF, _MLX, _LLAMA, _ALONE = "hf", "mlx", "llamacpp", "llamacpp, group after group"

Shapes = dict[str, tuple[int, int]]
"""Names of projections of one layer, with their outputs and inputs."""


@frozen
class _Subject:
    """An opened model with four adapters."""

    name: str
    runner: Runner
    adapters: tuple[int, ...]
    takes_turns: bool

    def measure(self, num_adapters: int, num_steps: int, *, in_turn: bool = True) -> float:
        """Milliseconds of CPU per step; ``in_turn`` False runs each group's passes in one go."""
        sets: list[AdapterSet] = [
            ((self.adapters[number % num_adapters], 1.0),) if num_adapters else () for number in range(_NUM_SEQUENCES)
        ]
        sequences = [self.runner.open_sequence() for _ in sets]
        prompt = np.arange(1, 1 + _PROMPT_TOKENS, dtype=np.int32)
        for sequence, adapter in zip(sequences, sets, strict=True):
            self.runner.forward([Span(sequence, 0, prompt, adapter=adapter)])
        token = np.array([7], np.int32)
        spent_s = 0.0
        lengths = [_PROMPT_TOKENS] * len(sets)
        for is_counted, group in self._passes(sets, num_steps, in_turn=in_turn):
            spans = [Span(sequences[one], lengths[one], token, adapter=sets[one]) for one in group]
            began_s = time.process_time()
            self.runner.forward(spans).host()
            if is_counted:
                spent_s += time.process_time() - began_s
            for one in group:
                lengths[one] += 1
        for sequence in sequences:
            self.runner.free_sequence(sequence)
        return 1e3 * spent_s / num_steps

    def _passes(
        self, sets: Sequence[AdapterSet], num_steps: int, *, in_turn: bool
    ) -> Iterator[tuple[bool, Sequence[int]]]:
        """Yield whether a pass counts, and the numbers of its sequences; in turn as the scheduler orders them."""
        everyone = range(len(sets))
        groups = {one: [number for number in everyone if sets[number] == one] for one in dict.fromkeys(sets)}
        turns = AdapterTurns()
        if not self.takes_turns:
            parts = [[everyone] * (1 + num_steps)]
        elif in_turn:
            parts = [[groups[turns.next(groups)] for _ in range(1 + num_steps * len(groups))]]
        else:
            parts = [[group] * (1 + num_steps) for group in groups.values()]
        for part in parts:
            yield from ((number > 0, group) for number, group in enumerate(part))


def _open(name: str, source: Path, adapters: list[Path], **options: Any) -> _Subject:
    backend = PluginRegistry.load(PluginsSettings()).backends[name]
    chosen = backend.options(context=1024, slots=_NUM_SEQUENCES, **options)
    runner = backend.open(ModelSource(str(source), source), chosen, lambda share, what: None)
    assert isinstance(runner, Runner) and isinstance(runner, AdapterKeeper)
    handles = tuple(runner.load_adapter(path) for path in adapters)
    return _Subject(name, runner, handles, runner.capabilities.adapters == "per_pass")


def _halves(seed: int, shape: tuple[int, int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((_RANK, shape[1])).astype(np.float32) / 100
    return first, rng.standard_normal((shape[0], _RANK)).astype(np.float32) / 100


def _shapes(width: int, inner: int, heads: int, kv_heads: int) -> Shapes:
    kv = width // heads * kv_heads
    return {
        "q": (width, width),
        "k": (kv, width),
        "v": (kv, width),
        "o": (width, width),
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
    }


def _shapes_of(config: dict[str, Any]) -> Shapes:
    return _shapes(
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )


def _write_gguf(path: Path, model_file: Path, seed: int) -> Path:
    """An adapter of all projections of a GGUF file."""
    with reading(model_file) as file:
        values = {entry.key: entry.value for entry in GgufReader(file).entries()}
    kind = str(values["general.architecture"])
    names = ("embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
    width, inner, heads, kv_heads = (int(str(values[f"{kind}.{name}"])) for name in names)
    spelled = {"o": "attn_output", **{name: f"attn_{name}" for name in "qkv"}}
    tensors: dict[str, NDArray[np.float32]] = {}
    for layer in range(int(str(values[f"{kind}.block_count"]))):
        for name, shape in _shapes(width, inner, heads, kv_heads).items():
            base = f"blk.{layer}.{spelled.get(name, f'ffn_{name}')}.weight"
            tensors[f"{base}.lora_a"], tensors[f"{base}.lora_b"] = _halves(seed, shape)
    about = {"general.architecture": kind, "general.type": "adapter", "adapter.type": "lora"}
    return write_gguf(path, {**about, "adapter.lora.alpha": float(_RANK)}, tensors)


def _write_peft(folder: Path, config: dict[str, Any], seed: int) -> Path:
    """An adapter of all projections of the model of hf and mlx."""
    from safetensors.numpy import save_file

    shapes = _shapes_of(config)
    folder.mkdir()
    tensors: dict[str, NDArray[np.float32]] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            block = "self_attn" if len(name) == 1 else "mlp"
            module = f"base_model.model.model.layers.{layer}.{block}.{name}_proj"
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = _halves(seed, shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [f"{name}_proj" for name in shapes]
    about = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def _subjects(plan: Plan, folder: Path) -> Iterator[_Subject]:
    name, seeds = _WIDE_SHAPE if plan.wide else _SHAPE, range(max(_NUMBERS))
    config = SHAPES[name]
    model_file = write_gguf_model(config, folder / "model.gguf") if plan.wide else plan.model_file
    adapters = [_write_gguf(folder / f"{seed}.gguf", model_file, seed) for seed in seeds]
    yield _open(_LLAMA, model_file, adapters, threads=1)
    adapters = [_write_peft(folder / f"peft-{seed}", config, seed) for seed in seeds]
    model = write_shape(name, folder / "model")
    yield _open(_HF, model, adapters, threads=1, random_weights=True, device="cpu")
    if not plan.wide:
        yield _open(_MLX, _with_weights(model, config), adapters)


def _with_weights(folder: Path, config: dict[str, Any]) -> Path:
    """Write random weights, which mlx does not draw by itself."""
    from safetensors.numpy import save_file

    rng, width = np.random.default_rng(0), config["hidden_size"]
    shapes = {"model.embed_tokens": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _shapes_of(config).items():
            block = "self_attn" if len(name) == 1 else "mlp"
            shapes[f"model.layers.{layer}.{block}.{name}_proj"] = shape
    weights = {name: rng.standard_normal(shape).astype(np.float32) / 100 for name, shape in shapes.items()}
    norms = ["model.norm"]
    for layer in range(config["num_hidden_layers"]):
        norms += [f"model.layers.{layer}.{name}_layernorm" for name in ("input", "post_attention")]
    weights |= {name: np.ones(width, np.float32) for name in norms}
    save_file({f"{name}.weight": data for name, data in weights.items()}, folder / "model.safetensors")
    return folder


def measure_adapters(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Milliseconds of CPU of a step of four sequences without adapters, and with 1, 2 and 4."""
    record, num_steps = Record(), 6 if plan.quick else 40
    with tempfile.TemporaryDirectory() as folder:
        subjects = list(_subjects(plan, Path(folder)))
        for round_number, subject in plan.interleave(subjects):
            for number in (0, *_NUMBERS):
                cost_ms = subject.measure(number, num_steps)
                record.add(Key(_scenario(number), subject.name, _METRIC), cost_ms)
                console.print(f"round {round_number + 1}/{plan.num_rounds}  {subject.name}, {number}: {cost_ms:.2f} ms")
                if subject.takes_turns and number > 1:
                    alone_ms = subject.measure(number, num_steps, in_turn=False)
                    record.add(Key(_scenario(number), _ALONE, _METRIC), alone_ms)
        for subject in subjects:
            subject.runner.close()
    over = [
        Comparison(Key(_scenario(number), name, _METRIC), Key(_scenario(0), name, _METRIC), 1.15, target_is_upper=True)
        for name in (_HF, *(() if plan.wide else (_MLX,)))
        for number in _NUMBERS
    ]
    turns = [
        Comparison(
            Key(_scenario(number), _LLAMA, _METRIC), Key(_scenario(number), _ALONE, _METRIC), 1.05, target_is_upper=True
        )
        for number in _NUMBERS[1:]
    ]
    one = Comparison(Key(_scenario(1), _LLAMA, _METRIC), Key(_scenario(0), _LLAMA, _METRIC))
    return record, [*over, one, *turns]


def _scenario(number: int) -> str:
    return f"{number or 'no'} adapter{'s' if number != 1 else ''}"
