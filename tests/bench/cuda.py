"""The hf backend on one GPU: ``python -m bench.cuda PART ...`` from the folder ``tests``.

Parts: ``llama`` (the shape of Llama-3.1-8B through the engine: one sequence, decode steps of many, 128 requests),
``served``, ``served-large-chunks`` and ``served-whole`` (the 128 requests through the server, the last not streamed),
``experts``, ``experts-fp8``, ``gpt-oss`` and ``gemma`` (decode steps and 32 requests of the shapes of Qwen3-30B-A3B,
gpt-oss-20b with experts in MXFP4, and Gemma 3 4B), ``adapters`` (decode steps of Llama-3.1-8B's shape with LoRA),
``offline`` (256 sequences of Qwen3-0.6B's shape through the engine), ``speculation`` (with and without drafts, see
``cuda_speculation.py``), ``heads`` and ``hybrid-heads`` (draft heads, see ``cuda_heads.py``), ``early-exit`` (see
``cuda_early_exit.py``), ``images`` (see ``cuda_images.py``) and ``transformers`` (``generate`` and ``generate_batch``).
Weights are random.
Each part prints lines; the card and its bandwidth, measured in the same run, come first.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from safetensors.torch import save_file
from torch import Tensor

from enginehouse.contract.backend import Draw, LastSampled, ModelSource, Span
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse_hf.backend import HfBackend, HfOptions

from .cuda_early_exit import measure_early_exit
from .cuda_heads import measure_heads, measure_mtp, write_mtp
from .cuda_images import measure_images
from .cuda_models import SHAPES, write_mxfp4, write_shape
from .cuda_speculation import measure_speculation

_SAMPLING = SamplingParams(temperature=0.6, seed=1)


def _say(*parts: object) -> None:
    print(*parts, flush=True)


def measure_card() -> float:
    """Print what the card is; its bandwidth in bytes per second, copying four gigabytes."""
    source = torch.empty(1 << 29, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    bandwidth = 2 * source.numel() * 4 / statistics.median(times)
    del source, target
    torch.cuda.empty_cache()
    _say(f"card: {torch.cuda.get_device_name(0)}, torch {torch.__version__}; copying: {bandwidth / 1e12:.2f} TB/s")
    return bandwidth


def open_shape(name: str, **options: Any) -> Any:
    """A runner of a model with random weights."""
    folder = write_shape(name, Path(tempfile.gettempdir()) / name)
    is_stored = "quantization_config" in SHAPES[name]
    if is_stored:
        write_mxfp4(folder)
    started = time.perf_counter()
    settings = HfOptions(device="cuda:0", random_weights=not is_stored, **options)
    runner = HfBackend().open(ModelSource(str(folder), folder), settings, lambda _share, _what: None)
    capabilities = runner.capabilities  # type: ignore[union-attr]
    _say(
        f"{name}: open after {time.perf_counter() - started:.0f} s, {runner.info.metadata['layers']}, "
        f"{capabilities.cache_tokens} KV positions"
    )
    return runner


def step_bytes(name: str, num_sequences: int, context: int, weight_bytes: float = 2.0) -> float:
    """Bytes that a decode step must read: every weight but the embeddings, and all keys and values.

    Of experts those that the tokens touch in the mean, if each chooses at random.

    Args:
        weight_bytes: of a weight in the layers; experts in MXFP4 have 17 for 32.
    """
    c = SHAPES[name]
    hidden, heads, kv, dim = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    num_experts, inner = c.get("num_experts", c.get("num_local_experts", 0)), c["intermediate_size"]
    router = 0.0
    if num_experts:
        untouched = (1 - c["num_experts_per_tok"] / num_experts) ** num_sequences
        inner = num_experts * (1 - untouched) * c.get("moe_intermediate_size", inner)
        router = 2.0 * hidden * num_experts
    inner_bytes = 17 / 32 if "quantization_config" in c else weight_bytes
    layer = hidden * (2 * heads + 2 * kv) * dim * weight_bytes + 3 * hidden * inner * inner_bytes + router
    weights = c["num_hidden_layers"] * layer + 2.0 * hidden * c["vocab_size"]
    kinds = c.get("layer_types", ["full_attention"] * c["num_hidden_layers"])
    seen = sum(min(context, c["sliding_window"]) if kind == "sliding_attention" else context for kind in kinds)
    return weights + 2.0 * num_sequences * seen * 2 * kv * dim


def run_engine(
    runner: Any, work: Sequence[tuple[int, int]], sampling: SamplingParams, **settings: Any
) -> dict[str, Any]:
    """Give all of ``work``, (prompt, answer) lengths, to an engine at once; figures of the run."""
    waits: Any = _Waits(runner)
    engine = StepEngine(waits, EngineSettings(slots=settings.pop("slots"), prefix_cache=False, **settings), {})
    rng = np.random.default_rng(0)
    for index, (num_prompt, num_answer) in enumerate(work):
        request = EngineRequest(
            request_id=str(index),
            sampling=sampling,
            stopping=StopParams(max_tokens=num_answer, ignore_eos=True),
        )
        engine.add(request, rng.integers(300, runner.info.vocab_size - 1, num_prompt).tolist())
    started, first, last, num_tokens, num_steps = time.perf_counter(), {}, 0.0, 0, 0
    step_times = []
    while engine.has_work():
        before = time.perf_counter()
        outputs = engine.step()
        num_steps += 1
        last = time.perf_counter()
        step_times.append(last - before)
        for request_id, event in outputs:
            if isinstance(event, TextDelta):
                first.setdefault(request_id, last)
            elif isinstance(event, RequestFinished):
                num_tokens += event.usage.completion_tokens
    first_s = sorted(moment - started for moment in first.values())
    return {
        "tokens": num_tokens,
        "wall_s": last - started,
        "tok/s": num_tokens / (last - started),
        "first_s": first_s[len(first_s) // 2],
        "steps": num_steps,
        "decode_tok/s": (num_tokens - len(work)) / (last - max(first.values())) if len(work) == 1 else None,
        "median_step_ms": statistics.median(step_times) * 1e3,
        "waiting": waits.waited_s / (last - started),
    }


class _Waits:
    """A runner that notes how long the engine waits for tokens: the rest is Python between two launches."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.waited_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def sample(self, output: Any, draws: Sequence[Draw]) -> Any:
        """As the runner does."""
        drawn, outer = self._runner.sample(output, draws), self

        class Timed:
            def host(self) -> Any:
                started = time.perf_counter()
                sampled = drawn.host()
                outer.waited_s += time.perf_counter() - started
                return sampled

        return Timed()


