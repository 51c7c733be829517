"""Embeddings of all-MiniLM-L6-v2 at three loads: both backends of ours, and the peers that serve the same weights.

Compared by texts, because infinity counts characters as tokens. The clients are those of ``enginehouse bench
embeddings``, and ask for base64. infinity cannot be installed beside the others, because it needs older versions of the
same packages: the environment variable ``INFINITY`` names its command in an environment of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from attrs import frozen
from rich.console import Console

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.pooler import Pooler, PoolerInput
from enginehouse_bench.driving import Served
from enginehouse_bench.embeddings import Load, measure
from enginehouse_bench.workload import Lengths, Workload
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_testkit.bert_model import read_bert, write_bert_gguf

from .peers import Peer, RunningPeer, running
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_embeddings"]

_NAME = "minilm"
_QUERIES, _CHUNKS = Lengths(16, 32), Lengths(16, 64)
_BULK = Load(4, 256)
_LOADS = {Load(1, 1): _QUERIES, Load(16, 1): _QUERIES, _BULK: _CHUNKS}
_QUICK_LOADS = {Load(1, 1): _QUERIES, Load(16, 1): _QUERIES, Load(4, 32): _CHUNKS}
_SECONDS = 15.0
_TEXTS_PER_S, _TOKENS_PER_S, _LATENCY = "texts/s", "tokens/s", "median latency, ms"
_ALONE = Load(1, 256)
_SECONDS_PER_REQUEST = "s per request"
_MAX_OVERHEAD = 1.1
"""Seconds of a request of 256 texts, relative to the model's alone."""

_FLOP_PER_TOKEN = 21.2e6
"""Two for each of the 10.6 million weights of the layers; attention not counted."""


@frozen
class _Enginehouse:
    """Ours, on a model file or folder."""

    name: str
    model: Path
    ready_path: str = f"/v1/models/{_NAME}"

    def command(self, port: int, folder: Path) -> list[str]:
        config = folder / f"{self.name}.toml"
        config.write_text(f'[models.{_NAME}]\nsource = "{self.model}"\n')
        return [sys.executable, "-m", "enginehouse", "serve", "--config", str(config), "--port", str(port)]


@frozen
class _LlamaServer:
    """llama.cpp's own server on the GGUF file, as an embedding server."""

    model_file: Path
    name: str = "llama-server"
    ready_path: str = "/health"

    def command(self, port: int, folder: Path) -> list[str]:
        return [sys.executable, "-m", "bench.llama_server", str(self.model_file), str(port), "--embedding"]


