"""Creates a runner from a loaded transformers model on CUDA: verifies numbers, sizes the pool, records graphs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from enginehouse.contract.backend import Progress, RunnerCapabilities, Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.media import MAX_IMAGE_PIXELS
from enginehouse_hf.backend import HfOptions
from enginehouse_hf.cuda.attention import PoolAttention
from enginehouse_hf.cuda.chunks import chunk_size
from enginehouse_hf.cuda.compiling import compile_together
from enginehouse_hf.cuda.dissect import dissect
from enginehouse_hf.cuda.draws import draws_of_every_kind
from enginehouse_hf.cuda.fused import FusedNetwork
from enginehouse_hf.cuda.graphs import DecodeGraphs, Recorder, graph_sizes
from enginehouse_hf.cuda.image_spans import probe_logits
from enginehouse_hf.cuda.kinds import NotFusable
from enginehouse_hf.cuda.kv_tensor import KvTensor
from enginehouse_hf.cuda.long_spans import choose
from enginehouse_hf.cuda.mixers import PooledMixers
from enginehouse_hf.cuda.networks import Network, TransformersNetwork
from enginehouse_hf.cuda.packing import PackedSpans, Segment, pack
from enginehouse_hf.cuda.positions import PositionPool
from enginehouse_hf.cuda.recurrent_parts import find_part
from enginehouse_hf.cuda.runner import CudaModel
from enginehouse_hf.cuda.sampling import SUPPORTED
from enginehouse_hf.cuda.stacks import StackedAdapters
from enginehouse_hf.cuda.state_pools import NO_STATES, StatePools, num_rows
from enginehouse_hf.cuda.step import DeviceState, Step
from enginehouse_hf.cuda.structure import Experts
from enginehouse_hf.depth import exit_layers
from enginehouse_hf.facts import ModelFacts
from enginehouse_hf.images.reader import ImageReader
from enginehouse_hf.packed import num_packed
from enginehouse_hf.recurrent import Mixers

__all__ = ["open_on_cuda"]

_log = logging.getLogger(__name__)

_KEPT_SEQUENCES = 64
"""Minimum number of finished sequences kept for reuse; their places are freed when needed."""

_NOISE_ALLOWED, _LEAST_NOISE = 4.0, 1e-3
"""Allowed difference of logits, as a multiple of that of the same layers when a text is split differently.

With experts, also of that when the embeddings are rounded differently: a token then chooses others.
"""

_LEAST_NOISE_PACKED = 0.05
"""The same for quantised weights in 16 bits, which transformers' layers round to 16 bits and the kernels do not."""

_LARGEST_CHECK = 80
"""Minimum size of the largest step that is recorded while loading: 64 drafts and their neighbours."""

_LARGEST_GRAPH = 256
"""Minimum size of the largest step with a graph; steps of more tokens take longer than their launches."""

_FP8_CAPABILITY = (8, 9)

_MEASURED_TOKENS = 1024
"""Tokens of the prefill whose memory is measured."""

_SLACK_BYTES = 512 << 20
"""Reserve for libraries' workspaces and memory that the allocator cannot use."""