def measure_single(runner: Any, bandwidth: float) -> None:
    """One sequence whose context is 600 on average."""
    run_engine(runner, [(64, 32)], _SAMPLING, slots=1)
    limit = bandwidth / step_bytes("llama-3.1-8b", 1, 600)
    for what, sampling in {
        "temperature 0.6": _SAMPLING,
        "greedy": SamplingParams(temperature=0.0),
        "top_p 0.9, top_k 40": SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=1),
    }.items():
        found = [run_engine(runner, [(450, 300)], sampling, slots=1)["decode_tok/s"] for _ in range(2)]
        _say(f"single, context 600, {what}: {max(found):.1f} tok/s (limit {limit:.0f} by the copying bandwidth)")


def time_steps(runner: Any, num_sequences: int, context: int, adapters: Sequence[int] = ()) -> float:
    """Median seconds of decode steps at a full batch, launched one ahead, tokens read one step late.

    With adapters, each sequence has one of them, in turn.
    """
    num_steps, vocab_size = 40, runner.info.vocab_size
    rng = np.random.default_rng(0)
    sequences = {runner.open_sequence(): ((adapters[i % len(adapters)], 1.0),) if adapters else ()
                 for i in range(num_sequences)}  # fmt: skip
    num_prompt = context - num_steps // 2
    for sequence, adapter in sequences.items():
        prompt = rng.integers(300, vocab_size - 1, num_prompt - 1).astype(np.int32)
        runner.forward([Span(sequence, 0, prompt, "none", adapter=adapter)])
    first = np.array([300], np.int32)
    spans = [Span(sequence, num_prompt - 1, first, adapter=adapter) for sequence, adapter in sequences.items()]
    pending, times = None, []
    for step in range(num_steps):
        started = time.perf_counter()
        output = runner.forward(spans)
        drawn = runner.sample(
            output,
            [Draw(row=i, sequence=s, sampling=_SAMPLING, number=0.37) for i, s in enumerate(sequences)],
        )
        if pending is not None:
            pending.host()
        pending = drawn
        spans = [evolve(span, start=num_prompt + step, input=LastSampled()) for span in spans]
        times.append(time.perf_counter() - started)
    pending.host()
    for sequence in sequences:
        runner.free_sequence(sequence)
    return statistics.median(times[5:])


