"""The plugin and its backend: cheap, honest, and of the right opinion about files."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import enginehouse_llamacpp
from enginehouse.contract.backend import Backend, ModelSource
from enginehouse.contract.errors import MissingDependency, ModelLoadError
from enginehouse.plugins import PluginRegistry, plain
from enginehouse.settings.config import PluginsSettings
from enginehouse_llamacpp import library
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.gguf import read_header, shard_paths
from enginehouse_llamacpp.log import LogBuffer
from enginehouse_llamacpp.metadata import recommended_parameters
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.runner import LlamaCppRunner

pytestmark = pytest.mark.llamacpp


def test_hook_register_backends() -> None:
    """One backend, also through core's loader."""
    backends: list[Backend] = []
    enginehouse_llamacpp.register_backends(backends.append)

    assert [backend.name for backend in backends] == ["llamacpp"]
    assert isinstance(plain(PluginRegistry.load(PluginsSettings()).backends["llamacpp"]), LlamaCppBackend)


def test_llama_cpp_is_not_imported_before_open(smollm_path: Path) -> None:
    """Listing plugins, probing, matching and estimating need no native library."""
    code = (
        "import sys; from pathlib import Path; import enginehouse_llamacpp\n"
        "from enginehouse_llamacpp.backend import LlamaCppBackend\n"
        "from enginehouse.contract.backend import ModelSource\n"
        "backend, source = LlamaCppBackend(), ModelSource('m', Path(sys.argv[1]))\n"
        "assert backend.probe().available and backend.match(source).score == 1.0\n"
        "assert backend.estimate(source, backend.options()).weights_bytes > 0\n"
        "sys.exit('llama_cpp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(smollm_path)], check=False, timeout=60)

    assert done.returncode == 0


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, smollm_path: Path) -> None:
    """Both when asked and when opened."""
    monkeypatch.setattr("enginehouse_llamacpp.library.is_installed", lambda: False)
    monkeypatch.setattr("enginehouse_llamacpp.backend.is_installed", lambda: False)
    backend = LlamaCppBackend()

    assert "pip install 'enginehouse[llamacpp]'" in backend.probe().reason
    with pytest.raises(MissingDependency, match="llama-cpp-python"):
        library.load_library.__wrapped__()


def test_match_goes_by_the_first_bytes(tmp_path: Path, smollm_path: Path) -> None:
    """Whatever the file is called."""
    renamed, other = tmp_path / "model.bin", tmp_path / "model.gguf"
    renamed.write_bytes(b"GGUF....")
    other.write_bytes(b"PK......")
    match = LlamaCppBackend().match

    assert match(ModelSource("m", smollm_path)).score == match(ModelSource("m", renamed)).score == 1.0
    assert match(ModelSource("m", other)).score == 0.0
    assert match(ModelSource("m", tmp_path)).score == match(ModelSource("org/name")).score == 0.0


def test_open_without_a_file_is_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match="org/name"):
        LlamaCppBackend().open(ModelSource("org/name"), LlamaCppOptions(), lambda _share, _what: None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"context": 1},
        {"threads": 0},
        {"n_gpu_layers": -2},
        {"n_batch": 1},
        {"max_sequences": 255},
        {"checkpoints": 0},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LlamaCppOptions(**wrong)  # type: ignore[arg-type]


def test_header_says_what_the_model_is(smollm_path: Path, gemma_path: Path) -> None:
    """Read without llama.cpp."""
    smollm, gemma = read_header(smollm_path), read_header(gemma_path)

    assert (smollm.architecture, smollm.number("block_count"), smollm.vocab_size) == ("llama", 30, 49_152)
    assert smollm.num_tensors == 272
    assert (gemma.architecture, gemma.number("attention.sliding_window"), gemma.vocab_size) == ("gemma3", 512, 262_144)


