"""Sizes of the states that recurrent layers keep of a sequence, from a file's metadata.

Source: ``n_embd_r`` and ``n_embd_s`` of llama-hparams.cpp, and the recurrent layers of its models. Changed: the layers
of a model that states neither a list of heads nor an interval are all counted.
"""

from __future__ import annotations

from enginehouse_llamacpp.gguf import GgufHeader

__all__ = ["state_bytes_of_layers"]

_DEFAULT_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
_NUMBER_BYTES = 4


def state_bytes_of_layers(header: GgufHeader, num_layers: int) -> list[int]:
    """Return the bytes of a sequence's state in each layer; 0 for layers with keys and values only.

    Raises:
        ModelLoadError: the header contains implausible sizes.
    """
    size = _NUMBER_BYTES * _state_size(header)
    if not size:
        return [0] * num_layers
    heads = header.values.get(f"{header.architecture}.attention.head_count_kv")
    if isinstance(heads, list) and 0 in heads:
        return [0 if num_heads else size for num_heads in header.per_layer("attention.head_count_kv", num_layers)]
    interval = header.number("full_attention_interval", _DEFAULT_INTERVALS.get(header.architecture, 0))
    return [0 if interval and (layer + 1) % interval == 0 else size for layer in range(num_layers)]


def _state_size(header: GgufHeader) -> int:
    """Return how many numbers the state of one layer has."""
    width, kernel = header.number("embedding_length"), max(header.number("ssm.conv_kernel"), 1)
    if head_size := header.number("wkv.head_size"):
        return width * (header.number("token_shift_count", 2) + head_size)
    if kept := header.number("shortconv.l_cache"):
        return width * (kept - 1)
    if head_size := header.number("kda.head_dim"):
        num_heads = max(header.per_layer("attention.head_count", 1), default=0)
        return num_heads * head_size * (3 * (kernel - 1) + head_size)
    inner, state = header.number("ssm.inner_size"), header.number("ssm.state_size")
    return (kernel - 1) * (inner + 2 * header.number("ssm.group_count") * state) + state * inner
