"""The server in llama-cpp-python: ``python -m bench.llama_cpp_server [--without-extra-buffers] OPTIONS``.

The same as ``python -m llama_cpp.server``, which has no option for the one thing that must be said here.
"""

from __future__ import annotations

import sys

import llama_cpp.llama_cpp as library
from llama_cpp.server.__main__ import main

__all__ = ["forbid_extra_buffers"]


def forbid_extra_buffers() -> None:
    """From now on models load without weights repacked for this CPU (see ``bench.raw_decoder``)."""
    defaults = library.llama_model_default_params

    def without_extra_buffers() -> library.llama_model_params:
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    library.llama_model_default_params = without_extra_buffers


if __name__ == "__main__":
    if "--without-extra-buffers" in sys.argv:
        sys.argv.remove("--without-extra-buffers")
        forbid_extra_buffers()
    main()
