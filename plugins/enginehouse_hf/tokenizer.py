"""Loads a model's tokenizer through transformers and wraps it in core's Tokenizer contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit.fast_tokenizer import FastTokenizer, ModelText, chat_templates, check_tokenizer_file
from enginehouse_backendkit.folder_files import check_has_tokenizer, has_only_tekken
from enginehouse_backendkit.tekken import tekken_text

__all__ = ["ModelFiles", "load_fast", "load_text"]


@frozen
class ModelFiles:
    """Location of a model for transformers: a folder, and optionally a GGUF file in it that contains everything."""

    folder: Path
    gguf_file: str | None = None
    trust_remote_code: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of every ``from_pretrained``. Nothing is downloaded; model code runs only if allowed."""
        gguf = {} if self.gguf_file is None else {"gguf_file": self.gguf_file}
        return {
            "pretrained_model_name_or_path": str(self.folder),
            "local_files_only": True,
            "trust_remote_code": self.trust_remote_code,
            **gguf,
        }


def load_text(files: ModelFiles, model: Any, vocab_size: int) -> ModelText:
    """Load the tokenizer of ``model`` (a transformers model, for its configured special ids).

    Raises:
        ModelLoadError: a fast tokenizer is missing, or its file cannot be read.
    """
    check_tokenizer_file(files.folder)
    if files.gguf_file is None and not files.trust_remote_code:
        check_has_tokenizer(files.folder)
    # transformers 5.17 reads a GGUF tokenizer's own special ids wrongly; those in the configuration are right.
    configured = [i for c in (model.generation_config, model.config.get_text_config()) for i in _ids(c.eos_token_id)]
    if files.gguf_file is None and has_only_tekken(files.folder):
        return tekken_text(files.folder, vocab_size, configured, Tokenizer.from_str)
    loaded = _read(files)
    own = [] if files.gguf_file else list(_ids(loaded.eos_token_id))
    tokenizer = FastTokenizer(loaded.backend_tokenizer, vocab_size, [*configured, *own])
    if files.gguf_file:
        bos, eos = (_name(tokenizer, getattr(model.config, f"{kind}_token_id", None)) for kind in ("bos", "eos"))
    else:
        bos, eos = str(loaded.bos_token or ""), str(loaded.eos_token or "")
    return ModelText(tokenizer, chat_templates(loaded.chat_template, files.folder), bos, eos)


def load_fast(files: ModelFiles) -> Any:
    """Return the tokenizer of a folder as transformers loads it, with ``backend_tokenizer``.

    Raises:
        ModelLoadError: a fast tokenizer is missing, or its file cannot be read.
    """
    check_tokenizer_file(files.folder)
    if not files.trust_remote_code:
        check_has_tokenizer(files.folder)
    return _read(files)


def _read(files: ModelFiles) -> Any:
    loaded = AutoTokenizer.from_pretrained(**files.arguments)
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise ModelLoadError(f"{files.folder}: {type(loaded).__name__} is not a fast tokenizer")
    return loaded


def _ids(value: int | list[int] | None) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif value is not None:
        yield from value


def _name(tokenizer: FastTokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_bytes[token_id].decode(errors="replace")