@frozen
class _SentenceTransformers:
    """The library in a few lines of Litestar."""

    folder: Path
    name: str = "sentence-transformers"
    ready_path: str = "/health"

    def command(self, port: int, folder: Path) -> list[str]:
        app = "bench.sentence_server:app"
        run = [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--no-access-log", "--log-level", "warning"]
        return ["env", f"MODEL={self.folder}", *run]


@frozen
class _Infinity:
    """infinity, with torch on the CPU."""

    executable: str
    folder: Path
    name: str = "infinity"
    ready_path: str = "/health"

    def command(self, port: int, folder: Path) -> list[str]:
        fixed = ["v2", "--engine", "torch", "--device", "cpu", "--url-prefix", "/v1", "--no-bettertransformer"]
        model = ["--model-id", str(self.folder), "--served-model-name", _NAME]
        return ["env", "DO_NOT_TRACK=1", self.executable, *fixed, *model, "--port", str(port)]


def measure_embeddings(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Texts and tokens per second of every peer; the cost of HTTP; and the use that is made of the machine."""
    folder = plan.model_file
    plan.folder.mkdir(parents=True, exist_ok=True)
    model_file = write_bert_gguf(plan.folder / "minilm.gguf", read_bert(folder), "mean").resolve()
    peers: list[Peer] = [
        _Enginehouse("enginehouse (llamacpp)", model_file),
        _Enginehouse("enginehouse (hf)", folder),
        _LlamaServer(model_file),
        _SentenceTransformers(folder),
    ]
    if infinity := os.environ.get("INFINITY"):
        peers.append(_Infinity(infinity, folder))
    record = Record()
    seconds, loads = (1.0, _QUICK_LOADS) if plan.quick else (min(plan.seconds, _SECONDS), _LOADS)
    for round_number, peer in plan.interleave(peers):
        with running(peer, plan.folder / "logs") as server:
            served = _await_model(server)
            for load, words in loads.items():
                _measure_load(record, peer.name, served, load, words, seconds=seconds)
            if peer is peers[0]:
                alone = measure(served, _ALONE, words=_CHUNKS, seconds=seconds, timeout_s=600)
        if peer is peers[0]:
            record.add(Key(str(_ALONE), peer.name, _SECONDS_PER_REQUEST), alone.wall_s / alone.num_requests)
            _measure_model(record, model_file, seconds)
        console.print(f"round {round_number + 1}/{plan.num_rounds}  {peer.name}")
    return record, _comparisons([peer.name for peer in peers], loads)


def _comparisons(names: Sequence[str], loads: Iterable[Load]) -> list[Comparison]:
    ours, other, llama_server, *torch_peers = names
    compared = []
    for load in loads:
        compared += [
            Comparison(Key(str(load), ours, _TEXTS_PER_S), Key(str(load), llama_server, _TEXTS_PER_S), target=1.0)
        ]
        for ours_again in (ours, other):
            compared += [
                Comparison(Key(str(load), ours_again, _TEXTS_PER_S), Key(str(load), peer, _TEXTS_PER_S), target=1.3)
                for peer in torch_peers
            ]
    alone = Key(str(_ALONE), ours, _SECONDS_PER_REQUEST), Key(str(_ALONE), "the model alone", _SECONDS_PER_REQUEST)
    return [*compared, Comparison(*alone, target=_MAX_OVERHEAD, target_is_upper=True)]


def _await_model(server: RunningPeer) -> Served:
    """Ask until the model answers: Enginehouse listens before it is loaded."""
    served = Served(f"{server.url}/v1", _NAME, None, {"encoding_format": "base64"})
    deadline_s = time.monotonic() + 120
    while (errors := measure(served, Load(1, 1), words=Lengths(16, 16), seconds=0, timeout_s=120).errors) and (
        time.monotonic() < deadline_s
    ):
        time.sleep(0.5)
    if errors:
        raise RuntimeError(f"{server.peer_name} does not serve embeddings: {errors}")
    return served


def _measure_load(record: Record, name: str, served: Served, load: Load, words: Lengths, *, seconds: float) -> None:
    measure(served, Load(load.num_clients, 4), words=words, seconds=0, timeout_s=600, seed=1)  # warm-up
    found = measure(served, load, words=words, seconds=seconds, timeout_s=600)
    if found.errors:
        raise RuntimeError(f"{name}, {load}: {found.errors}")
    record.add(Key(str(load), name, _TEXTS_PER_S), found.num_texts / found.wall_s)
    record.add(Key(str(load), name, _TOKENS_PER_S), found.num_tokens / found.wall_s)
    record.add(Key(str(load), name, _LATENCY), found.latency_ms.p50 or 0.0)


def _measure_model(record: Record, model_file: Path, seconds: float) -> None:
    """The texts of the first requests of 256, in passes as the worker forms them; and the machine's own rate."""
    backend, options = LlamaCppBackend(), LlamaCppOptions()
    pooler = backend.open(ModelSource(str(model_file), model_file), options, lambda _share, _what: None)
    assert isinstance(pooler, Pooler)
    workload = Workload(num_requests=10**12, prompt_words=_CHUNKS, output_tokens=Lengths(1, 1), seed=0)
    texts = (planned.prompt for planned in workload.requests())
    walls_s, num_tokens, end_s = list[float](), 0, time.monotonic() + seconds
    while not walls_s or time.monotonic() < end_s:
        encoded = [pooler.tokenizer.encode(next(texts), False) for _ in range(_ALONE.num_texts)]
        inputs = [pooler.capabilities.text.arrange(token_ids) for token_ids in encoded]
        num_tokens += sum(len(one.token_ids) for one in inputs)
        began_s = time.perf_counter()
        for chosen in _passes(pooler, inputs):
            pooler.pool(chosen)
        walls_s.append(time.perf_counter() - began_s)
    pooler.close()
    model = "the model alone"
    record.add(Key(str(_ALONE), model, _SECONDS_PER_REQUEST), sum(walls_s) / len(walls_s))
    record.add(Key(str(_ALONE), model, _TOKENS_PER_S), num_tokens / sum(walls_s))
    flops = _sgemm_flops()
    record.add(Key("float32 matrix product", "numpy", "GFLOP/s"), flops / 1e9)
    used = 100 * _FLOP_PER_TOKEN * num_tokens / sum(walls_s) / flops
    record.add(Key(str(_ALONE), model, "of numpy's GFLOP/s, %"), used)


def _passes(pooler: Pooler, inputs: Sequence[PoolerInput]) -> list[list[PoolerInput]]:
    """Longest first, as many as fit into a usual pass."""
    limits = pooler.capabilities
    passes: list[list[PoolerInput]] = [[]]
    room = most = limits.pass_tokens or limits.max_batch_tokens
    for one in sorted(inputs, key=lambda one: -len(one.token_ids)):
        if passes[-1] and (len(one.token_ids) > room or len(passes[-1]) == limits.max_batch_texts):
            passes.append([])
            room = most
        passes[-1].append(one)
        room -= len(one.token_ids)
    return passes


def _sgemm_flops(size: int = 1024, repeats: int = 8) -> float:
    """Floating-point operations per second of the best of several products of square matrices."""
    left, right = np.random.default_rng(1).standard_normal((2, size, size)).astype(np.float32)
    times_s = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        left @ right
        times_s.append(time.perf_counter() - began_s)
    return 2 * size**3 / min(times_s)
