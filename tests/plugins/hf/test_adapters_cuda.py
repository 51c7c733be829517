"""Adapters of the hf backend on a GPU: the contract, numbers of the CPU's runner, texts beside other requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from enginehouse.contract.adapters import Adapter, digest_of
from enginehouse.contract.backend import ModelSource, Runner, Span
from enginehouse.contract.types import EngineRequest, EngineSettings, SamplingParams, StopParams, TextDelta
from enginehouse.engine.loop import StepEngine
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.adapter_contract import AdaptedModel, AdapterContract

from .lora_folders import adapted_model, lora_tensors, write_adapter

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.hf,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TinyModel = Callable[[str], Path]


def _open(path: Path, **options: Any) -> Any:
    settings = HfOptions(**{"device": "cuda:0", "dtype": "float32", "slots": 4, "cache_tokens": 4096, **options})
    return HfBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _decoded(runner: Any, sets: Sequence[Mapping[int, float]]) -> np.ndarray:
    """Logits of a prompt and of two decodes of a sequence for each set of adapters, (3 * len(sets), vocab_size)."""
    sequences, rows = [runner.open_sequence() for _ in sets], []
    for start, tokens in ((0, [5, 6, 7, 8]), (4, [9]), (5, [10])):
        spans = [
            Span(sequence, start, np.array(tokens, np.int32) + index, adapter=tuple(one.items()))
            for index, (sequence, one) in enumerate(zip(sequences, sets, strict=True))
        ]
        rows.append(runner.forward(spans).host())
    for sequence in sequences:
        runner.free_sequence(sequence)
    return np.concatenate(rows)


_ADAPTED: dict[str, Any] = {"context": 64, "max_batch_tokens": 128, "cache_tokens": 512}


def _sets(handles: Sequence[int], num_sequences: int) -> list[dict[int, float]]:
    """Adapters with scales for each sequence: one, another, two, none and so on."""
    one, two, three = handles
    sets: list[dict[int, float]] = [{one: 1.0}, {two: 0.5}, {three: 1.0, one: -0.5}, {}]
    return [sets[index % 4] for index in range(num_sequences)]


class _CudaAdapters(AdapterContract):
    architecture = "llama"
    max_logit_difference = 2e-3
    options: dict[str, Any] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls, tiny_model: TinyModel) -> Callable[[], Runner]:
        path, options = tiny_model(cls.architecture), {**_ADAPTED, **cls.options}
        return lambda: _open(path, **options)  # type: ignore[no-any-return]

    @pytest.fixture(scope="class")
    @classmethod
    def adapted(cls, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
        folder, options = tmp_path_factory.mktemp("adapters"), {**_ADAPTED, **cls.options}
        return adapted_model(folder, tiny_model(cls.architecture), lambda path: _open(path, **options))


class TestAdapters(_CudaAdapters):
    """In recorded steps of fused layers."""


class TestAdaptersOfGemma3(_CudaAdapters):
    architecture = "gemma3"


class TestAdaptersWithoutGraphs(_CudaAdapters):
    options = {"cuda_graphs": False}


class TestAdaptersOfTransformersLayers(_CudaAdapters):
    options = {"fused": False}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantize", [None, "fp8", "int4"])
def test_adapters_add_to_weights_of_every_kind_what_they_add_on_the_cpu(
    tiny_model: TinyModel, tmp_path: Path, dtype: str, quantize: str | None
) -> None:
    """A prompt, then decodes of 1, 3 and 9 sequences with adapters of their own; as near as without adapters."""
    folder = tiny_model("llama")
    paths = [write_adapter(tmp_path / str(seed), lora_tensors(folder, seed)) for seed in range(3)]
    options = {"context": 64, "quantize": quantize, "slots": 12, "cache_tokens": 2048}
    runners = found, exact = _open(folder, dtype=dtype, **options), _open(folder, device="cpu", **options)
    handles = [[runner.load_adapter(path) for path in paths] for runner in runners]
    for num_sequences in (1, 3, 9):
        noise = _difference(*(_decoded(runner, [{}] * num_sequences) for runner in runners))
        got, expected = (
            _decoded(runner, _sets(own, num_sequences)) for runner, own in zip(runners, handles, strict=True)
        )

        assert _difference(got, expected) < max(1e-4, 3.0 * noise)
    exact.close()
    found.close()


@pytest.fixture(scope="module")
def wide_model(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are wide enough for the kernels of products for a few tokens."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(tiny_model("llama"))),
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("wide") / "wide"
    shutil.copytree(tiny_model("llama"), folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_adapters_of_wide_layers_add_what_they_add_on_the_cpu(wide_model: Path, tmp_path: Path) -> None:
    """In the kernels of products up to 32 tokens, beside cuBLAS for more; sequences without keep the base's bits."""
    paths = [write_adapter(tmp_path / str(seed), lora_tensors(wide_model, seed)) for seed in range(3)]
    options = {"context": 64, "slots": 48, "cache_tokens": 4096}
    runners = found, exact = _open(wide_model, dtype="float16", **options), _open(wide_model, device="cpu", **options)
    handles = [[runner.load_adapter(path) for path in paths] for runner in runners]
    for num_sequences in (1, 3, 9, 32, 40):
        got, expected = (
            _decoded(runner, _sets(own, num_sequences)) for runner, own in zip(runners, handles, strict=True)
        )
        base, exact_base = (_decoded(runner, [{}] * num_sequences) for runner in runners)
        rows = [row for row in range(3 * num_sequences) if not _sets(handles[0], num_sequences)[row % num_sequences]]

        assert _difference(got, expected) < 3.0 * _difference(base, exact_base)
        assert _difference(base, expected) > 0.1
        assert np.array_equal(got[rows], base[rows])
    assert found.info.metadata["layers"] == "fused layers"
    exact.close()
    found.close()


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "bamba"])
def test_adapters_beside_recurrent_layers_add_what_they_add_on_the_cpu(
    random_model: Callable[[str], Path], tmp_path: Path, architecture: str
) -> None:
    """On attention and feed-forward parts; a prompt and decodes, beside a sequence without."""
    folder = random_model(architecture)
    tensors = {name: data for name, data in lora_tensors(folder, 0).items() if ".experts." not in name}
    path = write_adapter(tmp_path / "adapter", tensors)
    rows: list[Any] = []
    for device in ("cpu", "cuda:0"):
        runner = _open(folder, device=device, context=64, cache_tokens=None if device == "cpu" else 512)
        adapters = ((), ((runner.load_adapter(path), 1.0),))
        sequences = [runner.open_sequence() for _ in adapters]
        found = []
        for start, tokens in ((0, [5, 6, 7, 8]), (4, [9]), (5, [10])):
            spans = [
                Span(sequence, start, np.array(tokens, np.int32), adapter=adapter)
                for sequence, adapter in zip(sequences, adapters, strict=True)
            ]
            found.append(runner.forward(spans).host())
        rows.append(np.concatenate(found))
        runner.close()

    assert np.abs(rows[1] - rows[0]).max() < 1e-3 * np.abs(rows[0]).max()
    assert np.abs(rows[0][::2] - rows[0][1::2]).max() > 0.01 * np.abs(rows[0]).max()


