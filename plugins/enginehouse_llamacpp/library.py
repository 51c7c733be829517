"""The only module that imports ``llama_cpp``: lazily, with OpenMP spinning limited and llama.cpp's log captured.

Other modules of this plugin receive the imported module as :data:`Bindings`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from attrs import frozen

from enginehouse.contract.errors import MissingDependency, ModelLoadError
from enginehouse_llamacpp.log import LogBuffer

__all__ = ["Bindings", "Library", "is_installed", "load_library"]

Bindings = Any
"""The module ``llama_cpp.llama_cpp``: one function per function of llama.h. That of mtmd.h is ``Library.mtmd``."""

_SPIN_COUNT = "1000"
"""Number of times an OpenMP thread polls a barrier before it sleeps.

A forward pass has hundreds of barriers. By default libgomp spins for milliseconds at each; when another process
occupies a core, all threads spin while the one they wait for has no core to run on, and a step takes a hundred times
longer. Measured on 2 cores, SmolLM2, 8 sequences, in tokens per second alone and beside one busy process:
default 185 and 5; 1000 spins 177 and 87; no spinning 123 and 90.
"""


@frozen
class Library:
    """llama.cpp, ready for use.

    Attributes:
        bindings: the imported module.
        log: recent log messages of llama.cpp.
        strlen: C's ``strlen`` as an abort callback: called with a pointer to a C string, it returns nonzero if the
            string is not empty, without Python and the GIL.
        log_callback: kept alive here because llama.cpp holds a bare pointer to it.
    """

    bindings: Bindings
    log: LogBuffer
    strlen: Any
    log_callback: Any

    @property
    def version(self) -> str:
        """Version of llama-cpp-python."""
        return str(import_module("llama_cpp").__version__)

    @property
    def ggml(self) -> Any:
        """The shared library of ggml's devices that llama.cpp itself uses, found through that.

        Wheels hold ggml's file under several names. That of ``llama_cpp._ggml`` is a copy with a registry of its own:
        llama.cpp sees no device that is added there.
        """
        return self.bindings._lib

    @property
    def mtmd(self) -> Bindings:
        """The module of ``mtmd``, llama.cpp's library for images, with its log captured.

        Raises:
            ModelLoadError: this build does not have it.
        """
        return _load_mtmd()

    @property
    def has_amx(self) -> bool:
        """True if this build has kernels for Intel AMX."""
        return b"AMX_INT8 = 1" in self.bindings.llama_print_system_info()

    @property
    def has_gpu(self) -> bool:
        """True if this build can offload layers to a GPU."""
        return bool(self.bindings.llama_supports_gpu_offload())


def is_installed() -> bool:
    """True if ``llama_cpp`` can be imported; checked without importing it."""
    return find_spec("llama_cpp") is not None


@cache
def load_library() -> Library:
    """Import llama.cpp, once per process.

    Raises:
        MissingDependency: llama-cpp-python is not installed.
    """
    if not is_installed():
        raise MissingDependency("llama-cpp-python", "llamacpp")
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    bindings: ModuleType = import_module("llama_cpp.llama_cpp")
    log = LogBuffer()
    callback = bindings.llama_log_callback(log.receive)
    bindings.llama_log_set(callback, ctypes.c_void_p(0))
    bindings.llama_backend_init()
    libc = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
    return Library(bindings, log, ctypes.cast(libc.strlen, bindings.ggml_abort_callback), callback)


@cache
def _load_mtmd() -> Bindings:
    try:
        mtmd = import_module("llama_cpp.mtmd_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        raise ModelLoadError(f"this build of llama-cpp-python cannot read images: {error}") from error
    for name in ("mtmd_log_set", "mtmd_helper_log_set"):
        getattr(mtmd, name)(load_library().log_callback, ctypes.c_void_p(0))
    return mtmd
