"""Wraps the tokenizer that mlx-lm loads in core's Tokenizer contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit.fast_tokenizer import FastTokenizer, ModelText, chat_templates

__all__ = ["wrap_text"]


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