def measure_steps(
    runner: Any, name: str, num_sequences: int, context: int, bandwidth: float, *, weight_bytes: float = 2.0
) -> None:
    """Decode steps at a full batch, beside their floor."""
    median = time_steps(runner, num_sequences, context)
    floor = step_bytes(name, num_sequences, context, weight_bytes) / bandwidth
    _say(
        f"steps, {name}, {num_sequences} sequences of {context}: {median * 1e3:.2f} ms with sampling = "
        f"{num_sequences / median:.0f} tok/s; {median / floor:.2f} of the floor, {floor * 1e3:.2f} ms"
    )


def measure_adapters(ranks: Sequence[int] = (16,), sizes: Sequence[int] = (1, 8, 32, 128)) -> None:
    """Decode steps of Llama-3.1-8B's shape with 1, 2, 4 and 8 adapters of all projections, beside those with none."""
    for rank in ranks:
        runner = open_shape("llama-3.1-8b", slots=128, context=2048, cache_tokens=90_000)
        folder = write_adapter(runner, Path(tempfile.mkdtemp()) / "adapter", rank)
        started = time.perf_counter()
        handles = [runner.load_adapter(folder) for _ in range(8)]
        _say(f"adapters of rank {rank}: 8 loaded in {time.perf_counter() - started:.1f} s")
        for num_sequences in sizes:
            base, *others = (time_steps(runner, num_sequences, 600, handles[:number]) for number in (0, 1, 2, 4, 8))
            again = time_steps(runner, num_sequences, 600)
            times = ", ".join(f"{one * 1e3:.2f}" for one in others)
            shares = ", ".join(f"{min(base, again) / one:.3f}" for one in others)
            _say(
                f"adapters of rank {rank}, {num_sequences} sequences of 600: none {base * 1e3:.2f}, {again * 1e3:.2f} "
                f"ms; 1, 2, 4, 8: {times} ms, tokens per second over none {shares}"
            )
        runner.close()


def write_adapter(runner: Any, folder: Path, rank: int) -> Path:
    """A random LoRA of all projections of a runner's model, in PEFT's format."""
    tensors = {}
    for part in runner._model.network.adaptable().values():
        for name, num_rows in part.modules:
            half = {"dtype": torch.bfloat16, "device": "cuda"}
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, part.width, **half).cpu() / 64
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(num_rows, rank, **half).cpu() / 64
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def offline_work() -> list[tuple[int, int]]:
    """mini-sglang's and nano-vllm's offline workload: 256 sequences, 133,966 tokens of answers."""
    chance = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(len([chance.randint(0, 10000) for _ in range(chance.randint(100, 1024))]))
    return [(num_prompt, chance.randint(100, 1024)) for num_prompt in prompts]


def measure_offline(**options: Any) -> None:
    """256 sequences of Qwen3-0.6B's shape."""
    runner = open_shape("qwen3-0.6b", slots=256, context=2048, **options)
    run_engine(runner, [(100, 8)] * 256, _SAMPLING, slots=256)
    work = offline_work()
    usual = runner.capabilities.prefill_chunk_tokens
    for what, settings in {f"chunks of {usual}": {}, "chunks of 8192": {"prefill_chunk_tokens": 8192}}.items():
        found = run_engine(runner, work, _SAMPLING, slots=256, **settings)
        _say(
            f"offline, {len(work)} sequences, {found['tokens']} tokens, {what}: {found['wall_s']:.2f} s = "
            f"{found['tok/s']:.0f} tok/s; {found['steps']} steps, median {found['median_step_ms']:.2f} ms, "
            f"{found['waiting']:.0%} of the time waiting for the GPU"
        )
    runner.close()


