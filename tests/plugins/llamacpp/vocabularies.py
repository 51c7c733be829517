"""Vocabularies of GGUF files, without weights, under any pre-tokenizer."""

from __future__ import annotations

import struct
from pathlib import Path

from enginehouse_backendkit.gguf_reader import GgufReader, reading
from enginehouse_llamacpp.library import load_library
from enginehouse_llamacpp.metadata import read_pre_tokenizer
from enginehouse_llamacpp.tokenizer import LlamaCppTokenizer

__all__ = ["open_tokenizer", "write_with_pre_tokenizer"]

_KEY = "tokenizer.ggml.pre"


def open_tokenizer(path: Path, pre_tokenizer: str = "") -> LlamaCppTokenizer:
    """The tokenizer of a file, as if its metadata named ``pre_tokenizer``; lives as long as the process."""
    bindings = load_library().bindings
    params = bindings.llama_model_default_params()
    params.vocab_only = True
    overrides = (bindings.llama_model_kv_override * 2)()
    if pre_tokenizer:
        overrides[0].tag = bindings.LLAMA_KV_OVERRIDE_TYPE_STR
        overrides[0].key, overrides[0].value.val_str = _KEY.encode(), pre_tokenizer.encode()
        params.kv_overrides = overrides
    model = bindings.llama_model_load_from_file(str(path).encode(), params)
    assert model, pre_tokenizer
    found = read_pre_tokenizer(bindings, model)
    # llama.cpp shows the file's own value even where an override counts.
    used = type(found).of(True, "gpt2", pre_tokenizer) if pre_tokenizer else found
    return LlamaCppTokenizer(bindings, bindings.llama_model_get_vocab(model), used)


def write_with_pre_tokenizer(path: Path, pre_tokenizer: str, target: Path) -> Path:
    """A copy of a GGUF file, which names another pre-tokenizer."""
    with reading(path) as file:
        reader = GgufReader(file)
        entry = next(entry for entry in reader.entries() if entry.key == _KEY)
        file.seek(0)
        reader = GgufReader(file)
        alignment = next((e.value for e in reader.entries() if e.key == "general.alignment"), 32)
        list(reader.tensors())
        end = reader.position
    assert isinstance(alignment, int)
    data = path.read_bytes()
    value = pre_tokenizer.encode()
    head = data[: entry.value_begin + 4] + struct.pack("<Q", len(value)) + value + data[entry.end : end]
    head += b"\0" * (-len(head) % alignment)
    target.write_bytes(head + data[end + -end % alignment :])
    return target
