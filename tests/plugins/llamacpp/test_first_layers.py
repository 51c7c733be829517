"""A model's first layers as a file of its own: exactly the right bytes, in the right place, and llama.cpp agrees."""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.drafter import LayerBackend
from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit.gguf_reader import GgufReader
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.first_layers import count_layers, cut_layers
from enginehouse_llamacpp.layer_files import find_or_write
from enginehouse_llamacpp.library import load_library
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.runner import LlamaCppRunner

from .gguf import VALUES, toy_tensors, write_gguf

pytestmark = pytest.mark.llamacpp

TEXT = "The lighthouse keeper climbed the stairs every evening and"

Contents = tuple[dict[str, Any], dict[str, bytes]]
"""Keys with their values, and tensors with their data."""


# -- files to cut ------------------------------------------------------------------------------------


def contents(path: Path) -> Contents:
    """What a file holds. Data reaches to where the next one's begins, zeros included."""
    whole = path.read_bytes()
    with path.open("rb") as file:
        reader = GgufReader(file)
        entries = {entry.key: (entry.value, whole[entry.begin : entry.end]) for entry in reader.entries()}
        places = list(reader.tensors())
        begin = reader.position + -reader.position % 32
    ends = [place.offset for place in places[1:]] + [len(whole) - begin]
    data = {
        place.name: place.description + whole[begin + place.offset : begin + end]
        for place, end in zip(places, ends, strict=True)
    }
    return entries, data


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "toy.gguf", VALUES, toy_tensors())


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Where the user's cache lies."""
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def silent(_: float, __: str) -> None:
    """Progress that nobody watches."""


# -- what the file consists of -----------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_values_of_each_layer_are_cut_and_others_stay(
    toy: Path, tmp_path: Path, num_layers: int, env: dict[str, str]
) -> None:
    file = find_or_write(toy, num_layers, silent, env)
    cut = {
        key: item[:num_layers] if isinstance(item, list) and key.startswith(("toy.attention.", "toy.xielu.")) else item
        for key, item in VALUES.items()
    }
    kept = {
        name: data for name, data in toy_tensors().items() if not name.startswith("blk.") or int(name[4]) < num_layers
    }
    expected = write_gguf(tmp_path / "expected.gguf", {**cut, "toy.block_count": num_layers}, kept)

    assert file.read_bytes() == expected.read_bytes()


def test_parts_of_a_model_become_one_file(tmp_path: Path, env: dict[str, str]) -> None:
    tensors = list(toy_tensors().items())
    shards = {"split.no": 0, "split.count": 2, "split.tensors.count": len(tensors)}
    first = write_gguf(tmp_path / "toy-00001-of-00002.gguf", {**VALUES, **shards}, dict(tensors[:5]))
    write_gguf(tmp_path / "toy-00002-of-00002.gguf", {**shards, "split.no": 1}, dict(tensors[5:]))
    whole = write_gguf(tmp_path / "toy.gguf", VALUES, dict(tensors))

    assert count_layers(first) == 4
    assert find_or_write(first, 3, silent, env).read_bytes() == find_or_write(whole, 3, silent, env).read_bytes()


@pytest.mark.parametrize("num_layers", [1, 17, 29])
def test_a_real_model_keeps_exactly_the_tensors_before_a_layer(
    smollm_path: Path, tmp_path: Path, num_layers: int, env: dict[str, str]
) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(smollm_path)
    entries, tensors = contents(find_or_write(model, num_layers, silent, env))
    all_entries, all_tensors = contents(smollm_path)
    before = {
        n: data for n, data in all_tensors.items() if not n.startswith("blk.") or int(n.split(".")[1]) < num_layers
    }

    assert tensors == before
    assert len(tensors) == 2 + 9 * num_layers
    assert entries.pop("llama.block_count")[0] == num_layers
    assert all_entries.pop("llama.block_count")[0] == 30
    assert entries == all_entries


