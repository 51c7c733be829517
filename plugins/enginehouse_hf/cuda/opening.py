"""From a loaded transformers model on a CUDA device to a runner: proves numbers, sizes the pool, records graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from enginehouse.backend import Progress, RunnerCapabilities, Span
from enginehouse.errors import ModelLoadError
from enginehouse_hf.backend import HfOptions
from enginehouse_hf.cuda.attention import PoolAttention, flash_is_right
from enginehouse_hf.cuda.fused import NotFusable, fuse
from enginehouse_hf.cuda.graphs import DecodeGraphs, graph_sizes
from enginehouse_hf.cuda.networks import Network, TransformersNetwork
from enginehouse_hf.cuda.positions import PositionPool
from enginehouse_hf.cuda.runner import CudaModel
from enginehouse_hf.cuda.sampling import SUPPORTED
from enginehouse_hf.cuda.step import DeviceState, Step, pack
from enginehouse_hf.facts import ModelFacts

__all__ = ["open_on_cuda"]

_log = logging.getLogger(__name__)

_KEPT_SEQUENCES = 64
"""Finished sequences that can be kept for reuse, at least; what they hold is given up when the room is needed."""

_CHUNK_TOKENS = 1024
"""A step with so many prompt tokens makes good use of the matrix units, and takes two to three decode steps."""

_SLACK_BYTES = 512 << 20
"""For libraries' workspaces and what the allocator cannot use."""


def open_on_cuda(
    model: Any, facts: ModelFacts, options: HfOptions, progress: Progress
) -> tuple[CudaModel, RunnerCapabilities]:
    """Everything that a runner needs; ``options`` must be resolved.

    Raises:
        ModelLoadError: the memory of the device does not suffice.
    """
    torch.cuda.set_device(model.device)
    attention = PoolAttention(flash_is_right(model.device, model.dtype))
    with torch.inference_mode():
        network = _choose_network(model, facts, options, attention)
    num_places = _num_places(model, facts, options)
    assert options.max_batch_tokens is not None
    capabilities = RunnerCapabilities(
        max_sequences=options.slots + max(options.slots, _KEPT_SEQUENCES),
        max_batch_tokens=max(options.max_batch_tokens, options.slots),
        max_context=facts.max_context,
        cache_tokens=num_places,
        prefill_chunk_tokens=_CHUNK_TOKENS,
        fork="share",
        logits="device",
        sampling=SUPPORTED,
    )
    with torch.inference_mode():
        state = _allocate(facts, capabilities.max_sequences, num_places, model)
        sizes = graph_sizes(options.slots) if options.cuda_graphs else []
        graphs = DecodeGraphs(network, state, sizes, _recording(progress))
    return CudaModel(network, state, graphs), capabilities


def _recording(progress: Progress) -> Callable[[float], None]:
    return lambda share: progress(0.85 + 0.1 * share, "recording decode steps")


def _choose_network(model: Any, facts: ModelFacts, options: HfOptions, attention: PoolAttention) -> Network:
    """The fused form where it exists and gives the same logits, else transformers' own layers."""
    plain = TransformersNetwork(model, attention, options.compile)
    if not options.fused:
        return plain
    expected = _probe(plain, facts, model)
    try:
        fused = fuse(model, facts.windows, facts.max_context, attention)
    except NotFusable as reason:
        _log.info("hf: transformers' layers are used as they are: %s", reason)
        return plain
    found = _probe(fused, facts, model)
    error = float((found - expected).norm() / expected.norm())
    if not error <= _tolerance(model.dtype):
        _log.warning("hf: the fused layers give other logits (off by %.2g), so they are not used", error)
        return plain
    return fused


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype == torch.float32 else 0.05


def _probe(network: Network, facts: ModelFacts, model: Any) -> torch.Tensor:
    """Logits of a short prompt and of four single tokens behind it, float32."""
    num_prompt, num_more = 24, 4
    longest = min(num_prompt + num_more, facts.max_context)
    capabilities = RunnerCapabilities(
        max_sequences=1, max_batch_tokens=longest, max_context=facts.max_context, cache_tokens=longest
    )
    state = _allocate(facts, 1, longest, model)
    positions = PositionPool(capabilities, facts.vocab_size)
    sequence = positions.open()
    token_ids = (torch.arange(longest) * 7919 % facts.vocab_size).numpy().astype("int32")
    rows = []
    for start, end in ((0, longest - num_more), *((at, at + 1) for at in range(longest - num_more, longest))):
        spans = [Span(sequence, start, token_ids[start:end], "all")]
        sizes = positions.check(spans)
        packed = pack(spans, sizes, positions.append(spans, sizes), positions.table)
        rows.append(network.run(Step.upload(state, packed)).float())
    return torch.cat(rows)


def _allocate(facts: ModelFacts, max_sequences: int, num_places: int, model: Any) -> DeviceState:
    layers = [
        tuple(torch.zeros(num_places + 1, heads, dim, dtype=model.dtype, device=model.device) for heads, dim in shapes)
        for shapes in facts.layers
    ]
    table = torch.zeros(max_sequences + 1, facts.max_context, dtype=torch.int32, device=model.device)
    last = torch.zeros(max_sequences + 1, dtype=torch.int32, device=model.device)
    return DeviceState(layers, table, last)  # type: ignore[arg-type]


def _num_places(model: Any, facts: ModelFacts, options: HfOptions) -> int:
    """As many positions as were asked for, or as the memory holds and sequences could use."""
    size_bytes = torch.finfo(model.dtype).bits // 8
    per_place = sum(heads * dim for shapes in facts.layers for heads, dim in shapes) * size_bytes
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(model.device)
    spare_bytes = total_bytes * (1.0 - options.memory_share) + _step_bytes(model, facts, options) + _SLACK_BYTES
    fitting = int((free_bytes - spare_bytes) // per_place)
    needed = options.cache_tokens or facts.max_context
    if needed > fitting:
        raise ModelLoadError(
            f"{needed} KV positions are needed, but the memory of {model.device} holds {max(fitting, 0)} beside the "
            "weights; lower context, cache_tokens or max_batch_tokens, or raise memory_share"
        )
    return options.cache_tokens or min(fitting, 2 * options.slots * facts.max_context)


def _step_bytes(model: Any, facts: ModelFacts, options: HfOptions) -> int:
    """What the largest forward pass needs for a moment, about."""
    config = model.config.get_text_config()
    size_bytes = torch.finfo(model.dtype).bits // 8
    widths = 6 * config.hidden_size + 4 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    rows = options.slots * facts.vocab_size * (size_bytes + 4)
    assert options.max_batch_tokens is not None
    return int(options.max_batch_tokens * widths * size_bytes + 2 * rows)
