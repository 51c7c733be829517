"""Memory estimate for a GGUF model, from its metadata alone."""

from __future__ import annotations

from pathlib import Path

from enginehouse.contract.backend import MemoryEstimate
from enginehouse.contract.errors import ModelLoadError
from enginehouse_llamacpp.device_estimate import CPU, bytes_by_device
from enginehouse_llamacpp.gguf import MAX_LAYERS, GgufHeader
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.projector_files import has_audio, has_vision, projector_kind, read_projector
from enginehouse_llamacpp.recurrent import state_bytes_of_layers
from enginehouse_llamacpp.sizes import choose_pooling_sizes, choose_sizes, short_pooling_sizes, type_bytes

__all__ = ["estimate_memory", "estimate_pooler"]

_AUDIO_POSITIONS = 1500
_QWEN_PATCHES = 4 * 46 * 46
"""Of models that take images of any size. Source: ``set_warmup_n_tokens`` in clip.cpp of llama-cpp-python 0.3.36."""


_PROCESS_BYTES = 96 * 2**20
"""A worker without a model, and buffers whose size llama.cpp decides; as much as many encoders need. Measured."""


def estimate_pooler(header: GgufHeader, options: LlamaCppOptions) -> MemoryEstimate:
    """Bytes for weights, the largest pass, a short text and the process of a pooling model; of decoders also KV caches.

    Raises:
        ModelLoadError: the header contains implausible sizes, or ``context`` is too long.
    """
    num_layers = _num_layers(header)
    sizes = choose_pooling_sizes(options, header.number("context_length"), header.vocab_size)
    is_encoder = header.values.get(f"{header.architecture}.attention.causal") is False
    kv_bytes = 0 if is_encoder else sum(_kv_bytes_of_layers(header, options, num_layers))
    contexts = [sizes, short_pooling_sizes(sizes)] if options.flash_attn is None else [sizes]
    pass_bytes = 0
    for one in contexts:
        mask_bytes = 4 * one.batch_tokens**2
        logits_bytes = 4 * one.batch_tokens * header.vocab_size * (1 if is_encoder else 2)
        pass_bytes += logits_bytes + mask_bytes + _compute_bytes(header, num_layers, one.batch_tokens)
    return MemoryEstimate(
        weights_bytes=header.file_bytes,
        kv_bytes_per_token=kv_bytes,
        total_bytes=header.file_bytes + kv_bytes * sum(one.num_cells for one in contexts) + pass_bytes + _PROCESS_BYTES,
    )


def estimate_memory(header: GgufHeader, options: LlamaCppOptions, projector: Path | None = None) -> MemoryEstimate:
    """Bytes for weights, KV cache, states, and buffers for logits and intermediate values, and those of a projector.

    The states of recurrent layers are those of all sequences, and the copies that are kept in the memory of the CPU.

    The KV cost of a token includes every layer's keys and values; sliding-window layers that keep only their window
    (``swa_full = false``) are counted in full too, so the estimate is an upper bound.

    Raises:
        ModelLoadError: the header contains implausible sizes.
    """
    num_layers = _num_layers(header)
    layer_bytes = _kv_bytes_of_layers(header, options, num_layers)
    kv_bytes = sum(layer_bytes)
    states = state_bytes_of_layers(header, num_layers)
    sizes = choose_sizes(
        options, header.number("context_length"), header.vocab_size, options.batch_invariant, has_state=any(states)
    )
    cache_bytes = [
        sizes.num_cells * one + sizes.num_sequence_ids * state for one, state in zip(layer_bytes, states, strict=False)
    ]
    compute_bytes = 4 * sizes.chunk_tokens * header.vocab_size + _compute_bytes(header, num_layers, sizes.chunk_tokens)
    host_bytes = 4 * sizes.max_sequences * header.vocab_size + options.checkpoints * sum(states)  # logits and copies
    weights_bytes = header.file_bytes
    by_device = bytes_by_device(header, options, cache_bytes, compute_bytes)
    if by_device:
        by_device[CPU] += host_bytes
    if projector is not None:
        media = read_projector(projector)
        media_bytes = max(
            _image_bytes(media) if has_vision(media) else 0, _audio_bytes(media) if has_audio(media) else 0
        )
        weights_bytes += media.file_bytes
        compute_bytes += media_bytes
        if by_device:
            by_device[CPU] += media.file_bytes + media_bytes
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes,
        total_bytes=weights_bytes + sum(cache_bytes) + compute_bytes + host_bytes,
        by_device=by_device,
    )


def _image_bytes(header: GgufHeader) -> int:
    """Bytes of the intermediate values of an image, of the size for which mtmd reserves memory when it is loaded."""
    num_patches = (header.number("vision.image_size") // header.number("vision.patch_size")) ** 2
    if projector_kind(header).startswith("qwen"):
        num_patches = _QWEN_PATCHES
    mask_bytes = 4 * num_patches**2 if header.number("vision.n_wa_pattern") else 0
    width, inner = header.number("vision.embedding_length"), header.number("vision.feed_forward_length")
    return mask_bytes + 4 * num_patches * (8 * width + 2 * inner)


def _audio_bytes(header: GgufHeader) -> int:
    """Bytes of the intermediate values of half a minute of a recording, by encoders of Whisper's kind."""
    width, inner = header.number("audio.embedding_length"), header.number("audio.feed_forward_length")
    num_scores = header.number("audio.attention.head_count") * _AUDIO_POSITIONS
    return 4 * _AUDIO_POSITIONS * (8 * width + 2 * inner + num_scores)


def _num_layers(header: GgufHeader) -> int:
    num_layers = header.number("block_count")
    if not 0 <= num_layers <= MAX_LAYERS:
        raise ModelLoadError(f"{header.path}: it claims to have {num_layers} layers; the file is damaged")
    return num_layers


def _compute_bytes(header: GgufHeader, num_layers: int, num_tokens: int) -> int:
    """Bytes of the intermediate values of a layer."""
    widest = max(header.per_layer("feed_forward_length", num_layers) or [0])
    return 4 * num_tokens * (4 * header.number("embedding_length") + 2 * widest)


def _kv_bytes_of_layers(header: GgufHeader, options: LlamaCppOptions, num_layers: int) -> list[int]:
    """Bytes of one token in the KV cache of each layer."""
    heads = max(header.per_layer("attention.head_count", num_layers) or [1])
    head_size = header.number("embedding_length") // max(heads, 1)
    key_size = header.number("attention.key_length", head_size)
    value_size = header.number("attention.value_length", head_size)
    return [
        type_bytes(options.type_k, kv_heads * key_size) + type_bytes(options.type_v or "f16", kv_heads * value_size)
        for kv_heads in header.per_layer("attention.head_count_kv", num_layers, heads)
    ]
