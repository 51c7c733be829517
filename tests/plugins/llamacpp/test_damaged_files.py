"""GGUF files made to break their readers: a clear error, in the server and in the worker; other models are served."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import httpx
import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import EnginehouseError, ModelLoadError
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_backendkit.gguf_reader import check_gguf
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.gguf import read_header, shard_paths
from enginehouse_llamacpp.layer_files import find_or_write
from enginehouse_llamacpp.library import load_library
from enginehouse_llamacpp.model import load_model
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_testkit.script import write_script
from enginehouse_testkit.server_thread import server_thread

UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(num_tensors: int, num_values: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + rest


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


LLAMA = entry(b"general.architecture", STRING, text(b"llama"))
HUGE = 2**63 - 1

DAMAGED = {
    "empty": b"",
    "magic_only": b"GGUF",
    "cut_counts": b"GGUF\x03\x00\x00\x00\x01",
    "unknown_version": gguf(0, 0, version=99),
    "huge_number_of_values": gguf(0, HUGE, LLAMA),
    "huge_key": gguf(0, 1, struct.pack("<Q", HUGE) + b"abc"),
    "huge_text": gguf(0, 1, text(b"a") + struct.pack("<IQ", STRING, 2**60) + b"abc"),
    "huge_array_of_numbers": gguf(0, 1, text(b"a") + struct.pack("<IIQ", ARRAY, UINT64, 2**62)),
    "huge_array_of_texts": gguf(0, 1, text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, 2**62)),
    "array_of_arrays": gguf(0, 1, text(b"a") + struct.pack("<IIQ", ARRAY, ARRAY, 1)),
    "unknown_type": gguf(0, 1, entry(b"a", 77, b"\0" * 8)),
    "many_values": gguf(0, 2**20, LLAMA),
    "many_texts": gguf(0, 1, text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, 2**30)),
    "many_long_names": gguf(0, 200, b"".join(entry(b"a" * 65000, UINT32, b"\1\0\0\0") for _ in range(200))),
    "many_short_arrays": gguf(
        0,
        400,
        b"".join(entry(b"%d" % n, ARRAY, struct.pack("<IQ", UINT32, 4096) + bytes(4 * 4096)) for n in range(400)),
    ),
    "no_text": gguf(0, 1, entry(b"\xff\xfe", STRING, text(b"\xff"))),
}
WRONG_SIZES = {
    f"{key.decode()}_{name}": gguf(0, 2, LLAMA + entry(b"llama." + key, kind, value))
    for key in (b"block_count", b"embedding_length", b"attention.head_count_kv", b"context_length")
    for name, (kind, value) in {
        "text": (STRING, text(b"a" * 1000)),
        "true": (7, b"\1"),
        "negative": (11, struct.pack("<q", -5)),
        "float": (6, struct.pack("<f", 2.0)),
        "infinite": (12, struct.pack("<d", float("inf"))),
        "not_a_number": (12, struct.pack("<d", float("nan"))),
        "huge": (UINT64, struct.pack("<Q", 2**63)),
    }.items()
}
INCOMPLETE = {
    "huge_number_of_tensors": gguf(HUGE, 1, LLAMA),
    "no_tensors": gguf(0, 1, LLAMA),
    "no_architecture": gguf(0, 1, entry(b"a", UINT32, b"\1\0\0\0")),
    "huge_sizes": gguf(
        0,
        4,
        LLAMA
        + entry(b"llama.block_count", UINT32, struct.pack("<I", 2**32 - 1))
        + entry(b"llama.embedding_length", UINT32, struct.pack("<I", 2**32 - 1))
        + entry(b"llama.attention.head_count", UINT32, struct.pack("<I", 0)),
    ),
    "tensor_outside": gguf(1, 1, LLAMA + text(b"t") + struct.pack("<IQIQ", 1, 2**40, 0, 2**50)),
    "tensor_of_nothing": gguf(1, 1, LLAMA + text(b"t") + struct.pack("<IQQIQ", 2, 0, HUGE, 0, 0)),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_headers_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    began = time.monotonic()
    if data == DAMAGED["no_text"]:  # unreadable, but harmless
        read_header(path)
    else:
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            read_header(path)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("data", [*DAMAGED.values(), *INCOMPLETE.values()], ids=[*DAMAGED, *INCOMPLETE])
def test_matching_and_estimating_end_with_a_number_or_an_error(tmp_path: Path, data: bytes) -> None:
    """Both run in the server itself."""
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    source, backend = ModelSource(str(path), path), LlamaCppBackend()

    assert 0.0 <= backend.match(source).score <= 1.0
    try:
        assert backend.estimate(source, LlamaCppOptions()).total_bytes >= 0
    except EnginehouseError as error:
        assert "model.gguf" in error.message
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        backend.count_layers(source)


def test_names_of_shards_do_not_count_to_billions(tmp_path: Path) -> None:
    path = tmp_path / "m-000000001-of-999999999.gguf"

    assert shard_paths(path) == [path]


def test_a_server_tells_and_serves_the_other_models(tmp_path: Path, smollm_path: Path) -> None:
    whole = smollm_path.read_bytes()
    files = {**DAMAGED, **INCOMPLETE, "cut_in_half": whole[: len(whole) // 2], "cut_header": whole[:100_000]}
    chosen = ("empty", "huge_number_of_values", "huge_number_of_tensors", "huge_sizes", "tensor_outside", "cut_in_half")
    models = {"good": ModelSettings(source=write_script(tmp_path / "good.json", ["Hi"]), backend="scripted")}
    for name in (*chosen, "cut_header"):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(files[name])
        models[name] = ModelSettings(source=str(path), backend="llamacpp")
    settings = Settings(models=models, plugins=PluginsSettings(allow=("llamacpp",)))
    with server_thread(settings) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        deadline = time.monotonic() + 100
        while True:
            cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
            if all(card["state"] in ("ready", "failed") for card in cards.values()):
                break
            assert time.monotonic() < deadline, cards
            time.sleep(0.1)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/chat/completions", json={**body, "model": "good"}).status_code == 200
        for name in models.keys() - {"good"}:
            assert cards[name]["state"] == "failed" and cards[name]["error"], name
            answer = client.post("/v1/chat/completions", json={**body, "model": name})
            assert answer.status_code == 503 and answer.json()["error"]["message"]


def sparse(path: Path, head: bytes, tail: int) -> Path:
    """A file of so many zeros behind its head, which takes no room on the disk."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + tail)
    return path