@pytest.mark.parametrize("num_layers", [0, -1, 4, 99])
def test_numbers_out_of_range_are_refused(toy: Path, num_layers: int) -> None:
    with pytest.raises(ModelLoadError, match=rf"num_layers: toy\.gguf has 4 layers, .* 1 to 3 .* not {num_layers}"):
        cut_layers(toy, num_layers)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general.architecture": "t5", "t5.block_count": 4}, "an encoder and a decoder"),
        ({"general.architecture": "baichuan", "baichuan.block_count": 4}, "positions from the number of its layers"),
        ({"toy.nextn_predict_layers": 1}, "predict further tokens"),
        ({"toy.attention.shared_kv_layers": 2}, "keys and values of others"),
        ({"toy.embedding_length_per_layer_input": 8}, "a part for each layer"),
        ({"toy.block_count": 5}, "names 5 layers, but holds tensors of 4"),
        ({"toy.block_count": 2**32 - 1}, "names 4294967295 layers"),
        ({"general.architecture": "other"}, "does not say how many layers"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", {**VALUES, **change}, toy_tensors())

    with pytest.raises(ModelLoadError, match=rf"model\.gguf.*{reason}"):
        count_layers(path)


# -- where it is kept --------------------------------------------------------------------------------


def test_the_file_is_written_once_beside_the_model_for_its_owner_only(toy: Path, env: dict[str, str]) -> None:
    seen: list[str] = []
    file = find_or_write(toy, 2, lambda _, what: seen.append(what), env)
    first = file.stat()
    again = find_or_write(toy, 2, silent, env)

    assert file == again == toy.with_name("toy.gguf.first-2-layers")
    assert file.suffix != ".gguf"
    assert stat.S_IMODE(first.st_mode) == 0o600
    assert (again.stat().st_ino, again.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert any(what.startswith("writing the first 2 layers (") for what in seen)
    assert sorted(path.name for path in toy.parent.iterdir()) == [toy.name, file.name]


def damage_a_byte(file: Path, model: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def cut_it_short(file: Path, model: Path) -> None:
    file.write_bytes(file.read_bytes()[:-32])


def change_the_model(file: Path, model: Path) -> None:
    """Same size, same time."""
    times = model.stat()
    write_gguf(model, VALUES, {name: data + 1 for name, data in toy_tensors().items()})
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("damage", [damage_a_byte, cut_it_short, change_the_model])
def test_a_file_that_is_not_what_it_should_be_is_written_anew(
    toy: Path, env: dict[str, str], damage: Callable[[Path, Path], None]
) -> None:
    file = find_or_write(toy, 2, silent, env)
    old = file.stat().st_ino
    damage(file, toy)
    again = find_or_write(toy, 2, silent, env)

    assert again == file and again.stat().st_ino != old
    assert again.read_bytes() == b"".join(cut_layers(toy, 2).chunks())


def test_the_users_cache_is_taken_where_the_models_folder_cannot_be(toy: Path, env: dict[str, str]) -> None:
    (toy.parent / "toy.gguf.first-2-layers").mkdir()  # nothing can be written there, for root neither
    file = find_or_write(toy, 2, silent, env)

    assert file.is_relative_to(Path(env["XDG_CACHE_HOME"]) / "enginehouse" / "layers")
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert find_or_write(toy, 2, silent, env) == file
    assert sorted(path.name for path in toy.parent.iterdir()) == ["cache", toy.name, "toy.gguf.first-2-layers"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system lets no file grow beyond a few bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_anywhere_is_told_and_leaves_nothing(toy: Path, env: dict[str, str], request: Any) -> None:
    request.getfixturevalue("small_files")
    with pytest.raises(
        ModelLoadError, match=r"first 2 layers of toy\.gguf \(.*B\) cannot be written anywhere: .*large"
    ):
        find_or_write(toy, 2, silent, env)

    assert not [path for path in toy.parent.rglob("*") if path.is_file() and path != toy]


def test_what_killed_writers_left_is_removed(toy: Path, env: dict[str, str]) -> None:
    old, new, other = (
        toy.parent / f"{name}.unfinished" for name in ("toy.gguf.first-2-layers.a", "toy.gguf.first-2-layers.b", "c")
    )
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    find_or_write(toy, 2, silent, env)

    assert [path.exists() for path in (old, new, other)] == [False, True, True]


def test_an_exception_of_progress_leaves_nothing(toy: Path, env: dict[str, str]) -> None:
    def stop(_: float, what: str) -> None:
        if what.startswith("writing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_or_write(toy, 2, stop, env)

    assert list(toy.parent.iterdir()) == [toy]


# -- what llama.cpp makes of it ----------------------------------------------------------------------


def cut_by_llama_cpp(path: Path, target: Path, num_layers: int, all_layers: int) -> None:
    """llama.cpp's own way to leave out layers."""
    bindings = load_library().bindings
    params = bindings.llama_model_quantize_default_params()
    params.only_copy = True
    pruned = (ctypes.c_int32 * (all_layers - num_layers + 1))(*range(num_layers, all_layers), -1)
    params.prune_layers = ctypes.cast(pruned, type(params.prune_layers))
    assert bindings.llama_model_quantize(str(path).encode(), str(target).encode(), ctypes.byref(params)) == 0


def logits_of(runner: LlamaCppRunner) -> NDArray[np.float32]:
    sequence = runner.open_sequence()
    token_ids = np.array(runner.tokenizer.encode(TEXT, special=False), np.int32)
    rows = runner.forward([Span(sequence, 0, token_ids, "all")]).host().copy()
    runner.free_sequence(sequence)
    return rows


def check_against_llama_cpp(
    model: Path, tmp_path: Path, num_layers: int, all_layers: int, open_runner: Callable[..., LlamaCppRunner]
) -> None:
    options = {"cache_tokens": 512, "context": 256, "threads": 1, "slots": 2}
    first = open_runner(model, num_layers=num_layers, **options)
    try:
        ours = logits_of(first)
    finally:
        first.close()
    reference = tmp_path / "pruned.gguf"
    cut_by_llama_cpp(model, reference, num_layers, all_layers)
    second = open_runner(reference, **options)
    try:
        theirs = logits_of(second)
    finally:
        second.close()

    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("num_layers", [12, 29])
def test_it_computes_what_llama_cpps_own_pruning_gives(
    smollm_path: Path, tmp_path: Path, num_layers: int, open_runner: Callable[..., LlamaCppRunner]
) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(smollm_path)

    check_against_llama_cpp(model, tmp_path, num_layers, 30, open_runner)
    assert (tmp_path / f"model.gguf.first-{num_layers}-layers").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sliding_windows_stay_where_they_are(
    gemma_path: Path, tmp_path: Path, open_runner: Callable[..., LlamaCppRunner]
) -> None:
    """Gemma 3: five layers with a window, one without, and so on; told by their place from the first one on."""
    model = tmp_path / "model.gguf"
    model.symlink_to(gemma_path)

    check_against_llama_cpp(model, tmp_path, 13, 18, open_runner)


def test_the_backend_counts_and_estimates(smollm_path: Path) -> None:
    backend, source = LlamaCppBackend(), ModelSource("model", smollm_path)
    assert isinstance(backend, LayerBackend)
    whole = backend.estimate(source, LlamaCppOptions())
    part = backend.estimate(source, LlamaCppOptions(num_layers=10))

    assert backend.count_layers(source) == 30
    assert part.weights_bytes == cut_layers(smollm_path, 10).num_bytes < whole.weights_bytes
    assert 3 * part.kv_bytes_per_token == whole.kv_bytes_per_token
    with pytest.raises(ModelLoadError, match=r"num_layers: .* not 30"):
        backend.estimate(source, LlamaCppOptions(num_layers=30))
