"""Damaged files of models: what is asked of them in the server itself is a number or an error that is ours."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from random import Random
from typing import Any

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import EnginehouseError
from enginehouse_backendkit.gguf_reader import check_gguf
from enginehouse_backendkit.model_folder import ModelFolder, recommended_parameters, served_context
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_hub.cache import is_complete
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.layer_files import find_or_write
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_mlx.backend import MlxBackend, MlxOptions

from .damage import Amount, amounts, damage_bytes, damaged_document, run_damaged

_LAYOUTS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_NUM_LAYERS = 3


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _entry(key: bytes, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _list(kind: int, values: list[Any]) -> bytes:
    packed = (_text(value) if kind == _STRING else struct.pack(_LAYOUTS[kind], value) for value in values)
    return struct.pack("<IQ", kind, len(values)) + b"".join(packed)


def _entries() -> list[bytes]:
    return [
        _entry(b"general.architecture", _STRING, _text(b"llama")),
        _entry(b"general.alignment", 4, struct.pack("<I", 32)),
        _entry(b"llama.block_count", 4, struct.pack("<I", _NUM_LAYERS)),
        _entry(b"llama.context_length", 4, struct.pack("<I", 512)),
        _entry(b"llama.embedding_length", 4, struct.pack("<I", 32)),
        _entry(b"llama.attention.head_count", 4, struct.pack("<I", 4)),
        _entry(b"llama.attention.head_count_kv", _ARRAY, _list(4, [2] * _NUM_LAYERS)),
        _entry(b"llama.feed_forward_length", _ARRAY, _list(5, [64] * _NUM_LAYERS)),
        _entry(b"llama.rope.freq_base", 6, struct.pack("<f", 1e4)),
        _entry(b"tokenizer.ggml.tokens", _ARRAY, _list(_STRING, [b"<s>", b"a" * 300, b"b"])),
        _entry(b"tokenizer.ggml.scores", _ARRAY, _list(6, [0.0, 1.0, 2.0])),
        _entry(b"tokenizer.chat_template", _STRING, _text(b"{{ messages }}")),
    ]


def _tensors() -> list[bytes]:
    names = [b"token_embd.weight", *(b"blk.%d.attn_q.weight" % layer for layer in range(_NUM_LAYERS)), b"output.weight"]
    return [_text(name) + struct.pack("<IQQIQ", 2, 4, 8, 0, 128 * at) for at, name in enumerate(names)]


def _gguf(entries: list[bytes], tensors: list[bytes], num_entries: int, num_tensors: int) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(range(128)) * len(tensors)


_COUNTS = (0, 1, 2, 3, 4, 1000, 2**16, 2**20, 2**24, 2**30, 2**32 - 1, 2**40, 2**62, 2**64 - 1)


def _damaged_gguf(random: Random) -> bytes:
    """A header whose keys, kinds, lengths, counts and offsets are changed, or its bytes."""
    entries, tensors = _entries(), _tensors()
    num_entries, num_tensors = len(entries), len(tensors)
    for _ in range(random.randint(0, 3)):
        at = random.randrange(len(entries))
        match random.randrange(7):
            case 0:
                kind = random.choice([*_LAYOUTS, _STRING, _ARRAY, 13, 2**32 - 1])
                key = random.choice([b"llama.block_count", b"llama.embedding_length", b"llama.attention.head_count"])
                value = struct.pack("<d", random.choice([float("inf"), float("nan"), -1.0, 1e300]))
                entries[at] = _entry(key, kind, random.choice([value, bytes(8), b"\xff" * 8, _text(b"abc")]))
            case 1:
                kind, count = random.choice([*_LAYOUTS, _STRING, _ARRAY]), random.choice(_COUNTS)
                key = random.choice([b"tokenizer.ggml.tokens", b"llama.attention.head_count_kv", b"x"])
                entries[at] = _entry(key, _ARRAY, struct.pack("<IQ", kind, count) + bytes(random.choice([0, 8, 4096])))
            case 2:
                entries[at] = struct.pack("<Q", random.choice(_COUNTS)) + entries[at][8:]
            case 3:
                tensors[random.randrange(len(tensors))] = _text(
                    random.choice([b"blk.1.x", b"blk.99999999999.x", b""])
                ) + (struct.pack("<IQQIQ", random.choice([0, 2, 8, 9, 2**31]), *random.choices(_COUNTS, k=2), 0, 0))
            case 4:
                num_entries = random.choice(_COUNTS)
            case 5:
                num_tensors = random.choice(_COUNTS)
            case _:
                entries.insert(at, entries[random.randrange(len(entries))])
                num_entries = min(num_entries + 1, 2**64 - 1)
    data = _gguf(entries, tensors, num_entries, num_tensors)
    return damage_bytes(random, data) if random.random() < 0.5 else data


def _lone_array(random: Random) -> bytes:
    """One list, behind which a file may have zeros without an end: empty texts, or nothing but numbers."""
    kind, count = random.choice([_STRING, _STRING, *_LAYOUTS]), random.choice(_COUNTS)
    return _gguf([_entry(b"x", _ARRAY, struct.pack("<IQ", kind, count))], [], random.choice([1, 2, 1000]), 0)


@amounts(1500)
def test_gguf_headers(amount: Amount, tmp_path: Path) -> None:
    """Matching, estimating and cutting run in the server; reading all runs before llama.cpp does."""
    path = tmp_path / "model.gguf"
    source = ModelSource(str(path), path)
    llamacpp, hf = LlamaCppBackend(), HfBackend()

    def check(random: Random) -> None:
        is_lone = random.random() < 0.03
        with path.open("wb") as file:
            file.write(_lone_array(random) if is_lone else _damaged_gguf(random))
            if is_lone:
                file.truncate(2**36)
            elif random.random() < 0.3:
                file.truncate(random.choice([0, 100, 2**20, 2**34]))  # a file without a measure costs no disk
        assert 0.0 <= llamacpp.match(source).score <= 1.0 and 0.0 <= hf.match(source).score <= 1.0
        works = (
            lambda: check_gguf(path),
            lambda: llamacpp.estimate(source, LlamaCppOptions()).total_bytes,
            lambda: llamacpp.estimate(source, LlamaCppOptions(num_layers=2)).total_bytes,
            lambda: llamacpp.count_layers(source),
            lambda: hf.estimate(source, HfOptions()).total_bytes,
        )
        for work in works:
            with contextlib.suppress(EnginehouseError):
                assert work() in (None, *range(0)) or work() >= 0

    run_damaged("gguf", amount, check)


@amounts(150)
def test_files_of_first_layers(amount: Amount, tmp_path: Path) -> None:
    """What was written for drafts is read back only where every byte is right."""
    path = tmp_path / "m.gguf"
    path.write_bytes(_gguf(_entries(), _tensors(), len(_entries()), len(_tensors())))
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def write() -> Path:
        return find_or_write(path, 2, lambda share, what: None, env)

    place = write()
    right = place.read_bytes()

    def check(random: Random) -> None:
        place.write_bytes(damage_bytes(random, right))
        assert write() == place and place.read_bytes() == right

    run_damaged("first layers", amount, check)


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 128},
    "dtype": "bfloat16",
    "vocab_size": 100,
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
}
_GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        **_LLAMA,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
    },
    "vision_config": {"hidden_size": 32},
    "quantization": {"bits": 4, "group_size": 64},
}
_GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "eos_token_id": [1, 2],
    "max_length": 9,
}
_INDEX = {"metadata": {"total_size": 5}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "x.safetensors"}}


@amounts(800)
def test_configurations(amount: Amount, tmp_path: Path) -> None:
    """Nothing of a folder's JSON files is believed a type or a size."""
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    source = ModelSource(str(tmp_path), tmp_path)
    backends = ((HfBackend(), HfOptions()), (MlxBackend(), MlxOptions(dtype="float16")))

    def check(random: Random) -> None:
        (tmp_path / "config.json").write_bytes(damaged_document(random, random.choice([_LLAMA, _GEMMA])))
        (tmp_path / "generation_config.json").write_bytes(damaged_document(random, _GENERATION))
        (tmp_path / "model.safetensors.index.json").write_bytes(damaged_document(random, _INDEX))
        for backend, options in backends:
            with contextlib.suppress(EnginehouseError):
                assert 0.0 <= backend.match(source).score <= 1.0  # type: ignore[attr-defined]
                estimate = backend.estimate(source, options)  # type: ignore[attr-defined]
                assert 0 <= estimate.total_bytes < 2**130
        with contextlib.suppress(EnginehouseError):
            folder = ModelFolder.find(source)
            assert folder is not None and 0 < served_context(folder.config, None) <= 4096
        assert all(abs(value) < 2**31 for value in recommended_parameters(tmp_path).values())
        assert is_complete(tmp_path, None) in (True, False)
        json.dumps(recommended_parameters(tmp_path), allow_nan=False)

    run_damaged("config.json", amount, check)