def check_bounded(path: Path, *, is_long: bool = False) -> None:
    """Whatever is asked of a file: within bounds of time and memory, an error that names it.

    Counting memory makes reading many times slower, so of a file that takes long only the time is bounded.
    """
    for backend, options in ((LlamaCppBackend(), LlamaCppOptions()), (HfBackend(), HfOptions())):
        began = time.process_time()
        if not is_long:
            tracemalloc.start()
        try:
            with pytest.raises(ModelLoadError, match=r"model\.gguf"):
                backend.estimate(ModelSource(str(path), path), options)
            assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
        finally:
            tracemalloc.stop()
        assert time.process_time() - began < 20


def test_empty_texts_by_the_million_are_not_read(tmp_path: Path) -> None:
    head = gguf(0, 1, text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, 2**30))
    check_bounded(sparse(tmp_path / "model.gguf", head, 8 * 2**30))


def test_empty_texts_in_many_arrays_are_counted_together(tmp_path: Path) -> None:
    path, count = tmp_path / "model.gguf", 2**20
    with path.open("wb") as file:
        file.write(gguf(0, 100))
        for number in range(100):
            file.write(text(b"%d" % number) + struct.pack("<IIQ", ARRAY, STRING, count))
            file.seek(8 * count, 1)
        file.truncate(file.tell())
    check_bounded(path, is_long=True)


def test_long_texts_are_bounded_together(tmp_path: Path) -> None:
    """Each alone would be kept, a chat template say."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(gguf(0, 32))
        for number in range(32):
            file.write(text(b"%d" % number) + struct.pack("<IQ", STRING, 2**22))
            file.seek(2**22, 1)
        file.truncate(file.tell())
    check_bounded(path)


def long_texts(path: Path, count: int) -> Path:
    """A file with so many texts of 64 MiB."""
    with path.open("wb") as file:
        file.write(gguf(0, count + 1))
        for number in range(count):
            file.write(text(b"%d" % number) + struct.pack("<IQ", STRING, 64 * 2**20))
            file.seek(64 * 2**20, 1)
        file.write(LLAMA)
    return path


def test_texts_that_libraries_would_keep_are_bounded_together(tmp_path: Path) -> None:
    path = long_texts(tmp_path / "model.gguf", 32)
    with pytest.raises(ModelLoadError, match=r"its values have more than \d+ bytes"):
        check_gguf(path)
    check_bounded(path)


def test_texts_of_megabytes_are_skipped(tmp_path: Path) -> None:
    path = long_texts(tmp_path / "model.gguf", 3)

    tracemalloc.start()
    try:
        header = read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert dict(header.values) == {"general.architecture": "llama"}


def test_tensors_with_names_without_measure_are_refused(tmp_path: Path) -> None:
    tensors = b"".join(text(b"t" * 60_000) + struct.pack("<IQIQ", 1, 1, 0, 0) for _ in range(200))
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(200, 1, LLAMA + tensors))

    with pytest.raises(ModelLoadError, match="more than"):
        check_gguf(path)


@pytest.mark.parametrize("data", WRONG_SIZES.values(), ids=WRONG_SIZES)
def test_sizes_of_another_kind_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    check_bounded(path)


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    os.mkfifo(path)
    source, backend = ModelSource(str(path), path), LlamaCppBackend()

    assert backend.match(source).score == 0.0
    for work in (backend.estimate, lambda *given: backend.open(*given, lambda share, what: None)):
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            work(source, LlamaCppOptions())


def test_a_part_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(gguf(0, 1, LLAMA))
    os.mkfifo(tmp_path / "m-00002-of-00002.gguf")

    for work in (read_header, lambda one: load_model(load_library(), one, LlamaCppOptions(), print)):
        with pytest.raises(ModelLoadError, match="not a regular file"):
            work(path)


def test_a_pipe_where_the_first_layers_are_kept_is_passed_over(tmp_path: Path, smollm_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(smollm_path)
    os.mkfifo(tmp_path / "m.gguf.first-2-layers")

    place = find_or_write(model, 2, lambda share, what: None, {"XDG_CACHE_HOME": str(tmp_path / "cache")})

    assert place.is_file() and place.stat().st_size > 0
