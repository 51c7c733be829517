"""Models with recurrent layers on a GPU: the text of ``model.generate``, the contracts, states in recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import Draw, LastSampled, ModelSource, Runner, Span
from enginehouse.contract.checkpoints import CheckpointKeeper
from enginehouse.contract.errors import EngineError, ModelLoadError
from enginehouse.contract.types import EngineRequest, EngineSettings, SamplingParams, StopParams
from enginehouse.engine.loop import StepEngine
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.backend_contract import ModelUnderTest
from enginehouse_testkit.contract.device_draws import prompts_of
from enginehouse_testkit.runner_contract import RunnerContract

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.hf,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RandomModel = Callable[[str], Path]
Greedy = Callable[..., list[list[int]]]

_FUSED = ("qwen3_5_text", "qwen3_5", "qwen3_next", "olmo_hybrid", "lfm2")
_RECORDED = ("mamba", "mamba2", "bamba", "zamba2", "falcon_h1")
_WITH_EXPERTS = ("jamba", "granitemoehybrid", "nemotron_h", "lfm2_moe")
"""Those whose layers are fused, those whose decode steps are recorded, and those that read values on the host."""


def _open(path: Path, **options: Any) -> Any:
    settings = {"device": "cuda:0", "dtype": "float32", "slots": 4, "cache_tokens": 2048, "context": 128, **options}
    runner = HfBackend().open(ModelSource(str(path), path), HfOptions(**settings), lambda _share, _what: None)
    assert isinstance(runner, CheckpointKeeper)
    return runner


def _generate(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
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


def _feed(runner: Runner, sequence: int, token_ids: Sequence[int]) -> np.ndarray:
    """(num_tokens, vocab_size) logits of tokens that are appended in one span."""
    span = Span(sequence, runner.length(sequence), np.array(token_ids, np.int32), "all")
    return runner.forward([span]).host()


def _go_on(runner: Runner, sequence: int, token_id: int, num_tokens: int) -> list[int]:
    answer: list[int] = []
    while len(answer) < num_tokens:
        answer.append(int(_feed(runner, sequence, [answer[-1] if answer else token_id])[-1].argmax()))
    return answer


@pytest.mark.parametrize("name", [*_FUSED, *_RECORDED, *_WITH_EXPERTS])
def test_greedy_equals_generate(random_model: RandomModel, greedy: Greedy, name: str) -> None:
    """Alone, in a batch, with prompts in chunks, and after going back to a checkpoint, with a fork of it."""
    runner = _open(random_model(name))
    prompts = prompts_of(runner)
    expected = _generate(random_model(name), prompts, 12)

    if name not in _WITH_EXPERTS:
        assert runner.info.metadata["layers"] == f"{'fused' if name in _FUSED else 'transformers'} layers"
    assert [greedy(runner, [prompt], 12, chunk_tokens=128)[0] for prompt in prompts] == expected
    assert greedy(runner, prompts, 12, chunk_tokens=128) == expected
    assert greedy(runner, prompts, 12, chunk_tokens=5) == expected

    sequence, prompt = runner.open_sequence(), prompts[2]
    _feed(runner, sequence, prompt[:-1])
    runner.keep_checkpoint(sequence)
    _feed(runner, sequence, prompts[1])
    forked, length = runner.fork(sequence, len(prompt))
    assert length == runner.truncate(sequence, len(prompt)) == len(prompt) - 1
    for one in (sequence, forked):
        assert _go_on(runner, one, prompt[-1], 12) == expected[2]
    runner.close()


class _HybridContract(RunnerContract):
    """A cache that can be full, and checkpoints."""

    name: str
    max_logit_difference = 1e-3
    options: dict[str, Any] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, random_model: RandomModel) -> ModelUnderTest:
        path = random_model(cls.name)
        options = HfOptions(
            device="cuda:0",
            dtype="float32",
            context=64,
            slots=4,
            max_batch_tokens=128,
            cache_tokens=256,
            **cls.options,
        )
        return ModelUnderTest(backend=HfBackend(), source=ModelSource(str(path), path), options=options)


class TestGatedDeltaNet(_HybridContract):
    name = "qwen3_5_text"


class TestGatedDeltaNetWithoutGraphs(_HybridContract):
    """And without kernels of our own for the recurrent modules."""

    name = "qwen3_5_text"
    options = {"cuda_graphs": False, "fused": False}


class TestMamba2(_HybridContract):
    """No layer has keys and values."""

    name = "mamba2"


class TestShortConvolution(_HybridContract):
    name = "lfm2"


class TestMamba1(_HybridContract):
    name = "jamba"


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2", "lfm2"])
def test_the_last_pass_is_taken_back(random_model: RandomModel, name: str) -> None:
    """Without a checkpoint: a token, several tokens, and a fork from before; the state before these is gone."""
    runner, prompt = _open(random_model(name)), list(range(20, 30))
    sequence = runner.open_sequence()
    expected = _feed(runner, sequence, prompt)[-1], _feed(runner, sequence, [40])[-1]
    for num_tokens in (1, 2, 7):
        assert runner.truncate(sequence, 10) == 10
        _feed(runner, sequence, list(range(60, 60 + num_tokens)))
        forked, length = runner.fork(sequence, 10)
        assert length == runner.truncate(sequence, 10) == 10
        for one in (forked, sequence):
            assert np.abs(_feed(runner, one, [40])[-1] - expected[1]).max() < 1e-3
        runner.free_sequence(forked)

    assert runner.truncate(sequence, 9) == 0
    assert np.abs(_feed(runner, sequence, prompt)[-1] - expected[0]).max() < 1e-3
    runner.close()


def test_a_failed_pass_changes_no_state(random_model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at the end, when all recurrent layers have run."""
    from enginehouse_hf.cuda import runner as runner_module

    runner = _open(random_model("qwen3_5_text"), cuda_graphs=False)
    sequence, other = runner.open_sequence(), runner.open_sequence()
    _feed(runner, sequence, range(20, 30))
    _feed(runner, other, range(20, 30))
    expected = _feed(runner, other, [40])

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "DeviceRows", fail)
        with pytest.raises(EngineError, match="out of memory"):
            _feed(runner, sequence, [40])
    assert runner.length(sequence) == 10
    assert np.abs(_feed(runner, sequence, [40]) - expected).max() < 1e-3
    runner.close()


