"""Memory of a model by device, from the file and the settings alone: before a library or a server is asked.

Known only where the settings name the devices: ``devices``, ``rpc`` or ``tensor_split``. Device memory that llama.cpp
would choose by its free size is not.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from enginehouse_backendkit.gguf_reader import GgufReader, reading
from enginehouse_llamacpp.devices import EXPERTS
from enginehouse_llamacpp.gguf import GgufHeader, shard_paths
from enginehouse_llamacpp.options import LlamaCppOptions

__all__ = ["CPU", "bytes_by_device"]

CPU = "CPU"
"""Name of the main memory of this machine."""

_TIED = "output.weight (token_embd.weight)"
"""Name of the copy of the embeddings with which a device computes the output."""

_LAYER = re.compile(r"blk\.(\d+)\.")


def bytes_by_device(
    header: GgufHeader, options: LlamaCppOptions, kv_bytes: Sequence[int], compute_bytes: int
) -> dict[str, int]:
    """Return the bytes that each device needs; empty if the settings do not name the devices.

    Source: the division of layers and the buffers of tensors are those of ``load_tensors`` in llama.cpp. Changed: with
    ``split_mode`` ``row`` or ``tensor``, every tensor of a layer is divided by the shares.

    Args:
        header: of a model without a projector.
        options: the settings.
        kv_bytes: of each layer's part of the KV cache.
        compute_bytes: of intermediate values, which each device keeps.

    Raises:
        ModelLoadError: the file cannot be read.
    """
    names = options.devices or options.rpc or tuple(f"device {one}" for one in range(len(options.tensor_split)))
    if not names:
        return {}
    if options.split_mode == "none":
        chosen = options.main_gpu or 0
        names, shares = names[chosen : chosen + 1], [1.0]
    else:
        shares = [*options.tensor_split, *[0.0] * (len(names) - len(options.tensor_split))]
        shares = shares if any(shares) else [1.0] * len(names)
    places = _places(len(kv_bytes), options, names, shares)
    used = Counter(dict.fromkeys((CPU, *names), 0))
    for name, num_bytes in _tensors(header.path):
        for device, share in _parts(name, places, options).items():
            used[device] += round(num_bytes * share) if (name, device) != (_TIED, CPU) else 0
    for parts, num_bytes in zip(places, kv_bytes, strict=False):
        for device, share in parts.items():
            used[device] += round(num_bytes * share)
    return {device: num_bytes + compute_bytes * (num_bytes > 0) for device, num_bytes in used.items()}


def _places(
    num_layers: int, options: LlamaCppOptions, names: Sequence[str], shares: Sequence[float]
) -> list[dict[str, float]]:
    """Return the shares of each layer by device; the last one is that of the output, which counts as a layer."""
    bounds = [bound / sum(shares) for bound in accumulate(shares)]
    num_places = num_layers + 1
    num_moved = num_places if options.n_gpu_layers < 0 else min(options.n_gpu_layers, num_places)
    first = num_places - num_moved
    places: list[dict[str, float]] = [{CPU: 1.0}] * first
    for number in range(num_moved):
        if options.split_mode in ("row", "tensor"):
            places.append(
                {name: end - begin for name, (begin, end) in zip(names, pairwise((0.0, *bounds)), strict=True)}
            )
        else:
            places.append({names[min(bisect_right(bounds, number / num_moved), len(names) - 1)]: 1.0})
    return places


def _parts(name: str, places: Sequence[dict[str, float]], options: LlamaCppOptions) -> dict[str, float]:
    """Return the shares of a tensor by device."""
    for rule in options.override_tensor:
        pattern, _, buffer = rule.rpartition("=")
        if re.search(pattern, name):
            return {buffer: 1.0}
    match = _LAYER.match(name)
    if match and int(match[1]) < options.n_cpu_moe and re.match(EXPERTS.format(layer=match[1]), name):
        return {CPU: 1.0}
    if match:
        return places[int(match[1])] if int(match[1]) < len(places) - 1 else {}  # not loaded
    return places[-1] if name.startswith("output") else {CPU: 1.0}


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and the bytes of each tensor; a model without an output uses its embeddings for it, too."""
    tied_bytes, has_output = 0, False
    for shard in shard_paths(path):
        with reading(shard) as file:
            reader = GgufReader(file)
            for _ in reader.entries():
                pass
            tensors = sorted(reader.tensors(), key=lambda tensor: tensor.offset)
            data_begin = reader.position
            end = file.seek(0, 2) - data_begin
        bounds = [*(tensor.offset for tensor in tensors), end]
        for tensor, (begin, after) in zip(tensors, pairwise(bounds), strict=True):
            tied_bytes += (after - begin) * (tensor.name == "token_embd.weight")
            has_output |= tensor.name == "output.weight"
            yield tensor.name, max(0, after - begin)
    if tied_bytes > 0 and not has_output:
        yield _TIED, tied_bytes
