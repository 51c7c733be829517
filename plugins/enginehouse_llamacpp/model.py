"""Loads and frees a ``llama_model``: weights and vocabulary, without any sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginehouse.contract.errors import ModelLoadError, quoted
from enginehouse_backendkit.gguf_files import check_is_model
from enginehouse_backendkit.gguf_reader import check_gguf, repeated_text
from enginehouse_llamacpp.devices import device_params, list_devices
from enginehouse_llamacpp.gguf import is_gguf, shard_paths
from enginehouse_llamacpp.library import Library
from enginehouse_llamacpp.options import LlamaCppOptions

__all__ = ["ProgressWatch", "load_model", "uses_extra_buffers"]


def uses_extra_buffers(library: Library, options: LlamaCppOptions) -> bool:
    """True if weights may be repacked, see :class:`LlamaCppOptions`."""
    return options.extra_buffers if options.extra_buffers is not None else not library.has_amx


def load_model(library: Library, path: Path, options: LlamaCppOptions, progress: Callable[[float], None]) -> int:
    """Load the weights. Returns the address of the ``llama_model``.

    Raises:
        ModelLoadError: the file is missing, damaged or not supported, with llama.cpp's log messages; or this build
            lacks what a setting about devices needs.
    """
    if not path.is_file():
        raise ModelLoadError(f"{path}: no such file")
    if not is_gguf(path):
        raise ModelLoadError(f"{path}: not a GGUF file (its first bytes are not 'GGUF')")
    check_is_model(path)
    for part in shard_paths(path):
        check_gguf(part)
    if (text := repeated_text(path, "tokenizer.ggml.tokens")) is not None:  # for which llama.cpp ends the process
        raise ModelLoadError(f"{path}: two tokens have the text {quoted(text)}; llama.cpp needs different ones")
    bindings = library.bindings
    watch = ProgressWatch(progress)
    callback = bindings.llama_progress_callback(watch)
    params = bindings.llama_model_default_params()
    params.n_gpu_layers = options.n_gpu_layers
    params.load_mode = _load_mode(bindings, options)
    params.use_extra_bufts = uses_extra_buffers(library, options)
    params.progress_callback = callback
    kept = device_params(bindings, params, options, list_devices(library, options.rpc))
    library.log.clear()
    model = bindings.llama_model_load_from_file(str(path).encode(), params)
    del kept
    if watch.error is not None:
        if model:
            bindings.llama_model_free(model)
        raise watch.error
    if not model:
        raise ModelLoadError(f"{path}: llama.cpp cannot load it: {library.log.reason()}")
    return int(model)


class ProgressWatch:
    """llama.cpp's progress callback. An exception stops the loading and is raised after it, not inside C."""

    def __init__(self, progress: Callable[[float], None]) -> None:
        self._progress = progress
        self.error: BaseException | None = None

    def __call__(self, share: float, user_data: object) -> bool:
        """Report progress; return True to continue."""
        try:
            self._progress(share)
        except BaseException as error:  # noqa: BLE001 - ctypes would print it and go on
            self.error = error
        return self.error is None


def _load_mode(bindings: Any, options: LlamaCppOptions) -> int:
    modes = {
        (False, False): bindings.LLAMA_LOAD_MODE_NONE,
        (True, False): bindings.LLAMA_LOAD_MODE_MMAP,
        (False, True): bindings.LLAMA_LOAD_MODE_MLOCK,
        (True, True): bindings.LLAMA_LOAD_MODE_MMAP_MLOCK,
    }
    return int(modes[options.use_mmap, options.use_mlock])