def open_on_cuda(
    model: Any,
    facts: ModelFacts,
    mixers: Mixers,
    options: HfOptions,
    progress: Progress,
    reader: ImageReader | None = None,
) -> tuple[CudaModel, RunnerCapabilities]:
    """Build everything that a runner needs; ``options`` must be resolved.

    Raises:
        ModelLoadError: there is not enough device memory.
    """
    torch.cuda.set_device(model.device)
    attention = PoolAttention(choose(model.device, model.dtype, facts.layers, facts.has_sinks))
    _check_types(model, options)
    # A draft is verified as decodes of one sequence, which states do not allow.
    largest = options.slots if facts.states else max(options.slots, _LARGEST_CHECK)
    sizes = graph_sizes(largest) if options.cuda_graphs else []
    later = graph_sizes(_LARGEST_GRAPH, above=largest) if sizes and not facts.states else []
    assert options.max_batch_tokens is not None
    max_sequences = options.slots + (options.slots if facts.states else max(options.slots, _KEPT_SEQUENCES))
    with torch.inference_mode():
        network = _choose_network(model, facts, mixers, options, attention, [*sizes, *later[-1:]], progress, reader)
        step_bytes = _largest_step_bytes(network, facts, model, options, reader)
    num_places = _num_places(model, facts, options, step_bytes, max_sequences)
    with torch.inference_mode():
        state = _allocate(facts, max_sequences, num_places, model, options)
        graphs = _record(network, state, sizes, later, progress)
        for draw in draws_of_every_kind(facts.vocab_size, model.dtype, model.device):
            draw()  # kernels that could not be compiled before
        chunk_tokens = _measure_chunk(network, state, facts.max_context, options.max_batch_tokens)
    capabilities = RunnerCapabilities(
        max_sequences=max_sequences,
        max_batch_tokens=max(options.max_batch_tokens, options.slots),
        max_context=facts.max_context,
        cache_tokens=num_places,
        prefill_chunk_tokens=min(chunk_tokens, options.max_batch_tokens),
        truncate="checkpoint" if facts.states else "any",
        fork="share",
        exit_layers=() if facts.states else exit_layers(model),
        states=not options.random_weights,  # the next process would use different random weights
        sampling=SUPPORTED,
        media=() if reader is None else ("image",),
        adapters="mixed",
    )
    kernel = attention.kernel.name if attention.kernel is not None else "plain"
    config = model.config.get_text_config()
    return CudaModel(
        network,
        state,
        graphs,
        StackedAdapters(network, model.dtype, graphs.change_adapters),
        kernel,
        slots=options.slots,
        num_layers=config.num_hidden_layers,
        dtype=model.dtype,
        hidden_size=config.hidden_size,
        checkpoint_bytes=options.checkpoints * facts.state_bytes,
    ), capabilities


def _check_types(model: Any, options: HfOptions) -> None:
    for name in ("type_k", "type_v"):
        if getattr(options, name) == "fp8" and torch.cuda.get_device_capability(model.device) < _FP8_CAPABILITY:
            card = torch.cuda.get_device_name(model.device)
            raise ModelLoadError(f'{name} = "fp8" needs a GPU of compute capability 8.9 or more, which {card} is not')


def _record(
    network: Network, state: DeviceState, sizes: list[int], later: list[int], progress: Progress
) -> DecodeGraphs:
    """Record decode steps as graphs; none if the model reads values on the host in between, as some experts do."""

    def report(share: float) -> None:
        progress(0.85 + 0.1 * share, "recording decode steps")

    try:
        return DecodeGraphs(network, state, sizes, Recorder(), report, later)
    except RuntimeError as error:
        _log.warning("hf: decode steps cannot be recorded and are launched kernel by kernel: %s", error)
        torch.cuda.synchronize()
        return DecodeGraphs(network, state, [], Recorder(), report)


