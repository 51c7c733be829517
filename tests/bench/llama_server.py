"""llama.cpp's own HTTP server, from the prebuilt wheel ``xllamacpp``: ``python -m bench.llama_server GGUF PORT``.

With ``--embedding`` at the end, it serves an embedding model. Runs until terminated. Eight slots over one unified KV
cache and as many threads as there are cores: what its documentation advises for several clients.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import xllamacpp

from .machine import usable_cores

__all__ = ["serve"]


def serve(model_file: Path, port: int, context: int = 8192, slots: int = 8, embedding: bool = False) -> None:
    """Serve until the process is terminated; an embedding model with its usual batch of 512 tokens."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model_file)
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = port
    parameters.n_parallel = slots
    parameters.n_ctx = context
    parameters.kv_unified = True
    parameters.fit_params = False  # keep the context that was asked for
    parameters.verbosity = 1
    if embedding:
        parameters.embedding = True
        parameters.n_batch = parameters.n_ubatch = 512
    num_cores = len(usable_cores())
    parameters.cpuparams.n_threads = num_cores
    parameters.cpuparams_batch.n_threads = num_cores
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), embedding="--embedding" in sys.argv)
