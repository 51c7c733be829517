"""The hf backend on a GPU: the runner's contract, greedy text of ``model.generate``, draws of core's sampler."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from enginehouse.contract.backend import Draw, ModelSource, Runner, Span
from enginehouse.contract.drafter import DraftContext
from enginehouse.contract.errors import ModelLoadError, StateRefused
from enginehouse.contract.exit_policy import ExitView
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.sampling.candidates import uniform
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_speculate.prediction import PredictionDrafter, PredictionOptions
from enginehouse_testkit.backend_contract import ModelUnderTest
from enginehouse_testkit.contract.device_draws import TEXTS, DeviceDrawsContract, prompts_of
from enginehouse_testkit.runner_contract import RunnerContract

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.hf,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TinyModel = Callable[[str], Path]
Greedy = Callable[..., list[list[int]]]


def _open(path: Path, **options: Any) -> Any:
    settings = HfOptions(**{"device": "cuda:0", "dtype": "float32", "slots": 4, "cache_tokens": 4096, **options})
    return HfBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)


def _generate(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers itself generates on the same device."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").cuda()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


class _CudaContract(RunnerContract):
    architecture: str
    max_logit_difference = 1e-3
    options: dict[str, Any] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls, tiny_model: TinyModel) -> Callable[[], Runner]:
        path = tiny_model(cls.architecture)
        options = {"context": 64, "max_batch_tokens": 128, "cache_tokens": 256, **cls.options}
        return lambda: _open(path, **options)  # type: ignore[no-any-return]


class TestLlama(_CudaContract):
    architecture = "llama"


class TestQwen3(_CudaContract):
    architecture = "qwen3"


class TestGemma3(_CudaContract):
    architecture = "gemma3"


class TestGemma2(_CudaContract):
    architecture = "gemma2"


class TestLlamaInBfloat16(_CudaContract):
    """Flash attention, and rounding to eight bits."""

    architecture = "llama"
    max_logit_difference = 0.5
    options = {"dtype": "bfloat16"}


class TestLlamaWithPackedKv(_CudaContract):
    """A sum that rounds otherwise for one row and for many may move a code by one step."""

    architecture = "llama"
    max_logit_difference = 0.5
    options = {"type_k": "fp8", "type_v": "fp8"}


class TestLlamaInBfloat16WithoutGraphs(TestLlamaInBfloat16):
    """Flash attention for short spans, too, which are decodes in recorded steps."""

    options = {"dtype": "bfloat16", "cuda_graphs": False}


class TestLlamaWithoutGraphs(_CudaContract):
    architecture = "llama"
    options = {"cuda_graphs": False, "fused": False}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("fused", [True, False])
def test_greedy_equals_generate_alone_batched_and_chunked(
    tiny_model: TinyModel, greedy: Greedy, architecture: str, fused: bool
) -> None:
    folder = tiny_model(architecture)
    runner = _open(folder, context=128, fused=fused)
    prompts = prompts_of(runner)
    expected = _generate(folder, prompts, 24)

    assert [greedy(runner, [prompt], 24, chunk_tokens=128)[0] for prompt in prompts] == expected
    assert greedy(runner, prompts, 24, chunk_tokens=128) == expected
    assert greedy(runner, prompts, 24, chunk_tokens=5) == expected
    assert runner.info.metadata["layers"] == ("fused layers" if fused else "transformers layers")
    runner.close()


def test_greedy_of_a_fused_family_equals_generate(
    random_model: Callable[[str], Path], greedy: Greedy, fused_family: str
) -> None:
    """Each of its parts in its form for one token and for many, in recorded steps and in chunks."""
    runner = _open(random_model(fused_family), context=128)
    prompts = prompts_of(runner)
    expected = _generate(random_model(fused_family), prompts, 16)

    assert runner.info.metadata["layers"] == "fused layers"
    assert [greedy(runner, [prompt], 16, chunk_tokens=128)[0] for prompt in prompts] == expected
    assert greedy(runner, prompts, 16, chunk_tokens=128) == expected
    assert greedy(runner, prompts, 16, chunk_tokens=5) == expected
    runner.close()


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"cuda_graphs": False}])
def test_greedy_of_a_model_with_sinks_equals_generate(
    random_model: Callable[[str], Path], greedy: Greedy, options: dict[str, Any]
) -> None:
    runner = _open(random_model("gpt_oss"), context=128, **options)
    prompts = prompts_of(runner)
    expected = _generate(random_model("gpt_oss"), prompts, 16)

    assert [greedy(runner, [prompt], 16, chunk_tokens=128)[0] for prompt in prompts] == expected
    assert greedy(runner, prompts, 16, chunk_tokens=5) == expected
    runner.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_half_precision_logits_are_near_those_of_float32(tiny_model: TinyModel, architecture: str, dtype: str) -> None:
    """All positions of a text longer than the window, in one span and in chunks of 7."""
    exact, rounded = (_open(tiny_model(architecture), context=256, dtype=kind) for kind in ("float32", dtype))
    token_ids = exact.tokenizer.encode("".join(TEXTS), False)
    expected = _rows(exact, token_ids, len(token_ids))
    for chunk_tokens in (len(token_ids), 7, 1):
        found = _rows(rounded, token_ids, chunk_tokens)
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
    exact.close()
    rounded.close()


def _rows(runner: Runner, token_ids: list[int], chunk_tokens: int) -> np.ndarray:
    sequence, rows = runner.open_sequence(), []
    for start in range(0, len(token_ids), chunk_tokens):
        chunk = np.array(token_ids[start : start + chunk_tokens], np.int32)
        rows.append(runner.forward([Span(sequence, start, chunk, "all")]).host())
    runner.free_sequence(sequence)
    return np.concatenate(rows)


def test_a_kernel_for_longer_spans_is_right_here() -> None:
    from enginehouse_hf.cuda.long_spans import choose

    device, layers = torch.device("cuda:0"), [((2, 64), (2, 64)), ((2, 128), (2, 128))]
    assert choose(device, torch.bfloat16, layers) is not None
    assert choose(device, torch.bfloat16, layers, has_sinks=True) is not None
    assert choose(device, torch.float32, layers) is None
    assert choose(device, torch.bfloat16, [((2, 512), (2, 512))]) is None


def test_without_flash_attention_the_logits_are_the_same(tiny_model: TinyModel) -> None:
    with_flash, without = (_open(tiny_model("llama"), context=256, dtype="bfloat16") for _ in range(2))
    without._model.network._attention.kernel = None
    token_ids = with_flash.tokenizer.encode("".join(TEXTS) * 4, False)[:200]
    assert len(token_ids) == 200
    expected, found = (_rows(runner, token_ids, 70) for runner in (with_flash, without))

    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


def test_a_loaded_sequence_goes_on_in_recorded_steps(tiny_model: TinyModel) -> None:
    """In another runner, which has computed something else meanwhile: single tokens find their places, too."""
    first, second = (_open(tiny_model("llama"), context=128) for _ in range(2))
    token_ids = first.tokenizer.encode(TEXTS[2], False)
    kept, other = first.open_sequence(), second.open_sequence()
    first.forward([Span(kept, 0, np.array(token_ids, np.int32), "none")])
    second.forward([Span(other, 0, np.array(token_ids[::-1], np.int32), "none")])
    loaded = second.load(first.save(kept))

    assert first.capabilities.states and second.length(loaded) == len(token_ids)
    for start, token_id in enumerate((5, 6, 7), len(token_ids)):
        expected, found = (
            runner.forward([Span(sequence, start, np.array([token_id], np.int32))]).host()
            for runner, sequence in ((first, kept), (second, loaded))
        )
        assert np.abs(found - expected).max() < 1e-3
    first.close()
    second.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fused", [True, False])
def test_keys_and_values_in_8_bits_are_near_whole_ones(tiny_model: TinyModel, fused: bool, dtype: str) -> None:
    """In one span, in chunks and token by token; heads of 16 numbers, each with a factor of four bytes."""
    whole = _open(tiny_model("llama"), context=256, dtype=dtype, fused=fused)
    packed = _open(tiny_model("llama"), context=256, dtype=dtype, fused=fused, type_k="fp8", type_v="fp8")
    token_ids = whole.tokenizer.encode("".join(TEXTS), False)
    expected = _rows(whole, token_ids, len(token_ids))
    for chunk_tokens in (len(token_ids), 7, 1):
        found = _rows(packed, token_ids, chunk_tokens)
        assert 1e-4 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.1

    sizes = [runner._model.state.bytes_per_token for runner in (whole, packed)]
    assert sizes[1] * 16 * (4 if dtype == "float32" else 2) == sizes[0] * (16 + 4)
    assert (packed.info.metadata["type_k"], packed.info.metadata["type_v"]) == ("fp8", "fp8")
    whole.close()
    packed.close()


def test_a_sequence_in_8_bits_is_saved_forked_and_refused_by_other_types(tiny_model: TinyModel) -> None:
    packed, whole = (_open(tiny_model("llama"), context=128, type_k=kind, type_v=kind) for kind in ("fp8", None))
    token_ids = np.array(packed.tokenizer.encode(TEXTS[2], False), np.int32)
    kept = packed.open_sequence()
    packed.forward([Span(kept, 0, token_ids, "none")])
    saved = packed.save(kept)
    others = [packed.load(saved), packed.fork(kept, len(token_ids))[0]]
    spans = [Span(sequence, len(token_ids), np.array([5], np.int32)) for sequence in (kept, *others)]
    rows = packed.forward(spans).host()

    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])
    with pytest.raises(StateRefused):
        whole.load(saved)
    packed.close()
    whole.close()


# -- draws ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocab_size", [700, 128_256])
@pytest.mark.parametrize("spread", [1.0, 5.0])
def test_draws_are_those_of_cores_sampler(dtype: str, vocab_size: int, spread: float) -> None:
    """Any settings in one batch; a row of equal logits, and one with a single token, too."""
    from enginehouse_hf.cuda.draws import draw_rows

    rng, num_rows = np.random.default_rng(vocab_size), 96
    rows = torch.tensor(rng.normal(size=(num_rows, vocab_size)) * spread, dtype=torch.float32)
    rows[1, 5], rows[2], rows[3], rows[3, 7] = float("-inf"), 0.0, float("-inf"), 1.0
    rows = rows.to(getattr(torch, dtype))
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 2.0])),
            top_k=int(rng.choice([0, 1, 3, 40])),
            top_p=float(rng.choice([1.0, 0.9, 0.3, 0.0])),
            min_p=float(rng.choice([0.0, 0.05])),
            seed=seed,
        )
        for seed in range(num_rows)
    ]
    rules = np.array(
        [[i, num_rows - 1 - i, p.temperature, p.top_k, p.top_p, p.min_p, uniform(p.seed, 0, 3)]
         for i, p in enumerate(params)]
    ).T.copy()  # fmt: skip
    last = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    tokens = draw_rows(rows.cuda(), rules, last).tolist()
    expected = [
        SequenceSampler(p, choice=0, vocab_size=vocab_size).sample(row.float().numpy().copy(), 3).token_id
        for p, row in zip(params, rows, strict=True)
    ]

    assert tokens == expected
    assert last.tolist() == tokens[::-1]


def test_no_draw_waits_for_a_compiler(tiny_model: TinyModel) -> None:
    """Whatever is asked for, by however many: all kernels are there once the model is open."""
    from enginehouse_hf.cuda.search import collect, refine, survey
    from enginehouse_hf.cuda.search_end import finish

    runner = _open(tiny_model("llama"), context=64, dtype="bfloat16")
    device = torch.cuda.current_device()
    compiled = [set(kernel.device_caches[device][0]) for kernel in (survey, refine, collect, finish)]
    assert all(compiled)
    sequences = [runner.open_sequence() for _ in range(4)]
    fields: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 7, "top_p": 0.9, "min_p": 0.1}]
    for num_rows in (1, 2, 3, 4):
        spans = [Span(sequence, runner.length(sequence), np.array([5], np.int32)) for sequence in sequences[:num_rows]]
        output = runner.forward(spans)
        for temperature in (0.0, 0.7):
            for bias in (None, np.array([3], np.int64)):
                draws = [
                    Draw(
                        row=index,
                        sequence=sequences[index],
                        sampling=SamplingParams(temperature=temperature, seed=1, **fields[index]),
                        number=0.4,
                        bias_ids=bias,
                        bias_values=None if bias is None else np.array([1.0], np.float32),
                    )
                    for index in range(num_rows)
                ]
                runner.sample(output, draws).host()
    runner.close()

    assert [set(kernel.device_caches[device][0]) for kernel in (survey, refine, collect, finish)] == compiled


def test_kernels_are_compiled_together_before_they_are_launched(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    from enginehouse_hf.cuda import compiling, opening
    from enginehouse_hf.cuda.search import collect, refine, survey
    from enginehouse_hf.cuda.search_end import finish

    for kernel in (survey, refine, collect, finish):
        kernel.device_caches.clear()  # as in a new process
    numbers, late = [], []

    def compile_together(works: Any, device: Any) -> int:
        numbers.append(compiling.compile_together(works, device))
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **told: late.append(told["fn"].name))
        return numbers[-1]

    monkeypatch.setattr(opening, "compile_together", compile_together)
    _open(tiny_model("llama"), context=64, dtype="bfloat16").close()

    assert numbers[0] >= 14
    assert not {"survey", "refine", "collect", "finish"} & set(late)


def test_rows_that_cannot_be_drawn_from_are_told() -> None:
    from enginehouse_hf.cuda.draws import draw_rows

    rows = torch.randn(4, 700, device="cuda")
    rows[0, 3], rows[1, 3], rows[2] = float("nan"), float("inf"), float("-inf")
    rules = np.zeros((7, 4))
    rules[0] = rules[1] = range(4)
    rules[2] = rules[4] = 1.0
    tokens = draw_rows(rows, rules, torch.zeros(4, dtype=torch.int32, device="cuda")).tolist()

    assert tokens[:3] == [-1, -1, -1]
    assert tokens[3] >= 0


class TestDraws(DeviceDrawsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tiny_model: TinyModel) -> ModelUnderTest:
        source = ModelSource("llama", tiny_model("llama"))
        options = HfOptions(device="cuda:0", dtype="float32", slots=4, cache_tokens=4096, context=128)
        return ModelUnderTest(backend=HfBackend(), source=source, options=options)

    @pytest.fixture(scope="class")
    @classmethod
    def plain_model(cls, model: ModelUnderTest) -> ModelUnderTest:
        return evolve(model, options=evolve(model.options, device="cpu", cache_tokens=None))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"fused": False}])
def test_drafts_change_no_text(tiny_model: TinyModel, options: dict[str, Any], temperature: float) -> None:
    """Right and wrong ones at every step, checked as decodes and drawn on the device; nor any log-probability."""
    runner = _open(tiny_model("llama"), context=256, slots=2, **options)
    prompts = prompts_of(runner)[:3]
    expected, _ = _drafted(runner, prompts, [()] * 3, temperature)
    guesses = [
        tuple(token if place % 7 else token + 1 for place, (token, _) in enumerate(answer)) for answer in expected
    ]
    found, num_drafted = _drafted(runner, prompts, guesses, temperature)

    assert num_drafted > 60
    for answer, wanted in zip(found, expected, strict=True):
        assert [token for token, _ in answer] == [token for token, _ in wanted]
        assert [logprob for _, logprob in answer] == pytest.approx([logprob for _, logprob in wanted], abs=1e-4)
    runner.close()


def _drafted(
    runner: Runner, prompts: list[list[int]], guesses: list[tuple[int, ...]], temperature: float
) -> tuple[list[list[tuple[int, float]]], int]:
    """Tokens with log-probabilities of each answer, and how many drafts were computed."""
    drafter = PredictionDrafter().bind(DraftContext(runner, 2), PredictionOptions())
    ticks = count()  # a step takes as long as any other one, so that drafts pay
    engine = StepEngine(
        runner,
        EngineSettings(slots=2, prefix_cache=False),
        {},
        drafters={"prediction": drafter},
        clock=lambda: float(next(ticks)),
    )
    answers: dict[str, list[tuple[int, float]]] = {}
    num_drafted = 0
    for index, (prompt, guess) in enumerate(zip(prompts, guesses, strict=True)):
        sampling = SamplingParams(temperature=temperature, seed=index, num_logprobs=2)
        stopping = StopParams(max_tokens=48, ignore_eos=True)
        answers[str(index)] = []
        engine.add(
            EngineRequest(request_id=str(index), sampling=sampling, stopping=stopping, prediction_token_ids=guess),
            prompt,
        )
    while engine.has_work():
        for request_id, event in engine.step():
            if isinstance(event, TextDelta):
                logprobs = [entry.logprob for entry in event.logprobs or ()]
                answers[request_id] += zip(event.token_ids, logprobs, strict=True)
            elif isinstance(event, RequestFinished):
                num_drafted += event.usage.drafted_tokens
    return list(answers.values()), num_drafted


class _Positive:
    """Tokens leave if the first component of their state is positive: a decision on the device."""

    layers = (1, 3)

    def leaves(self, view: ExitView) -> Any:
        return view.hidden[:, 0] > 0


@pytest.mark.parametrize("options", [{}, {"fused": False}])
def test_tokens_are_drawn_where_they_left_as_on_the_cpu(
    random_model: Callable[[str], Path], options: dict[str, Any]
) -> None:
    """Three sequences, some tokens of a step leave; the next pass is launched before they are read.

    At this temperature no random number is within 0.003 of the border between two tokens, which rounding moves.
    """
    seen = []
    for device in ("cuda:0", "cpu"):
        runner = _open(random_model("qwen3"), context=256, device=device, cache_tokens=1024, **options)
        runner.use_exit_policy(_Positive())
        engine = StepEngine(runner, EngineSettings(slots=3, prefix_cache=False), {})
        for index, prompt in enumerate(prompts_of(runner)[:3]):
            sampling = SamplingParams(temperature=0.2 if index else 0.0, seed=index)
            stopping = StopParams(max_tokens=40, ignore_eos=True)
            engine.add(EngineRequest(request_id=str(index), sampling=sampling, stopping=stopping), prompt)
        answers: dict[str, list[int]] = {}
        num_left = {}
        while engine.has_work():
            for request_id, event in engine.step():
                if isinstance(event, TextDelta):
                    answers.setdefault(request_id, []).extend(event.token_ids)
                elif isinstance(event, RequestFinished):
                    num_left[request_id] = event.usage.early_exit_tokens
        seen.append((answers, num_left))
        engine.close()

    assert seen[0] == seen[1]
    assert 0 < sum(seen[0][1].values()) < 120


def test_steps_of_short_spans_are_recorded_and_give_the_logits_of_others(tiny_model: TinyModel) -> None:
    """A prompt, the end of another one, a token and drafts; and a step of more than was recorded at load."""
    recorded, eager = (_open(tiny_model("llama"), context=256, cuda_graphs=graphs) for graphs in (True, False))
    replays = []
    run = recorded._model.graphs.run
    recorded._model.graphs.run = lambda *arguments: (replays.append(1), run(*arguments))[1]
    token_ids = np.array(recorded.tokenizer.encode("".join(TEXTS) * 4, False)[:150], np.int32)
    results = []
    for runner in (recorded, eager):
        sequences = [runner.open_sequence() for _ in range(4)]
        for sequence in sequences[1:]:
            runner.forward([Span(sequence, 0, token_ids[: 10 + sequence], "none")])
        starts = [runner.length(sequence) for sequence in sequences]
        shapes = [(30, "last"), (20, "none"), (1, "last"), (9, "all")]
        spans = [
            Span(sequence, start, token_ids[start : start + size], outputs)
            for sequence, start, (size, outputs) in zip(sequences, starts, shapes, strict=True)
        ]
        rows = [runner.forward(spans).host().copy()]
        spans = [Span(s, runner.length(s), token_ids[runner.length(s) :][:40], "all") for s in sequences]
        rows.append(runner.forward(spans).host().copy())
        results.append(rows)
        runner.close()

    assert [len(rows) for rows in results[0]] == [11, 160]
    assert len(replays) == 5
    for found, expected in zip(*results, strict=True):
        assert np.abs(found - expected).max() < 1e-3


def test_memory_that_does_not_suffice_is_a_load_error(tiny_model: TinyModel) -> None:
    with pytest.raises(ModelLoadError, match="positions are needed"):
        _open(tiny_model("llama"), cache_tokens=10**10)


def test_random_weights_need_no_weights(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("llama")
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    runner = _open(tmp_path, context=64, random_weights=True)

    assert runner.forward([Span(runner.open_sequence(), 0, np.array([3, 4], np.int32))]).host().shape[0] == 1