def test_adapters_of_drafts_beside_recurrent_layers_are_those_of_their_sequences(
    random_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Three sequences, which a recorded step pads to four, with two tokens each."""
    folder = random_model("qwen3_5_text")
    path = write_adapter(tmp_path / "adapter", lora_tensors(folder, 0))
    rows: list[Any] = []
    for device in ("cpu", "cuda:0"):
        runner = _open(folder, device=device, context=64, cache_tokens=None if device == "cpu" else 512)
        handle, found = runner.load_adapter(path), []
        sequences = [runner.open_sequence() for _ in range(3)]
        for start, tokens in ((0, [5, 6, 7, 8]), (4, [9, 10])):
            spans = [
                Span(sequence, start, np.array(tokens, np.int32), "all", adapter=((handle, 1.0),) * (index % 2))
                for index, sequence in enumerate(sequences)
            ]
            found.append(runner.forward(spans).host())
        rows.append(np.concatenate(found))
        runner.close()

    assert _difference(rows[1], rows[0]) < 1e-3


def test_stacks_grow_with_ranks_adapters_and_projections(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Each adapter gives the same rows after every growth, and an index that was freed nothing of the one before."""
    folder = tiny_model("llama")
    runner = _open(folder, **_ADAPTED)
    whole = lora_tensors(folder, 0)
    attention = {name: data for name, data in whole.items() if "q_proj" in name}
    rng = np.random.default_rng(0)
    wide = {
        name: rng.standard_normal((40, data.shape[1]) if "lora_A" in name else (data.shape[0], 40)).astype(np.float32)
        / 40
        for name, data in whole.items()
        if "down_proj" in name
    }
    paths = [write_adapter(tmp_path / "attention", attention), write_adapter(tmp_path / "whole", whole)]
    paths += [write_adapter(tmp_path / "wide", wide, r=40)]
    paths += [write_adapter(tmp_path / str(seed), lora_tensors(folder, seed)) for seed in (1, 2)]

    def rows(handle: int) -> np.ndarray:
        sequence, found = runner.open_sequence(), []
        for start, tokens in ((0, [3, 4, 5]), (3, [6])):
            span = Span(sequence, start, np.array(tokens, np.int32), "all", adapter=((handle, 1.0),))
            found.append(runner.forward([span]).host())
        runner.free_sequence(sequence)
        return np.concatenate(found)

    handles, first = [], []
    for path in paths:
        handles.append(runner.load_adapter(path))
        first.append(rows(handles[-1]))
        for handle, expected in zip(handles, first, strict=True):
            assert np.abs(rows(handle) - expected).max() < 1e-4
    assert min(np.abs(one - other).max() for one, other in combinations(first, 2)) > 0.01
    runner.unload_adapter(handles[1])
    again = runner.load_adapter(paths[0])
    assert again not in handles
    assert np.abs(rows(again) - first[0]).max() < 1e-4
    runner.close()


def test_texts_with_adapters_do_not_depend_on_other_requests(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Twelve requests with five sets, over a cache so small that sequences are preempted, and three places."""
    folder = tiny_model("llama")
    paths = [write_adapter(tmp_path / str(seed), lora_tensors(folder, seed)) for seed in range(3)]
    one, two, three = (Adapter(path.name, str(path), digest_of(path)) for path in paths)
    sets: list[tuple[Adapter, ...]] = [(), (one,), (two,), (msgspec.structs.replace(three, scale=0.5),), (one, two)]

    def texts(runner: Runner, numbers: Sequence[int], max_adapters: int) -> tuple[dict[str, list[int]], int]:
        engine = StepEngine(runner, EngineSettings(slots=6, max_adapters=max_adapters), {})
        found: dict[str, list[int]] = {str(number): [] for number in numbers}
        for number in numbers:
            stopping = StopParams(max_tokens=20 + number, ignore_eos=True)
            sampling = SamplingParams(temperature=0.0)
            request = EngineRequest(
                request_id=str(number), sampling=sampling, stopping=stopping, adapters=sets[number % 5]
            )
            engine.add(request, list(range(5, 25 + number)))
        while engine.has_work():
            for request_id, event in engine.step():
                if isinstance(event, TextDelta):
                    found[request_id] += event.token_ids
        return found, engine.stats().num_preemptions

    large, small = _open(folder, context=64, slots=6), _open(folder, context=64, slots=6, cache_tokens=160)
    expected = {str(number): texts(large, [number], 3)[0][str(number)] for number in range(12)}
    found, num_preemptions = texts(small, range(12), 2)

    assert found == expected
    assert num_preemptions > 0
    assert len({tuple(tokens[:20]) for tokens in expected.values()}) > 5
    large.close()
    small.close()
