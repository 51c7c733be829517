"""Opens the draft head of a model: an EAGLE-3 head from a folder, or the MTP layer of the model's own files."""

from __future__ import annotations

from typing import Any

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.heads.drafting import DraftHead
from enginehouse_hf.heads.eagle3 import open_eagle3
from enginehouse_hf.heads.mtp import open_mtp
from enginehouse_hf.tokenizer import ModelFiles
from enginehouse_hf.weights import mapped_errors

__all__ = ["open_head"]


def open_head(source: ModelSource | None, files: ModelFiles, model: Any, vocab_size: int) -> DraftHead:
    """Read a draft head.

    Args:
        source: the folder of the head; None is the model's own.
        files: those of the model.
        model: the transformers model.
        vocab_size: width of its rows of logits.

    Raises:
        ModelLoadError: there is no head that fits the model.
    """
    if getattr(model, "hf_device_map", None) is not None and len(set(model.hf_device_map.values())) > 1:
        raise ModelLoadError("the model is spread over devices by device_map; a draft head needs it on one")
    if source is None and files.gguf_file is not None:
        raise ModelLoadError("transformers reads no layers for multi-token prediction from GGUF files")
    if source is not None and source.path is None:
        raise ModelLoadError(f"source = {source.text!r}: a draft head is a folder with config.json and safetensors")
    with mapped_errors(source or ModelSource(str(files.folder), files.folder)):
        if source is None or source.path is None:
            return open_mtp(files.folder, model)
        return open_eagle3(source.path, model, vocab_size)
