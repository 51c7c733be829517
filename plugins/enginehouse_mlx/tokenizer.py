"""Wraps the tokenizer that mlx-lm loads in core's Tokenizer contract, or one that it does not read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen
from tokenizers import Tokenizer

from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit.fast_tokenizer import FastTokenizer, chat_templates
from enginehouse_backendkit.tekken import read_tekken
from enginehouse_backendkit.template_files import read_templates

__all__ = ["ModelText", "tekken_text", "wrap_text"]


@frozen
class ModelText:
    """Tokenizer and special tokens of a model. ``bos_token`` and ``eos_token`` are "" if undefined."""

    tokenizer: FastTokenizer
    chat_templates: dict[str, str]
    bos_token: str
    eos_token: str


def wrap_text(loaded: Any, vocab_size: int, folder: Path) -> ModelText:
    """Wrap mlx-lm's ``TokenizerWrapper``, which forwards to a transformers tokenizer and has all end ids.

    Raises:
        ModelLoadError: it is not a fast tokenizer.
    """
    backend_tokenizer = getattr(loaded, "backend_tokenizer", None)
    if backend_tokenizer is None:
        raise ModelLoadError("the model has no fast tokenizer")
    tokenizer = FastTokenizer(backend_tokenizer, vocab_size, loaded.eos_token_ids)
    templates = chat_templates(loaded.chat_template, folder)
    return ModelText(tokenizer, templates, str(loaded.bos_token or ""), str(loaded.eos_token or ""))


def tekken_text(folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> ModelText:
    """Read Mistral's ``tekken.json``, of which mlx-lm makes an empty tokenizer.

    Raises:
        ModelLoadError: it cannot be read.
    """
    read = read_tekken(folder)
    tokenizer = FastTokenizer(Tokenizer.from_str(read.text), vocab_size, [*end_token_ids, read.eos_token_id])
    return ModelText(tokenizer, read_templates(folder), read.bos_token, read.eos_token)