def _measure_chunk(network: Network, state: DeviceState, longest: int, max_tokens: int) -> int:
    """Number of prompt tokens that take :data:`enginehouse_hf.cuda.chunks.CHUNK_S` on this device, in steps of 256."""
    size = min(1024, longest, max_tokens)
    num_more = min(4, max_tokens // size)
    times = [_time_prefill(network, state, size, num_prompts) for num_prompts in (1, num_more)]
    return chunk_size(size, times[0], size * num_more, times[1])


def _time_prefill(network: Network, state: DeviceState, size: int, num_prompts: int, num_runs: int = 3) -> float:
    """Time in seconds of a prefill of some prompts of one size; leaves no state."""
    tokens = np.empty((4, size * num_prompts), np.int32)
    tokens[0], tokens[1], tokens[3] = 0, state.dump_slot, state.dump_place
    tokens[2] = np.tile(np.arange(size), num_prompts)
    segments = [Segment(begin, begin + size, 0) for begin in range(0, size * num_prompts, size)]
    ends = np.array([segment.end - 1 for segment in segments], np.int32)
    state_rows = np.repeat(state.pools.dump_rows(1)[:, None], num_prompts if state.pools.forms else 0, 1)
    packed = PackedSpans(tokens, 0, segments, tokens[3].copy(), ends, state_rows)
    times = []
    for _ in range(num_runs):  # the first run may compile kernels
        torch.cuda.synchronize()
        started = time.perf_counter()
        network.run(Step.upload(state, packed))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def _choose_network(
    model: Any,
    facts: ModelFacts,
    mixers: Mixers,
    options: HfOptions,
    attention: PoolAttention,
    sizes: Sequence[int],
    progress: Progress,
    reader: ImageReader | None,
) -> Network:
    """Return the fused network if it exists and gives the same logits, else transformers' own layers.

    Its kernels for decode steps of ``sizes`` are compiled, and those of draws.
    """
    pooled = _pooled(model, facts, mixers, options) if facts.states else None
    plain = TransformersNetwork(model, attention, pooled, mixers.names if facts.states else ())
    fused = _fused(model, facts, attention, pooled) if options.fused else None
    progress(0.81, "compiling kernels")
    _compile(fused or plain, facts, model, options, () if facts.states else sizes or (1, 2))
    if fused is None:
        return plain
    progress(0.84, "comparing layers")
    expected = _probe(plain, facts, model, num_more=4)
    noise = _difference(_probe(plain, facts, model, num_more=14)[-5:], expected)
    if any(isinstance(layer.mlp, Experts) for layer in fused.structure.layers):  # rounding changes the chosen ones
        with _nudged_embeddings(model, facts):
            noise = max(noise, _difference(_probe(plain, facts, model, num_more=4), expected))
    error = _difference(_probe(fused, facts, model, num_more=4), expected)
    if reader is not None:
        error = max(error, _image_error(fused, plain, facts, model, reader))
    is_packed = num_packed(model) > 0
    least = _LEAST_NOISE_PACKED if is_packed and model.dtype != torch.float32 else _LEAST_NOISE
    if not error <= max(_NOISE_ALLOWED * noise, least):
        if is_packed:
            raise ModelLoadError(_no_fused_layers(f"they give other logits (off by {error:.2g}, rounding {noise:.2g})"))
        _log.warning("hf: the fused layers give other logits (off by %.2g, rounding %.2g): not used", error, noise)
        return plain
    return fused


def _pooled(model: Any, facts: ModelFacts, mixers: Mixers, options: HfOptions) -> PooledMixers:
    """Return the recurrent modules over pools of states."""
    pooled = PooledMixers(mixers.all, facts.states, model.device)
    if options.fused:
        pooled.use_kernels(partial(find_part, hidden_size=model.config.get_text_config().hidden_size))
    return pooled


def _fused(model: Any, facts: ModelFacts, attention: PoolAttention, pooled: PooledMixers | None) -> FusedNetwork | None:
    """Return the fused network, or None if the model has other parts."""
    try:
        return FusedNetwork(dissect(model, facts.max_context, pooled), attention, pooled)
    except NotFusable as reason:
        if num_packed(model):
            raise ModelLoadError(_no_fused_layers(str(reason))) from reason
        _log.info("hf: transformers' layers are used as they are: %s", reason)
        return None


def _compile(network: Network, facts: ModelFacts, model: Any, options: HfOptions, sizes: Sequence[int]) -> None:
    """Compile the kernels of decode steps of ``sizes`` and of draws; others are compiled when they are launched."""
    state = _allocate(facts, 1, 1, model, options)
    steps = [Step.static(state, size)[0] for size in sizes]
    works: list[Callable[[], object]] = [partial(network.run, step) for step in steps]
    started = time.perf_counter()
    num_kernels = compile_together(
        [*works, *draws_of_every_kind(facts.vocab_size, model.dtype, model.device)], model.device
    )
    _log.info("hf: %d kernels compiled or loaded in %.1f s", num_kernels, time.perf_counter() - started)


def _no_fused_layers(reason: str) -> str:
    return (
        f"its quantised weights need fused layers, which this model cannot have: {reason}; fused = false unpacks the "
        "weights to full size"
    )


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@contextmanager
def _nudged_embeddings(model: Any, facts: ModelFacts) -> Iterator[None]:
    """Change the embeddings of the text of :func:`_probe` by up to one unit of rounding."""
    weight, rows = model.get_input_embeddings().weight.detach(), torch.from_numpy(_text(facts)).long()
    kept, unit = weight[rows].clone(), torch.finfo(weight.dtype).eps
    shares = 2.0 * torch.rand(kept.shape, generator=torch.Generator().manual_seed(0)) - 1.0
    weight[rows] = (kept.float() * (1.0 + unit * shares.to(kept.device))).to(weight.dtype)
    try:
        yield
    finally:
        weight[rows] = kept


def _text(facts: ModelFacts) -> NDArray[np.int32]:
    """Token ids of a short text."""
    ids: NDArray[np.int32] = (np.arange(min(28, facts.max_context)) * 7919 % facts.vocab_size).astype(np.int32)
    return ids


def _probe(network: Network, facts: ModelFacts, model: Any, num_more: int) -> torch.Tensor:
    """Float32 logits of the end of a short text: its last ``num_more`` tokens, decoded singly, and one before them."""
    token_ids = _text(facts)
    longest = len(token_ids)
    num_more = min(num_more, longest - 1)
    capabilities = RunnerCapabilities(
        max_sequences=1, max_batch_tokens=longest, max_context=facts.max_context, cache_tokens=longest
    )
    state = _allocate(facts, 1, longest, model)
    positions = PositionPool(capabilities, facts.vocab_size)
    sequence = positions.open()
    rows = []
    for number, end in enumerate(range(longest - num_more, longest + 1)):
        start = end - 1 if number else 0
        spans = [Span(sequence, start, token_ids[start:end], "last")]
        sizes = positions.check(spans)
        state_rows = np.array([[number % 2], [1 - number % 2]], np.int32) if facts.states else None
        packed = pack(spans, sizes, positions.append(spans, sizes), positions.table, state_rows)
        rows.append(network.run(Step.upload(state, packed)).float())
    return torch.cat(rows)


def _image_error(
    network: Network, plain: TransformersNetwork, facts: ModelFacts, model: Any, reader: ImageReader
) -> float:
    """Difference between the logits of two networks for text after an image; 0 if the context is too short for it."""
    text = _text(facts)[:5]
    longest = facts.max_context
    capabilities = RunnerCapabilities(
        max_sequences=1, max_batch_tokens=longest, max_context=longest, cache_tokens=longest, media=("image",)
    )
    found, expected = (
        probe_logits(one, _allocate(facts, 1, longest, model), reader, capabilities, text) for one in (network, plain)
    )
    return 0.0 if found is None or expected is None else _difference(found, expected)


def _allocate(
    facts: ModelFacts, max_sequences: int, num_places: int, model: Any, options: HfOptions | None = None
) -> DeviceState:
    """Return empty memory; without ``options`` keys and values have the type of the model."""
    types = (None, None) if options is None else (options.type_k, options.type_v)
    layers = {
        index: tuple(
            KvTensor.allocate(num_places + 1, shape, model.dtype, model.device, kind)
            for shape, kind in zip(shapes, types, strict=True)
        )
        for index, shapes in zip(sorted(facts.windows), facts.layers, strict=True)
    }
    table = torch.zeros(max_sequences + 1, facts.max_context, dtype=torch.int32, device=model.device)
    last = torch.zeros(max_sequences + 1, dtype=torch.int32, device=model.device)
    pools = StatePools(facts.states, max_sequences, model.device) if facts.states else NO_STATES
    return DeviceState(layers, num_places, table, last, pools)  # type: ignore[arg-type]


def _num_places(model: Any, facts: ModelFacts, options: HfOptions, step_bytes: int, max_sequences: int) -> int:
    """Return the requested number of positions, or as many as fit into memory and sequences could use."""
    per_place = _allocate(facts, 0, 0, model, options).bytes_per_token
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(model.device)
    spare_bytes = total_bytes * (1.0 - options.memory_share) + step_bytes + _SLACK_BYTES
    num_states = num_rows(max_sequences) + options.checkpoints + 1 if facts.states else 0
    left_bytes = free_bytes - spare_bytes - num_states * facts.state_bytes
    fitting = int(left_bytes // max(per_place, 1))
    needed = options.cache_tokens or facts.max_context
    if needed > fitting:
        beside = (
            f"the weights and {num_states} states of {facts.state_bytes >> 20} MiB" if num_states else "the weights"
        )
        fewer = ", slots or checkpoints" if num_states else ""
        raise ModelLoadError(
            f"{needed} KV positions are needed, but the memory of {model.device} holds {max(fitting, 0)} beside "
            f"{beside}; lower context, cache_tokens or max_batch_tokens{fewer}, or raise memory_share"
        )
    return options.cache_tokens or min(fitting, 2 * options.slots * facts.max_context)


def _largest_step_bytes(
    network: Network, facts: ModelFacts, model: Any, options: HfOptions, reader: ImageReader | None
) -> int:
    """Return the temporary memory of a step, which may be the encoding of an image."""
    sizes = [_step_bytes(model, facts, options)]
    if facts.states:
        sizes.append(_measure_step_bytes(network, facts, model, options))
    if reader is not None:
        sizes.append(_measure_encoding(reader, model))
    return max(sizes)


def _measure_encoding(reader: ImageReader, model: Any) -> int:
    """Measure the temporary memory in which the largest image is encoded, in bytes. Raises ModelLoadError."""
    chunk = reader.sample(math.isqrt(MAX_IMAGE_PIXELS))[0]
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    try:
        reader.encode(chunk)
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"the memory of {model.device} is too small for an image of {MAX_IMAGE_PIXELS} pixels beside the weights; "
            "lower max_pixels in preprocessor_config.json"
        ) from error
    return torch.cuda.max_memory_allocated(model.device) - before_bytes


def _measure_step_bytes(network: Network, facts: ModelFacts, model: Any, options: HfOptions) -> int:
    """Measure the temporary memory of a prefill, for the largest forward pass: recurrent layers take most of it."""
    assert options.max_batch_tokens is not None
    size = min(_MEASURED_TOKENS, facts.max_context, options.max_batch_tokens)
    state = _allocate(facts, 1, size, model)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    _time_prefill(network, state, size, 1, num_runs=1)
    peak_bytes = torch.cuda.max_memory_allocated(model.device) - before_bytes
    return peak_bytes * options.max_batch_tokens // size


def _step_bytes(model: Any, facts: ModelFacts, options: HfOptions) -> int:
    """Estimate the temporary memory of the largest forward pass."""
    config = model.config.get_text_config()
    size_bytes = torch.finfo(model.dtype).bits // 8
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widths = 6 * config.hidden_size + 4 * inner
    if num_chosen := getattr(config, "num_experts_per_tok", None):  # experts give a row for each of them
        widths += num_chosen * (config.hidden_size + (getattr(config, "moe_intermediate_size", None) or inner))
    row_bytes = facts.vocab_size * (2 * size_bytes + 8)  # logits, a changed copy, buffers of draws
    num_rows = max(2 * max(options.slots, _LARGEST_CHECK), _LARGEST_GRAPH)
    assert options.max_batch_tokens is not None
    return int(options.max_batch_tokens * widths * size_bytes + num_rows * row_bytes)