def test_shards_are_found_by_name(tmp_path: Path) -> None:
    names = [path.name for path in shard_paths(tmp_path / "m-00002-of-00003.gguf")]

    assert names == [f"m-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    assert shard_paths(tmp_path / "plain-of-mine.gguf") == [tmp_path / "plain-of-mine.gguf"]


_MEASURE = """
import sys
from pathlib import Path
from enginehouse.contract.backend import ModelSource
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.library import load_library
from enginehouse_llamacpp.options import LlamaCppOptions

load_library()
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
before = resident()
path = Path(sys.argv[1])
options = LlamaCppOptions(cache_tokens=2048, context=2048, threads=1)
runner = LlamaCppBackend().open(ModelSource("m", path), options, lambda share, what: None)
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("model", ["smollm_path", "gemma_path"])
def test_estimate_is_near_the_truth(request: pytest.FixtureRequest, model: str) -> None:
    """Measured in a process of its own. Room for 512 rows of logits counts, but is not resident before it is used."""
    path = request.getfixturevalue(model)
    options = LlamaCppOptions(cache_tokens=2048, context=2048, threads=1)
    estimate = LlamaCppBackend().estimate(ModelSource("m", path), options)
    done = subprocess.run([sys.executable, "-c", _MEASURE, str(path)], capture_output=True, check=True, timeout=100)

    assert 0.4 < int(done.stdout) / estimate.total_bytes < 1.2
    assert estimate.weights_bytes == path.stat().st_size


def test_kv_bytes_follow_the_types(smollm_path: Path) -> None:
    """30 layers, 3 KV heads of 64: 23 kB a token in 16 bits."""
    source, estimate = ModelSource("m", smollm_path), LlamaCppBackend().estimate
    options = LlamaCppOptions()

    assert estimate(source, options).kv_bytes_per_token == 30 * 2 * 3 * 64 * 2
    smaller = attrs.evolve(options, type_k="q8_0", type_v="q8_0")
    assert estimate(source, smaller).kv_bytes_per_token == 30 * 2 * (3 * 64 // 32) * 34


def test_log_keeps_warnings_and_errors() -> None:
    """Continuation lines belong to what they continue."""
    log = LogBuffer(max_lines=3)
    for level, text in (
        (2, b"loading\n"),
        (5, b"...\n"),
        (4, b"no \xff memory\n"),
        (5, b"really\n"),
        (3, b"warning\n"),
    ):
        log.receive(level, text, None)

    assert log.reason() == "no \ufffd memory; really; warning"
    log.clear()
    assert log.reason() == "llama.cpp gave no reason"


def test_quantised_kv_works(smollm_path: Path, request: pytest.FixtureRequest) -> None:
    """Equal quantised types are computed position by position too, so the claim holds for them."""
    runner = request.getfixturevalue("open_runner")(
        smollm_path, context=256, cache_tokens=256, threads=1, type_k="q8_0", type_v="q8_0", flash_attn=True
    )
    assert isinstance(runner, LlamaCppRunner)
    invariant = runner.capabilities.batch_invariant
    runner.close()

    assert invariant


# -- keys of the file: recommended parameters, infill tokens -------------------------------------------


def _entry(key: str, kind: int, value: bytes) -> bytes:
    """One entry of a GGUF header."""
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def _with_keys(source: Path, target: Path, *entries: bytes) -> Path:
    """A copy whose chat template gives way to other keys; a filler keeps every offset."""
    data, key = source.read_bytes(), b"tokenizer.chat_template"
    begin = data.index(struct.pack("<Q", len(key)) + key)
    length = int.from_bytes(data[begin + 8 + len(key) + 4 :][:8], "little")
    end = begin + 8 + len(key) + 4 + 8 + length
    size = end - begin - len(b"".join(entries)) - len(_entry("filler", 8, b"")) - 8
    entries = (*entries, _entry("filler", 8, struct.pack("<Q", size) + b" " * size))
    count = int.from_bytes(data[16:24], "little") + len(entries) - 1
    head = data[:16] + struct.pack("<Q", count) + data[24:begin]
    target.write_bytes(head + b"".join(entries) + data[end:])
    return target


def test_sampling_keys_of_the_file_are_recommended(smollm_path: Path, tmp_path: Path) -> None:
    path = _with_keys(
        smollm_path,
        tmp_path / "recommending.gguf",
        _entry("general.sampling.temp", 6, struct.pack("<f", 0.6)),
        _entry("general.sampling.top_k", 5, struct.pack("<i", 20)),
        _entry("general.sampling.penalty_repeat", 6, struct.pack("<f", 1.05)),
        _entry("general.sampling.sequence", 8, struct.pack("<Q", 2) + b"kp"),
    )
    runner = LlamaCppBackend().open(ModelSource("m", path), LlamaCppOptions(context=256), lambda _share, _what: None)
    try:
        assert runner.info.generation_defaults == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
        assert runner.info.metadata["library"].startswith("llama-cpp-python ")
    finally:
        runner.close()


def test_infill_tokens_are_those_that_the_file_names(smollm_path: Path, tmp_path: Path) -> None:
    keys = [("fim_pre", 3), ("fim_suf", 4), ("fim_mid", 5)]
    entries = [_entry(f"tokenizer.ggml.{name}_token_id", 4, struct.pack("<I", token_id)) for name, token_id in keys]
    infill_tokens = []
    for path in (smollm_path, _with_keys(smollm_path, tmp_path / "filling.gguf", *entries)):
        options = LlamaCppOptions(context=256)
        runner = LlamaCppBackend().open(ModelSource("m", path), options, lambda _share, _what: None)
        names = {token_id: name for name, token_id in runner.info.special_tokens.items()}
        infill_tokens.append(runner.info.infill_tokens)
        runner.close()

    assert infill_tokens == [(), tuple(names[token_id] for _, token_id in keys)]


def test_sampling_keys_that_are_no_numbers_are_left_out() -> None:
    values = {"general.sampling.temp": "warm", "general.sampling.min_p": "0.05", "general.name": "x"}

    assert recommended_parameters(values) == {"min_p": 0.05}
