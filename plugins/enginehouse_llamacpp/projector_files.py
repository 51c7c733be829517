"""Files of projectors (``mmproj``): the one that belongs to a model, and checks before llama.cpp reads it.

A projector has the vision tower or the audio encoder of a model, or both, and the layers that project their output to
the width of the text model. It is published as a file of its own, beside the text model. Does not know llama.cpp.
"""

from __future__ import annotations

import logging
import math
import os
import re
import struct
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import cast

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.gguf_names import choose_projector
from enginehouse.contract.regular_files import check_regular, open_regular
from enginehouse_backendkit.gguf_reader import GgufReader, TensorPlace, reading
from enginehouse_llamacpp.gguf import GgufHeader, read_header

__all__ = [
    "TURN_OFF",
    "find_projector",
    "has_audio",
    "has_vision",
    "identity_of",
    "projector_kind",
    "read_projector",
    "recording_bytes",
    "token_bytes",
]

TURN_OFF = 'mmproj = "" serves the model as one of text'
"""What to do if a projector that was found cannot be used."""

_log = logging.getLogger(__name__)

_MAX_ENTRIES = 10_000
_AT_LEAST_ONE = ("image_size", "patch_size", "embedding_length", "attention.head_count")
_DIVISORS = ("projector.scale_factor", "spatial_merge_size")
"""Sizes that llama.cpp divides by, unchecked."""

_AUDIO_AT_LEAST_ONE = ("num_mel_bins", "embedding_length", "attention.head_count")
_AUDIO_DIVISORS = ("projector.stack_factor",)

_FRAMES_PER_SECOND = 100
"""Frames of the spectrum of a recording, one per 10 ms for all kinds."""

_FRAMES = 30 * _FRAMES_PER_SECOND
"""Frames of a part of a recording of 30 seconds, by the encoders of Whisper's kind."""

_OF_SPEECH = ("qwen3tts_spkenc", "pockettts_spkenc")
"""Kinds that describe the voice for models that speak; a chat does not take them."""

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
            the model: named like it, or any one if the folder has no other model. One for other media than images and
            recordings is then not used.

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
    if found is not None and not _may_be_used(found):
        _log.info("%s: not used, because it takes neither images nor recordings", found)
        return None
    return found


def _may_be_used(path: Path) -> bool:
    """False for a projector of other media; damaged and other files are refused when they are opened."""
    try:
        header = read_header(path)
    except ModelLoadError:
        return True
    return header.architecture != "clip" or has_vision(header) or has_audio(header)


def has_vision(header: GgufHeader) -> bool:
    """True if the projector takes images."""
    return header.values.get("clip.has_vision_encoder") is True


def has_audio(header: GgufHeader) -> bool:
    """True if the projector takes recordings."""
    kind = header.values.get("clip.audio.projector_type") or header.values.get("clip.projector_type")
    return header.values.get("clip.has_audio_encoder") is True and kind not in _OF_SPEECH


def read_projector(path: Path) -> GgufHeader:
    """Check the file of a projector and return its metadata.

    Raises:
        ModelLoadError: names the file, and what is wrong.
    """
    header = read_header(path)
    if header.architecture != "clip":
        raise ModelLoadError(
            f"{path}: not a projector (mmproj): its architecture is {header.architecture!r}, not 'clip'"
        )
    if not has_vision(header) and not has_audio(header):
        raise ModelLoadError(f"{path}: this projector takes neither images nor recordings; {TURN_OFF}")
    kind = projector_kind(header)
    if kind in _POSITION_DEPENDENT:
        raise ModelLoadError(f"{path}: projectors of the kind {kind} are not supported; {TURN_OFF}")
    for is_there, tower, needed, divisors in (
        (has_vision(header), "vision", _AT_LEAST_ONE, _DIVISORS),
        (has_audio(header), "audio", _AUDIO_AT_LEAST_ONE, _AUDIO_DIVISORS),
    ):
        for name in (*needed, *divisors) if is_there else ():
            if not header.number(f"{tower}.{name}", int(name in divisors)):
                raise ModelLoadError(f"{path}: its clip.{tower}.{name} is 0; the file is damaged")
    with reading(path) as file:
        reader = GgufReader(file)
        alignment = next((entry.value for entry in reader.entries() if entry.key == "general.alignment"), 32)
        tensors = list(reader.tensors())
        begin = reader.position
        _check_end(path, tensors, begin + -begin % max(int(str(alignment)), 1))
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        if has_vision(header):
            _check_vision(header, shapes)
        if has_audio(header):
            _check_audio(header, shapes)
    return header


