"""Files of projectors (``mmproj``): the one that belongs to a model, and checks before llama.cpp reads it.

A projector has the vision tower of a model, and the layers that project its output to the width of the text model. It
is published as a file of its own, beside the text model. Does not know llama.cpp.
"""

from __future__ import annotations

import logging
import math
import os
import re
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import cast

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.gguf_names import choose_projector
from enginehouse.contract.regular_files import check_regular, open_regular
from enginehouse_backendkit.gguf_reader import GgufReader, TensorPlace, reading
from enginehouse_llamacpp.gguf import GgufHeader, read_header

__all__ = ["TURN_OFF", "find_projector", "identity_of", "projector_kind", "read_projector", "token_bytes"]

TURN_OFF = 'mmproj = "" serves the model without images'
"""What to do if a projector that was found cannot be used."""

_log = logging.getLogger(__name__)

_MAX_ENTRIES = 10_000
_AT_LEAST_ONE = ("image_size", "patch_size", "embedding_length", "attention.head_count")
_DIVISORS = ("projector.scale_factor", "spatial_merge_size")
"""Sizes that llama.cpp divides by, unchecked."""

_POSITION_DEPENDENT = ("deepseek4v", "hunyuanvl")
"""Kinds whose tokens for an image depend on the text before it, so that they cannot be kept for other requests."""

_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 30: (1, 2)}
"""Numbers and bytes of a block, by ggml's type: f32, f16, q4_0, q4_1, q5_0, q5_1, q8_0 and bf16."""

_PROBE_BYTES = 1 << 20


def find_projector(model: Path, setting: str | None) -> Path | None:
    """Return the projector of a model; None if it has none.

    Args:
        model: its file.
        setting: path of the projector, relative to the folder of the model; empty for none; None finds the one beside
            the model: named like it, or any one if the folder has no other model. One for other media than images is
            then not used.

    Raises:
        ModelLoadError: the file does not exist, or several ones may be meant.
    """
    if setting is not None:
        path = model.parent / Path(setting).expanduser()
        if setting and not path.is_file():
            raise ModelLoadError(f"mmproj: {path}: no such file")
        return path if setting else None
    try:
        with os.scandir(model.parent) as entries:
            names = [Path(entry) for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False)]
    except OSError:
        return None
    found = cast("Path | None", choose_projector(model, names))
    if found is not None and not _may_take_images(found):
        _log.info("%s: not used, because it does not take images", found)
        return None
    return found


def _may_take_images(path: Path) -> bool:
    """False for a projector of other media; damaged and other files are refused when they are opened."""
    try:
        header = read_header(path)
    except ModelLoadError:
        return True
    return header.architecture != "clip" or _has_vision(header)


def _has_vision(header: GgufHeader) -> bool:
    return header.values.get("clip.has_vision_encoder") is True


def read_projector(path: Path) -> GgufHeader:
    """Check the file of a projector and return its metadata.

    Raises:
        ModelLoadError: names the file, and what is wrong.
    """
    header = read_header(path)
    if header.architecture != "clip":
        raise ModelLoadError(
            f"{path}: not a projector of images (mmproj): its architecture is {header.architecture!r}, not 'clip'"
        )
    if not _has_vision(header):
        raise ModelLoadError(f"{path}: this projector does not take images (it has no vision encoder); {TURN_OFF}")
    kind = projector_kind(header)
    if kind in _POSITION_DEPENDENT:
        raise ModelLoadError(f"{path}: projectors of the kind {kind} are not supported; {TURN_OFF}")
    for name in _AT_LEAST_ONE:
        _check_size(header, name, header.number(f"vision.{name}"))
    for name in _DIVISORS:
        _check_size(header, name, header.number(f"vision.{name}", 1))
    with reading(path) as file:
        reader = GgufReader(file)
        alignment = next((entry.value for entry in reader.entries() if entry.key == "general.alignment"), 32)
        tensors = list(reader.tensors())
        begin = reader.position
        _check_end(path, tensors, begin + -begin % max(int(str(alignment)), 1))
        _check_shapes(header, tensors)
    return header


def projector_kind(header: GgufHeader) -> str:
    """Return llama.cpp's name for a kind of projector, such as ``idefics3``."""
    values = header.values
    return str(values.get("clip.projector_type") or values.get("clip.vision.projector_type") or "")


def token_bytes(header: GgufHeader) -> int:
    """Return about how many bytes mtmd keeps of an image for each of its tokens: float32 pixels of three colours."""
    merged = max(header.number(f"vision.{name}", 1) for name in _DIVISORS)
    side: int = header.number("vision.patch_size") * merged
    return 3 * 4 * side * side


def _check_size(header: GgufHeader, name: str, value: int) -> None:
    if not value:
        raise ModelLoadError(f"{header.path}: its clip.vision.{name} is 0; the file is damaged")


def _check_end(path: Path, tensors: list[TensorPlace], data_begin: int) -> None:
    """Raise ModelLoadError if the file ends before its tensors: llama.cpp would compute with what is in memory."""
    num_bytes = path.stat().st_size
    for tensor in tensors:
        (kind,) = struct.unpack_from("<I", tensor.description, len(tensor.description) - 4)
        block, block_bytes = _BLOCKS.get(kind, (256, 1))
        if data_begin + tensor.offset + math.ceil(tensor.num_elements / block) * block_bytes > num_bytes:
            raise ModelLoadError(f"{path}: it ends in the tensor {tensor.name}; it was not copied completely")


_INPUTS = re.compile(r"v\.blk\.\d+\.(attn_q|attn_k|attn_v|attn_qkv|ln1|ln2)\.weight|v\.position_embd\.weight")
"""Tensors of the vision tower whose innermost dimension is its width."""

_ONE_POSITION_PER_PATCH = ("gemma3", "idefics3", "mlp")
"""Kinds that read a position of each patch without resizing them."""


def _check_shapes(header: GgufHeader, tensors: Sequence[TensorPlace]) -> None:
    """Raise ModelLoadError for shapes with which llama.cpp would end the process when it encodes an image."""
    width, patch = header.number("vision.embedding_length"), header.number("vision.patch_size")
    num_patches = (header.number("vision.image_size") // patch) ** 2
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    wrong = {name: f"{width} x ..." for name, shape in shapes.items() if _INPUTS.fullmatch(name) and shape[0] != width}
    if (kernel := shapes.get("v.patch_embd.weight")) and len(kernel) == 4 and kernel[:2] != (patch, patch):
        wrong["v.patch_embd.weight"] = f"{patch} x {patch} x ..."
    positions = shapes.get("v.position_embd.weight", (width, num_patches))
    if projector_kind(header) in _ONE_POSITION_PER_PATCH and positions[-1] < num_patches:
        wrong["v.position_embd.weight"] = f"{width} x {num_patches}"
    for name, expected in wrong.items():
        found = " x ".join(map(str, shapes[name]))
        raise ModelLoadError(f"{header.path}: its tensor {name} has the shape {found}, not {expected}; {TURN_OFF}")


def identity_of(path: Path) -> str:
    """Return a text that another projector does not have: size, time, and a hash of the first and last megabyte."""
    found, facts = blake2b(digest_size=12), check_regular(path)
    with open_regular(path) as file:
        found.update(file.read(_PROBE_BYTES))
        file.seek(max(0, facts.st_size - _PROBE_BYTES))
        found.update(file.read(_PROBE_BYTES))
    return f"{facts.st_size} {facts.st_mtime_ns} {found.hexdigest()}"
