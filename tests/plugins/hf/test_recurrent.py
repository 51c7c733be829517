"""Models with recurrent layers: the greedy text is that of ``model.generate`` in any split and batch."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from enginehouse.contract.backend import ModelSource, Runner, Span
from enginehouse.contract.checkpoints import CheckpointKeeper
from enginehouse.contract.errors import AdapterRefused, ModelLoadError
from enginehouse_backendkit.saved_states import HEAD_BYTES
from enginehouse_hf.attention import UnsupportedAttention
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_hf.recurrent import Mixers

pytestmark = pytest.mark.hf

RandomModel = Callable[[str], Path]
Greedy = Callable[..., list[list[int]]]
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

_OPTIONS = HfOptions(device="cpu", threads=1, slots=4, context=128)
_TEXTS = (
    "The capital of France is",
    "def add(left, right):\n    return",
    "Once upon a time, in a land of mountains and stops, a small engine",
    "1, 2, 3, 4,",
)
_KINDS = ("qwen3_5_text", "jamba", "nemotron_h", "lfm2")
_MORE = (
    "qwen3_next",
    "qwen3_5",
    "mamba",
    "mamba2",
    "bamba",
    "granitemoehybrid",
    "zamba2",
    "falcon_h1",
    "lfm2_moe",
    "olmo_hybrid",
)


def _source(path: Path) -> ModelSource:
    return ModelSource(str(path), path)


def _open(path: Path, **options: Any) -> Any:
    runner = HfBackend().open(_source(path), evolve(_OPTIONS, **options), lambda _share, _what: None)
    assert isinstance(runner, CheckpointKeeper)
    return runner


def _feed(runner: Runner, sequence: int, token_ids: list[int]) -> np.ndarray:
    """(num_tokens, vocab_size) logits of tokens that are appended in one span."""
    span = Span(sequence, runner.length(sequence), np.array(token_ids, np.int32), "all")
    return runner.forward([span]).host()


def _go_on(runner: Runner, sequence: int, token_id: int, num_tokens: int) -> list[int]:
    answer: list[int] = []
    while len(answer) < num_tokens:
        answer.append(int(_feed(runner, sequence, [answer[-1] if answer else token_id])[-1].argmax()))
    return answer


@pytest.mark.parametrize("name", [*_KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in _MORE)])
def test_greedy_equals_generate(random_model: RandomModel, greedy: Greedy, name: str, generate: Generate) -> None:
    """Alone, in a batch, with prompts in chunks, and after going back to a checkpoint, with a fork of it."""
    runner = _open(random_model(name))
    prompts = [runner.tokenizer.encode(text, False) for text in _TEXTS]
    expected = generate(random_model(name), prompts, 12)

    assert [greedy(runner, [prompt], 12, chunk_tokens=128)[0] for prompt in prompts] == expected
    assert greedy(runner, prompts, 12, chunk_tokens=128) == expected
    assert greedy(runner, prompts, 12, chunk_tokens=5) == expected
    assert len({tuple(answer) for answer in expected}) > 2  # the models do say different things

    sequence, prompt = runner.open_sequence(), prompts[2]
    _feed(runner, sequence, prompt[:-1])
    runner.keep_checkpoint(sequence)
    _feed(runner, sequence, prompts[1])
    forked, length = runner.fork(sequence, len(prompt))
    assert length == runner.truncate(sequence, len(prompt)) == len(prompt) - 1
    for one in (sequence, forked):
        assert _go_on(runner, one, prompt[-1], 12) == expected[2]
    runner.close()


@pytest.mark.parametrize("name", _KINDS)
def test_a_saved_sequence_goes_on_elsewhere(random_model: RandomModel, name: str) -> None:
    """Keys and values in bfloat16 beside states in float32."""
    path, token_ids = random_model(name), list(range(20, 37))
    first, second = (_open(path, dtype="bfloat16") for _ in range(2))
    sequence = first.open_sequence()
    _feed(first, sequence, token_ids[:9])
    first.keep_checkpoint(sequence)
    _feed(first, sequence, token_ids[9:])
    data = first.save(sequence)
    loaded = second.load(memoryview(bytes(data)))

    assert np.array_equal(_feed(second, loaded, token_ids[:5]), _feed(first, sequence, token_ids[:5]))
    assert first.truncate(sequence, 12) == second.truncate(loaded, 12) == 9
    assert np.array_equal(_feed(second, loaded, token_ids[:5]), _feed(first, sequence, token_ids[:5]))

    for runner in (first, second):
        runner.close()


@pytest.mark.parametrize("name", _KINDS)
def test_the_estimate_counts_states(random_model: RandomModel, name: str) -> None:
    """By what a saved sequence takes: its state, and keys and values of the layers that have them."""
    runner, source = _open(random_model(name)), _source(random_model(name))
    sequence = runner.open_sequence()
    _feed(runner, sequence, list(range(20, 37)))
    num_bytes = len(runner.save(sequence)) - HEAD_BYTES - 4  # a number of checkpoints, which is 0
    runner.close()

    few, more = (HfBackend().estimate(source, evolve(_OPTIONS, checkpoints=number)) for number in (1, 2))
    state_bytes = more.total_bytes - few.total_bytes
    assert num_bytes == state_bytes + 17 * few.kv_bytes_per_token
    states = 2 * _OPTIONS.slots + 1  # of sequences, and of a checkpoint
    sequences = _OPTIONS.slots * 128 * few.kv_bytes_per_token + states * state_bytes
    assert few.total_bytes == few.weights_bytes + sequences


def test_the_estimate_counts_two_rows_of_a_pool_for_each_sequence_on_a_gpu(random_model: RandomModel) -> None:
    source, backend = _source(random_model("lfm2")), HfBackend()
    on_cpu = evolve(_OPTIONS, dtype="float32")
    estimates = [
        backend.estimate(source, options).total_bytes
        for options in (on_cpu, evolve(on_cpu, checkpoints=33), evolve(on_cpu, device="cuda:0"))
    ]
    state_bytes = estimates[1] - estimates[0]

    sequences = 2 * _OPTIONS.slots
    assert estimates[2] - estimates[0] == (2 * (sequences + 1) - sequences) * state_bytes


@pytest.mark.parametrize("options", [{"device_map": "cpu"}, {"device": "meta"}], ids=str)
def test_recurrent_layers_run_on_one_device_with_plain_weights_only(
    random_model: RandomModel, options: dict[str, str]
) -> None:
    """The device "meta" computes nothing, and exists everywhere."""
    with pytest.raises(
        ModelLoadError,
        match=r"recurrent layers, such as its layer 0, on the CPU, or on one NVIDIA GPU.* device = \"cpu\"",
    ):
        _open(random_model("lfm2"), **options)


def test_an_exit_policy_is_refused(random_model: RandomModel) -> None:
    runner = _open(random_model("lfm2"))

    assert not runner.capabilities.exit_layers
    with pytest.raises(ModelLoadError, match="some layers of this model are recurrent"):
        runner.use_exit_policy(object())


def test_recurrent_modules_are_not_adapted(random_model: RandomModel, tmp_path: Path) -> None:
    """The layers around them are, for one of two sequences of a pass."""
    runner = _open(random_model("qwen3_5_text"))
    refused = _write_adapter(tmp_path / "refused", "model.layers.0.linear_attn.out_proj", (64, 64))
    adapted = _write_adapter(tmp_path / "adapted", "model.layers.0.mlp.gate_proj", (64, 96))
    with pytest.raises(AdapterRefused, match=r"linear_attn\.out_proj.* can be adapted"):
        runner.load_adapter(refused)
    token_ids = np.arange(20, 30, dtype=np.int32)
    sequences = [runner.open_sequence() for _ in range(3)]
    sets = (), (), ((runner.load_adapter(adapted), 1.0),)
    first, second, third = runner.forward(
        [Span(sequence, 0, token_ids, adapter=one) for sequence, one in zip(sequences, sets, strict=True)]
    ).host()

    assert np.array_equal(first, second)
    assert np.abs(first - third).max() > 1e-3
    runner.close()


def _write_adapter(folder: Path, module: str, shape: tuple[int, int]) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    numbers = torch.Generator().manual_seed(3)
    halves = {"A": torch.randn(2, shape[0], generator=numbers), "B": torch.randn(shape[1], 2, generator=numbers)}
    tensors = {f"base_model.model.{module}.lora_{name}.weight": half for name, half in halves.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_functions_of_other_packages_are_not_used(random_model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers wraps its own functions, and calls those of another package if that is installed."""
    from transformers.models.lfm2 import modeling_lfm2

    def of_another_package(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def fail(*_: Any, **__: Any) -> Any:
            raise AssertionError("called")

        return fail

    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        own = inspect.unwrap(getattr(modeling_lfm2, name))
        monkeypatch.setattr(modeling_lfm2, name, of_another_package(own))
    runner = _open(random_model("lfm2"))
    sequence = runner.open_sequence()

    assert _feed(runner, sequence, [20, 21, 22]).shape[0] == 3
    assert np.isfinite(_feed(runner, sequence, [23])).all()
    runner.close()


class _Odd(nn.Module):
    """A convolution over the tokens that forgets the ones before, as no cache is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx, self.conv = 0, nn.Conv1d(4, 4, 3, padding=2, groups=4)

    def forward(self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None) -> Tensor:
        """Convolve, and pretend to have a state."""
        if cache is not None:
            cache.update_recurrent_state(hidden_states[:, -1], 0)
        return self.conv(hidden_states.transpose(1, 2))[..., : hidden_states.shape[1]].transpose(1, 2)


class _OddWithMore(_Odd):
    def forward(self, hidden_states: Tensor, input_ids: Tensor, cache: Any = None) -> Tensor:  # type: ignore[override]
        """Need what a packed step does not divide."""
        return hidden_states


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(_Odd, "_Odd, which gives other numbers when a text is split"), (_OddWithMore, "takes input_ids")],
)
def test_recurrent_modules_of_an_unknown_kind_are_refused(kind: type[_Odd], reason: str) -> None:
    model = nn.Sequential(kind())
    model.config = PreTrainedConfig(hidden_size=4)
    with pytest.raises(UnsupportedAttention, match=reason):
        Mixers(model)