def served_work() -> list[tuple[int, int]]:
    """128 requests, prompts of 100 to 1024 tokens, 256 tokens of answer."""
    chance = random.Random(0)
    return [(chance.randint(100, 1024), 256) for _ in range(128)]


def measure_served(streams: bool = True, **options: Any) -> None:
    """128 requests at once through the server, over HTTP on this machine."""
    from enginehouse_testkit.server import started_server

    folder = write_shape("llama-3.1-8b", Path(tempfile.gettempdir()) / "llama-3.1-8b")
    config = folder / "enginehouse.toml"
    lines = ["[models.bench]", f'source = "{folder}"', 'backend = "hf"', "random_weights = true", "slots = 128"]
    lines += ["context = 2048", "prefix_cache = false", *(f"{key} = {value}" for key, value in options.items())]
    config.write_text("\n".join(lines) + "\n")
    with started_server("--config", config, ready_timeout_s=240) as server:
        for attempt in range(3):
            figures = asyncio.run(_drive(str(server.url), served_work() if attempt else [(64, 16)] * 16, streams))
            if attempt:
                _say(f"served, {'streamed' if streams else 'whole'}, {options}: {figures}")


async def _drive(url: str, work: Sequence[tuple[int, int]], streams: bool) -> str:
    import aiohttp

    rng = np.random.default_rng(1)
    first_s: list[float] = []
    counts: list[int] = []

    async def ask(client: aiohttp.ClientSession, num_prompt: int, num_answer: int) -> None:
        body = {
            "model": "bench",
            "prompt": rng.integers(300, 128_000, num_prompt).tolist(),
            "max_tokens": num_answer,
            "temperature": 0.6,
            "ignore_eos": True,
            "stream": streams,
            "stream_options": {"include_usage": True} if streams else None,
        }
        async with client.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            if not streams:
                counts.append(json.loads(await answer.read())["usage"]["completion_tokens"])
                return
            tail = b""
            async for piece in answer.content.iter_any():
                if b'"text"' in piece and not any(entry is answer for entry in seen):
                    seen.append(answer)
                    first_s.append(time.perf_counter() - started)
                tail = (tail + piece)[-2000:]
            usage = next(line for line in reversed(tail.split(b"\n")) if b'"completion_tokens"' in line)
            counts.append(json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"])

    seen: list[object] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as client:
        started = time.perf_counter()
        await asyncio.gather(*(ask(client, *lengths) for lengths in work))
        wall_s = time.perf_counter() - started
    first = f"; first token median {statistics.median(first_s):.2f} s, last {max(first_s):.2f} s" if first_s else ""
    return f"{len(work)} requests, {sum(counts)} tokens in {wall_s:.2f} s = {sum(counts) / wall_s:.0f} tok/s{first}"


def measure_transformers() -> None:
    """What transformers itself does with the same shape on the same card."""
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    folder = write_shape("llama-3.1-8b", Path(tempfile.gettempdir()) / "llama-3.1-8b")
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = torch.randint(300, 128_000, (1, 450), device="cuda")
    for num_tokens in (4, 64):
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=True, temperature=0.6)
        torch.cuda.synchronize()
        took = time.perf_counter() - started
    _say(f"transformers generate, 1 sequence: {num_tokens / took:.1f} tok/s")
    prompts = [np.random.default_rng(2).integers(300, 128_000, n).tolist() for n, _ in served_work()]
    config = GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for some in (prompts[:2], prompts):
        started = time.perf_counter()
        answers = model.generate_batch(
            some,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=True),
            progress_bar=False,
        )
        torch.cuda.synchronize()
        took = time.perf_counter() - started
    num_made = sum(len(answer.generated_tokens) for answer in answers.values())
    _say(f"transformers generate_batch, 128 requests, 64 tokens each: {num_made / took:.0f} tok/s in {took:.1f} s")
    del model