def projector_kind(header: GgufHeader) -> str:
    """Return llama.cpp's name for a kind of projector, such as ``idefics3``."""
    values = header.values
    return str(values.get("clip.projector_type") or values.get("clip.vision.projector_type") or "")


def token_bytes(header: GgufHeader) -> int:
    """Return about how many bytes mtmd keeps of an image for each of its tokens: float32 pixels of three colours."""
    if not has_vision(header):
        return 0
    merged = max(header.number(f"vision.{name}", 1) for name in _DIVISORS)
    side: int = header.number("vision.patch_size") * merged
    return 3 * 4 * side * side


def recording_bytes(header: GgufHeader, seconds: float, num_chunks: int) -> int:
    """Return about how many bytes mtmd keeps of each chunk of a recording: a float32 spectrum.

    Encoders of Whisper's kind get chunks of half a minute, which silence fills up; a Conformer (LFM2-Audio) or Parakeet
    gets the recording as one chunk.
    """
    num_frames = max(_FRAMES, math.ceil(_FRAMES_PER_SECOND * seconds / num_chunks))
    return 4 * num_frames * header.number("audio.num_mel_bins")


def _check_end(path: Path, tensors: list[TensorPlace], data_begin: int) -> None:
    """Raise ModelLoadError if the file ends before its tensors: llama.cpp would compute with what is in memory."""
    num_bytes = path.stat().st_size
    for tensor in tensors:
        (kind,) = struct.unpack_from("<I", tensor.description, len(tensor.description) - 4)
        block, block_bytes = _BLOCKS.get(kind, (256, 1))
        if data_begin + tensor.offset + math.ceil(tensor.num_elements / block) * block_bytes > num_bytes:
            raise ModelLoadError(f"{path}: it ends in the tensor {tensor.name}; it was not copied completely")


_INPUTS = re.compile(r"[va]\.blk\.\d+\.(attn_q|attn_k|attn_v|attn_qkv|ln1|ln2)\.weight|[va]\.position_embd\.weight")
"""Tensors of a tower whose innermost dimension is its width."""

_ONE_POSITION_PER_PATCH = ("gemma3", "idefics3", "mlp")
"""Kinds that read a position of each patch without resizing them."""

_Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""


def _check_vision(header: GgufHeader, shapes: _Shapes) -> None:
    """Raise ModelLoadError for shapes with which llama.cpp would end the process when it encodes an image."""
    patch = header.number("vision.patch_size")
    num_patches = (header.number("vision.image_size") // patch) ** 2
    wrong = _wrong_widths(header.number("vision.embedding_length"), "v", shapes)
    if (kernel := shapes.get("v.patch_embd.weight")) and len(kernel) == 4 and kernel[:2] != (patch, patch):
        wrong["v.patch_embd.weight"] = f"{patch} x {patch} x ..."
    needed = num_patches if projector_kind(header) in _ONE_POSITION_PER_PATCH else 0
    _refuse(header, shapes, wrong | _too_short("v.position_embd.weight", needed, shapes))


def _check_audio(header: GgufHeader, shapes: _Shapes) -> None:
    """Raise ModelLoadError for shapes with which llama.cpp would end the process when it encodes a recording."""
    num_bins, wrong = (
        header.number("audio.num_mel_bins"),
        _wrong_widths(header.number("audio.embedding_length"), "a", shapes),
    )
    kernel = shapes.get("a.conv1d.1.weight")  # of encoders of Whisper's kind only
    if kernel is not None and len(kernel) == 3:
        if kernel[1] != num_bins:
            wrong["a.conv1d.1.weight"] = f"... x {num_bins} x ..."
        wrong |= _too_short("a.position_embd.weight", _FRAMES // 2, shapes)
    _refuse(header, shapes, wrong)


def _wrong_widths(width: int, tower: str, shapes: _Shapes) -> dict[str, str]:
    """Return the tensors of a tower that have another width, with the shape that is right."""
    own = {name: shape for name, shape in shapes.items() if name[0] == tower and _INPUTS.fullmatch(name)}
    return {name: f"{width} x ..." for name, shape in own.items() if shape[0] != width}


def _too_short(name: str, num_positions: int, shapes: _Shapes) -> dict[str, str]:
    """Return the tensor of positions if it has too few of them, with the shape that is right."""
    shape = shapes.get(name)
    return {name: f"{shape[0]} x {num_positions}"} if shape is not None and shape[-1] < num_positions else {}


def _refuse(header: GgufHeader, shapes: _Shapes, wrong: Mapping[str, str]) -> None:
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