def test_states_in_bfloat16_models_and_saved_sequences(random_model: RandomModel) -> None:
    """A loaded sequence goes on in recorded steps, and goes back to its checkpoint."""
    first, second = (_open(random_model("qwen3_5_text"), dtype="bfloat16") for _ in range(2))
    token_ids = list(range(20, 37))
    sequence = first.open_sequence()
    _feed(first, sequence, token_ids[:9])
    first.keep_checkpoint(sequence)
    _feed(first, sequence, token_ids[9:])
    loaded = second.load(first.save(sequence))

    for token_id in (5, 6):
        assert np.array_equal(_feed(second, loaded, [token_id]), _feed(first, sequence, [token_id]))
    assert first.truncate(sequence, 12) == second.truncate(loaded, 12) == 9
    assert np.array_equal(_feed(second, loaded, token_ids[:5]), _feed(first, sequence, token_ids[:5]))
    first.close()
    second.close()


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_quantised_weights_beside_recurrent_modules(random_model: RandomModel, greedy: Greedy, quantize: str) -> None:
    """Fused layers read them packed, recurrent modules unpack them: the text is that of unpacked weights."""
    packed, plain = (
        _open(random_model("qwen3_5_text"), quantize=quantize, fused=is_fused) for is_fused in (True, False)
    )
    prompts = prompts_of(packed)[:2]

    assert packed.info.metadata["layers"] == "fused layers"
    assert greedy(packed, prompts, 12, chunk_tokens=7) == greedy(plain, prompts, 12, chunk_tokens=7)
    packed.close()
    plain.close()


def test_conversations_through_the_engine(random_model: RandomModel) -> None:
    """Steps are launched one ahead, sequences preempted and prefixes reused: each text is that of a fresh engine."""

    small, large = (_open(random_model("qwen3_5_text"), slots=2, cache_tokens=number) for number in (160, 2048))
    together, fresh = (StepEngine(runner, EngineSettings(slots=2, prefix_cache=True), {}) for runner in (small, large))
    prompts = [prompt[:40] for prompt in prompts_of(small)]
    expected = [_answers(fresh, [prompt], cache_prompt=False)[0] for prompt in prompts]

    assert _answers(together, prompts) == expected
    more = [prompt + answer[:20] + [30, 31, 32] for prompt, answer in zip(prompts, expected, strict=True)]
    assert _answers(together, more) == [_answers(fresh, [prompt], cache_prompt=False)[0] for prompt in more]


def _answers(engine: StepEngine, prompts: list[list[int]], cache_prompt: bool = True) -> list[list[int]]:
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        request = EngineRequest(
            request_id=str(index),
            sampling=SamplingParams(temperature=0.0),
            stopping=StopParams(max_tokens=24, ignore_eos=True),
            cache_prompt=cache_prompt,
        )
        engine.add(request, prompt)
    while engine.has_work():
        for request_id, event in engine.step():
            answers[request_id] += getattr(event, "token_ids", ())
    return list(answers.values())


def test_drawn_tokens_are_the_input_of_recorded_steps(random_model: RandomModel) -> None:
    runner = _open(random_model("lfm2"))
    sequence = runner.open_sequence()
    rows = runner.forward([Span(sequence, 0, np.arange(20, 30, dtype=np.int32))])
    draw = Draw(row=0, sequence=sequence, sampling=SamplingParams(temperature=0.0), number=0.5)
    drawn = runner.sample(rows, [draw])
    found = runner.forward([Span(sequence, 10, LastSampled())]).host()
    (token,) = drawn.host()

    assert runner.truncate(sequence, 10) == 10
    assert np.abs(_feed(runner, sequence, [token.token_id]) - found).max() < 1e-4
    runner.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache_tokens": 10**10}, r"positions are needed.* beside the weights and 51 states of 0 MiB"),
    ],
)
def test_what_recurrent_layers_do_not_support_is_refused(
    random_model: RandomModel, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        _open(random_model("qwen3_5_text"), **options)