def _measure_llama(bandwidth: float) -> None:
    runner = open_shape("llama-3.1-8b", slots=128, context=2048)
    measure_single(runner, bandwidth)
    for num_sequences in (1, 8, 32, 128):
        measure_steps(runner, "llama-3.1-8b", num_sequences, 600, bandwidth)
    found = run_engine(runner, served_work(), _SAMPLING, slots=128)
    _say(
        f"engine, 128 requests without HTTP: {found['wall_s']:.2f} s = {found['tok/s']:.0f} tok/s, "
        f"{found['waiting']:.0%} of the time waiting for the GPU; chunks of {runner.capabilities.prefill_chunk_tokens}"
    )
    runner.close()


def _measure_shape(name: str, bandwidth: float, weight_bytes: float = 2.0, **options: Any) -> None:
    """Decode steps of 1, 8 and 32 sequences, and 32 requests at once through the engine."""
    runner = open_shape(name, slots=32, context=2048, **options)
    for num_sequences in (1, 8, 32):
        measure_steps(runner, name, num_sequences, 600, bandwidth, weight_bytes=weight_bytes)
    found = run_engine(runner, [(512, 128)] * 32, _SAMPLING, slots=32)
    chunk = runner.capabilities.prefill_chunk_tokens
    _say(f"engine, {name}, 32 requests of 512 and 128 tokens: {found['tok/s']:.0f} tok/s; chunks of {chunk}")
    runner.close()


def _measure_changed(
    measure: Callable[[Any, Tensor, Tensor], Iterator[str]], name: str = "llama-3.1-8b", **options: Any
) -> None:
    """Give a fresh model, whose weights may be changed, to a measurement that yields lines."""
    runner = open_shape(name, slots=8, context=2048, **options)
    network = runner._model.network
    for line in measure(runner, network.structure.embeddings, network.structure.head.weight):
        _say(line)
    runner.close()


def _measure_mtp() -> None:
    write_mtp("hybrid-9b", write_shape("hybrid-9b", Path(tempfile.gettempdir()) / "hybrid-9b"))
    _measure_changed(measure_mtp, "hybrid-9b", cache_tokens=65_536)


def main() -> None:
    """Run the parts that the command line names."""
    bandwidth = measure_card()
    parts: dict[str, Callable[[], None]] = {
        "llama": lambda: _measure_llama(bandwidth),
        "experts": lambda: _measure_shape("qwen3-30b-a3b", bandwidth),
        "experts-fp8": lambda: _measure_shape("qwen3-30b-a3b", bandwidth, 1.0, quantize="fp8"),
        "gpt-oss": lambda: _measure_shape("gpt-oss-20b", bandwidth),
        "gemma": lambda: _measure_shape("gemma-3-4b", bandwidth),
        "adapters": measure_adapters,
        "offline": measure_offline,
        "speculation": lambda: _measure_changed(measure_speculation),
        "heads": lambda: _measure_changed(measure_heads, cache_tokens=65_536),
        "hybrid-heads": _measure_mtp,
        "images": lambda: [_say(line) for line in measure_images()],
        "early-exit": lambda: _measure_changed(measure_early_exit),
        "served": measure_served,
        "served-large-chunks": lambda: measure_served(prefill_chunk_tokens=8192),
        "served-whole": lambda: measure_served(streams=False, prefill_chunk_tokens=8192),
        "transformers": measure_transformers,
    }
    for name in sys.argv[1:] or parts:
        started = time.perf_counter()
        try:
            parts[name]()
        except Exception as error:  # noqa: BLE001 - the other parts still have something to say
            _say(f"{name} failed: {type(error).__name__}: {error}")
        gc.collect()
        torch.cuda.empty_cache()
        _say(f"[{name}: {time.perf_counter() - started:.0f} s]")


if __name__ == "__main__":
    main()
