"""Metadata of a loaded model: GGUF metadata as text, chat templates, model information."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Mapping

from enginehouse.contract.types import ModelInfo
from enginehouse_llamacpp.library import Bindings
from enginehouse_llamacpp.pre_tokenizers import PreTokenizer
from enginehouse_llamacpp.tokenizer import LlamaCppTokenizer
from enginehouse_llamacpp.wordpiece import WordRules

__all__ = ["describe_model", "read_metadata", "read_pre_tokenizer", "read_word_rules", "recommended_parameters"]

_TEMPLATE_KEY = "tokenizer.chat_template"
_VOCABULARY_KEYS = "tokenizer.ggml."
_SAMPLING_KEYS: Mapping[str, tuple[str, type[float] | type[int]]] = {
    "temp": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "penalty_repeat": ("repetition_penalty", float),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "mirostat": ("mirostat", int),
    "mirostat_tau": ("mirostat_tau", float),
    "mirostat_eta": ("mirostat_eta", float),
}
_UNKNOWN_ID = 100
"""The id in BERT's own vocabulary, for files that do not state it, as llama.cpp assumes."""

_MAX_NUMBER = 2**31  # also excludes "nan"


def read_metadata(bindings: Bindings, model: int) -> dict[str, str]:
    """Return all GGUF keys as text, without the vocabulary's tables."""
    values: dict[str, str] = {}
    for index in range(bindings.llama_model_meta_count(model)):
        key = _read_text(lambda *to, at=index: bindings.llama_model_meta_key_by_index(model, at, *to))
        if not key.startswith(_VOCABULARY_KEYS):
            values[key] = _read_text(lambda *to, at=index: bindings.llama_model_meta_val_str_by_index(model, at, *to))
    return values


def read_pre_tokenizer(bindings: Bindings, model: int) -> PreTokenizer:
    """Return the pre-tokenizer of a model's vocabulary."""

    kind = bindings.llama_vocab_type(bindings.llama_model_get_vocab(model))
    name, pre = (_vocabulary_value(bindings, model, key) for key in ("model", "pre"))
    return PreTokenizer.of(kind == bindings.LLAMA_VOCAB_TYPE_BPE, name, pre)


def read_word_rules(bindings: Bindings, model: int) -> WordRules:
    """Return the rules of a WordPiece vocabulary."""
    unknown_id = _vocabulary_value(bindings, model, "unknown_token_id")
    is_lowercase = _vocabulary_value(bindings, model, "normalizer.lowercase") != "false"
    strips_accents = _vocabulary_value(bindings, model, "normalizer.strip_accents")
    return WordRules(
        int(unknown_id) if unknown_id.isdecimal() else _UNKNOWN_ID,
        is_lowercase,
        strips_accents == "true" if strips_accents else is_lowercase,
    )


def _vocabulary_value(bindings: Bindings, model: int, key: str) -> str:
    name = f"{_VOCABULARY_KEYS}{key}".encode()
    return _read_text(lambda *to: bindings.llama_model_meta_val_str(model, name, *to))


def describe_model(bindings: Bindings, model: int, tokenizer: LlamaCppTokenizer, max_context: int) -> ModelInfo:
    """Return the information about the model that the server process needs."""
    values = read_metadata(bindings, model)
    vocab = bindings.llama_model_get_vocab(model)
    description = _read_text(lambda *to: bindings.llama_model_desc(model, *to))
    facts = {
        "library": f"llama-cpp-python {_version(bindings)}",
        "architecture": values.get("general.architecture", ""),
        "name": values.get("general.name", ""),
        "description": description,
        "quantization": description.split(" ", 2)[-1],  # architecture, size, quantisation
        "parameters": str(bindings.llama_model_n_params(model)),
        "size_bytes": str(bindings.llama_model_size(model)),
        "trained_context": str(bindings.llama_model_n_ctx_train(model)),
        "license": values.get("general.license", ""),
    }
    return ModelInfo(
        backend="llamacpp",
        max_context=max_context,
        vocab_size=tokenizer.vocab_size,
        chat_templates=_chat_templates(values),
        special_tokens=dict(tokenizer.special_tokens),
        bos_token=tokenizer.token_text(bindings.llama_vocab_bos(vocab)),
        eos_token=tokenizer.token_text(bindings.llama_vocab_eos(vocab)),
        infill_tokens=_infill_tokens(bindings, vocab, tokenizer),
        generation_defaults=recommended_parameters(values),
        metadata={name: value for name, value in facts.items() if value},
    )


def recommended_parameters(values: Mapping[str, str]) -> dict[str, float | int]:
    """Request fields recommended by the file; values that are not numbers are omitted.

    Source: the ``general.sampling`` keys that llama.cpp reads and its converter writes.
    """
    found: dict[str, float | int] = {}
    for key, (name, kind) in _SAMPLING_KEYS.items():
        with contextlib.suppress(ValueError):
            text = values.get(f"general.sampling.{key}")
            if text is not None and abs(value := kind(text)) < _MAX_NUMBER:
                found[name] = value
    return found


def _version(bindings: Bindings) -> str:
    package = sys.modules[bindings.__name__.partition(".")[0]]
    return str(getattr(package, "__version__", ""))


def _infill_tokens(bindings: Bindings, vocab: int, tokenizer: LlamaCppTokenizer) -> tuple[str, ...]:
    """Prefix, suffix and middle tokens, named by the file or recognised by llama.cpp; empty unless all exist."""
    readers = (bindings.llama_vocab_fim_pre, bindings.llama_vocab_fim_suf, bindings.llama_vocab_fim_mid)
    tokens = tuple(tokenizer.token_text(read(vocab)) for read in readers)
    return tokens if all(token in tokenizer.special_tokens for token in tokens) else ()


def _chat_templates(values: Mapping[str, str]) -> dict[str, str]:
    """Jinja sources by name; a GGUF file may contain several."""
    templates = {}
    for key, source in values.items():
        if key == _TEMPLATE_KEY:
            templates["default"] = source
        elif key.startswith(f"{_TEMPLATE_KEY}."):
            templates[key.removeprefix(f"{_TEMPLATE_KEY}.")] = source
    return templates


def _read_text(read: Callable[[ctypes.Array[ctypes.c_char], int], int]) -> str:
    """Read text from a function that fills a buffer up to its size and returns the full length."""
    buffer = ctypes.create_string_buffer(256)
    length = read(buffer, len(buffer))
    if length >= len(buffer):
        buffer = ctypes.create_string_buffer(length + 1)
        read(buffer, len(buffer))
    return buffer.value.decode(errors="replace") if length >= 0 else ""
