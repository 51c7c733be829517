"""A model on an RPC server of llama.cpp on this machine.

Wheels have neither the server nor the client: both are in one library, which is compiled from llama-cpp-python's source
archive in seconds and registered with the ggml that is installed. A build with ``-DGGML_RPC=on`` does the same.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from enginehouse_llamacpp.library import load_library
from enginehouse_testkit.waiting import wait_until

pytestmark = [pytest.mark.llamacpp, pytest.mark.slow]

_SERVER = """
import ctypes, socket, sys
from enginehouse_llamacpp.library import load_library

ggml, rpc = load_library().ggml, ctypes.CDLL(sys.argv[1])
ggml.ggml_backend_dev_by_name.restype = ctypes.c_void_p
devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_name(b"CPU"))
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % probe.getsockname()[1]
print(address, flush=True)
rpc.ggml_backend_rpc_start_server(address.encode(), None, ctypes.c_size_t(1), ctypes.c_size_t(1), devices)
"""

_CLIENT = """
import ctypes, json, sys
from pathlib import Path
import numpy as np
from enginehouse.contract.backend import ModelSource, Span
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.library import load_library
from enginehouse_llamacpp.options import LlamaCppOptions

rpc = ctypes.CDLL(sys.argv[1])
rpc.ggml_backend_rpc_reg.restype = ctypes.c_void_p
load_library().ggml.ggml_backend_register(ctypes.c_void_p(rpc.ggml_backend_rpc_reg()))

def generate(**options):
    source = ModelSource(sys.argv[2], Path(sys.argv[2]))
    chosen = LlamaCppOptions(context=256, cache_tokens=512, slots=1, threads=1, **options)
    runner = LlamaCppBackend().open(source, chosen, lambda share, text: None)
    sequence, token_ids, written, position = runner.open_sequence(), np.arange(1, 20, dtype=np.int32), [], 0
    for _ in range(12):
        rows = runner.forward([Span(sequence, position, token_ids)]).host()
        position += len(token_ids)
        written.append(int(np.argmax(rows[-1])))
        token_ids = np.array(written[-1:], np.int32)
    print(json.dumps(written), flush=True)
    sys.stdin.readline()
    runner.close()

generate()
generate(rpc=(sys.argv[3],))
"""


@pytest.fixture(scope="module")
def rpc_library(llama_cpp_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the client and the server, for the installed ggml."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs g++")
    if f"-{load_library().version}." not in llama_cpp_archive.name:
        pytest.skip(f"{llama_cpp_archive.name} is not the version that is installed")
    folder = tmp_path_factory.mktemp("rpc")
    with tarfile.open(llama_cpp_archive) as archive:
        archive.extractall(folder, [one for one in archive if "/llama.cpp/ggml/" in one.name], filter="data")
    source = next(folder.glob("*/vendor/llama.cpp/ggml/src"))
    ggml = Path(load_library().bindings.__file__).parent / "lib"
    built = folder / "libggml-rpc.so"
    defined = [f"-DGGML_{name}" for name in ("BACKEND_DL", "BACKEND_SHARED", "BACKEND_BUILD", "SHARED")]
    files = [str(source / "ggml-rpc" / name) for name in ("ggml-rpc.cpp", "transport.cpp")]
    folders = [f"-I{source}/../include", f"-I{source}", f"-L{ggml}", f"-Wl,-rpath,{ggml}"]
    options = ["-std=c++17", "-fPIC", "-shared", *defined, *folders]
    subprocess.run([compiler, *options, *files, "-lggml-base", "-lggml", "-o", built], check=True)
    return built


@pytest.fixture
def rpc_server(rpc_library: Path) -> Iterator[tuple[psutil.Popen, str]]:
    """The process of a server, and its address."""
    with psutil.Popen([sys.executable, "-c", _SERVER, rpc_library], stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


def test_model_on_an_rpc_server_says_the_same(
    rpc_library: Path, rpc_server: tuple[psutil.Popen, str], smollm_path: Path
) -> None:
    server, address = rpc_server
    wait_until(lambda: any(one.status == "LISTEN" for one in server.net_connections()))
    command = [sys.executable, "-c", _CLIENT, str(rpc_library), str(smollm_path), address]
    before_bytes = server.memory_info().rss
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None and client.stdout is not None
        here = json.loads(client.stdout.readline())
        client.stdin.write("\n")
        client.stdin.flush()
        there = json.loads(client.stdout.readline())
        held_bytes = server.memory_info().rss - before_bytes
        client.stdin.write("\n")

    assert there == here
    assert held_bytes > smollm_path.stat().st_size / 2, "the server holds no weights"
