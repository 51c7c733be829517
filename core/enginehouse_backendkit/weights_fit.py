"""Comparison of the tensors in a model's safetensors files with its ``config.json``, without its library.

Called by commands that examine files. Knows number of layers and shape of the embedding only: what libraries draw at
random, or answer with a list of tensors, where files of different models are in one folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import open_regular
from enginehouse_backendkit.folder_files import read_object

__all__ = ["find_misfit"]

_MAX_HEADER_BYTES = 100 * 2**20
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OTHER_PARTS = re.compile(r"vision|visual|audio|encoder|mtp")
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]


def find_misfit(folder: Path) -> str:
    """Return why the weights are not those of the configuration; "" if nothing speaks against it.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    config = read_object(folder / "config.json")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, dict)
    tensors = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in _tensors(file).items()}
    of_text = {name: tensor for name, tensor in tensors.items() if not _OTHER_PARTS.search(name)}
    layers = {int(found[1]) for name in of_text if (found := _LAYER.search(name)) is not None}
    wanted = text.get("num_hidden_layers")
    if layers and isinstance(wanted, int) and (missing := wanted - len(layers & set(range(wanted)))) > 0:
        return f"config.json has {wanted} layers, and the weights lack {missing} of them"
    sizes = [text.get("vocab_size"), text.get("hidden_size")]
    for name, tensor in of_text.items():
        is_embedding = name.endswith("embed_tokens.weight") and tensor.dtype in _PLAIN
        if is_embedding and None not in sizes and tensor.shape != sizes:
            return f"{name} is {tensor.shape}, and config.json says {sizes}"
    return ""


def _tensors(file: Path) -> dict[str, _Tensor]:
    try:
        with open_regular(file) as opened:
            num_bytes = int.from_bytes(opened.read(8), "little")
            if num_bytes > _MAX_HEADER_BYTES:
                raise ModelLoadError(f"{file}: its header would have {num_bytes} bytes; it is damaged")
            header: dict[str, Any] = msgspec.json.decode(opened.read(num_bytes), type=dict[str, Any])
        header.pop("__metadata__", None)
        return msgspec.convert(header, dict[str, _Tensor])
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
