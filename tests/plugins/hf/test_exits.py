"""Early exit: logits of the layer that was left; keys and values above it from the state there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from enginehouse.backend import ModelSource, Span
from enginehouse.early_exit import ExitContext, ExitOutput, ExitView, LayerAccess
from enginehouse.errors import ModelLoadError
from enginehouse_hf.backend import HfBackend, HfOptions

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.hf, pytest.mark.timeout(300)]

RandomModel = Callable[[str], Path]

_TOKENS = (np.arange(40, dtype=np.int32) * 31 + 5) % 150


class Leaves:
    """Leaves behind a given layer, all tokens or those in some rows; records what it was shown."""

    def __init__(self, layers: tuple[int, ...], at: int | None, *, reads_logits: bool = False) -> None:
        self.layers, self._at, self._reads_logits = layers, at, reads_logits
        self.shown: list[tuple[int, np.ndarray, np.ndarray]] = []

    def leaves(self, view: ExitView) -> Any:
        self.shown.append((view.layer, _host(view.hidden), _host(view.previous_hidden)))
        if self._reads_logits:
            view.logits()
        return np.full(len(view.hidden), view.layer == self._at)


class SomeLeave:
    """The first of the rows leaves behind each layer."""

    layers = (1, 2, 3)

    def leaves(self, view: ExitView) -> Any:
        return np.arange(len(view.hidden)) == 0


@attrs.frozen(eq=False)
class _GivenView:
    """Arrays of any library."""

    hidden: Any
    previous_hidden: Any
    rows: Any
    layer: int = 4

    def logits(self) -> Any:
        return self.rows


def _host(array: Any) -> np.ndarray:
    copy: np.ndarray = array.cpu().numpy().copy()
    return copy


def _open(path: Path, way: dict[str, Any], **options: Any) -> Any:
    settings = HfOptions(dtype="float32", threads=1, slots=4, context=128, **way, **options)
    return HfBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)


def _decode(runner: Any, sequences: list[int], token: int) -> tuple[np.ndarray, list[int]]:
    """One step of several sequences: logits and layers."""
    token_ids = np.array([token], np.int32)
    output = runner.forward([Span(one, runner.length(one), token_ids, may_exit=True) for one in sequences])
    assert isinstance(output, ExitOutput)
    return output.host().copy(), list(output.exit_layers)


def _holding(runner: Any, token_ids: np.ndarray) -> int:
    sequence: int = runner.open_sequence()
    runner.forward([Span(sequence, 0, token_ids, "none")])
    return sequence


@pytest.mark.parametrize("reads_logits", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3_text", "phi", "gpt_neox", "qwen3_moe", "olmo2"])
def test_who_leaves_gets_the_logits_of_that_layer(
    random_model: RandomModel, way: dict[str, Any], name: str, reads_logits: bool
) -> None:
    """Those of the shorter model, for the first token behind a prompt: whether the policy has read them or not."""
    runner = _open(random_model(name), way)
    assert isinstance(runner, LayerAccess)
    assert runner.num_layers == 4
    shallow = _holding(runner, _TOKENS[:9])
    expected = runner.forward([Span(shallow, 9, _TOKENS[9:10], "last", 2)]).host().copy()
    runner.use_exit_policy(Leaves((1, 2, 3), at=2, reads_logits=reads_logits))
    found, layers = _decode(runner, [_holding(runner, _TOKENS[:9])], int(_TOKENS[9]))

    assert layers == [2]
    assert np.abs(found - expected).max() < 1e-4
    runner.close()


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3_text", "phi", "gpt_neox"])
def test_layers_above_get_keys_and_values_of_the_state_that_left(
    random_model: RandomModel, way: dict[str, Any], name: str
) -> None:
    """Against a model whose upper layers change nothing for the token: computed with transformers alone."""
    runner = _open(random_model(name), way)
    runner.use_exit_policy(Leaves((2,), at=2))
    sequence = _holding(runner, _TOKENS[:9])
    for place in (9, 10):
        _decode(runner, [sequence], int(_TOKENS[place]))
    runner.use_exit_policy(None)
    found = runner.forward([Span(sequence, 11, _TOKENS[11:12])]).host()

    assert np.abs(found - _reference(random_model(name), _TOKENS[:12], stays=[9, 10], left_at=2)).max() < 1e-3
    runner.close()


def _reference(folder: Path, token_ids: np.ndarray, stays: list[int], left_at: int) -> np.ndarray:
    """Logits of the last token, where layers from ``left_at`` on leave the states of some positions as they are."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def keep(_module: Any, inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        states = states.clone()
        states[:, stays] = inputs[0][:, stays]
        return (states, *output[1:]) if isinstance(output, tuple) else states

    for layer in model.base_model.layers[left_at:]:
        layer.register_forward_hook(keep)
    with torch.no_grad():
        rows: np.ndarray = model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0, -1:].numpy()
    return rows


def test_a_policy_that_never_lets_go_changes_nothing(random_model: RandomModel, way: dict[str, Any]) -> None:
    runner = _open(random_model("qwen3"), way)
    plain = _holding(runner, _TOKENS[:9])
    expected = runner.forward([Span(plain, 9, _TOKENS[9:10])]).host().copy()
    policy = Leaves((1, 3), at=None, reads_logits=True)
    runner.use_exit_policy(policy)
    found, layers = _decode(runner, [_holding(runner, _TOKENS[:9])], int(_TOKENS[9]))

    assert layers == [4]
    assert np.abs(found - expected).max() < 1e-5
    assert [layer for layer, _, _ in policy.shown] == [1, 3]
    runner.close()


def test_states_are_those_behind_and_before_the_layer(random_model: RandomModel, way: dict[str, Any]) -> None:
    runner = _open(random_model("qwen3"), way)
    policy = Leaves((1, 2), at=None)
    runner.use_exit_policy(policy)
    _decode(runner, [_holding(runner, _TOKENS[:9])], int(_TOKENS[9]))
    (_, behind_first, before_first), (_, behind_second, before_second) = policy.shown

    assert behind_first.shape == (1, 64)
    assert np.array_equal(before_second, behind_first)
    assert not np.allclose(behind_first, before_first)
    assert not np.allclose(behind_second, before_second)
    runner.close()


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "mixtral"])
def test_tokens_of_a_batch_leave_one_by_one(random_model: RandomModel, way: dict[str, Any], name: str) -> None:
    """Each gets what it would get alone, and so do the tokens behind it."""
    runner = _open(random_model(name), way)
    prompts = [_TOKENS[:9], _TOKENS[3:17], _TOKENS[20:25], _TOKENS[1:8]]
    together = [_holding(runner, prompt) for prompt in prompts]
    runner.use_exit_policy(SomeLeave())
    rows, layers = _decode(runner, together, 7)
    assert sorted(layers) == [1, 2, 3, 4]
    for index, prompt in enumerate(prompts):
        runner.use_exit_policy(Leaves((1, 2, 3), at=layers[index]))
        alone = _holding(runner, prompt)
        row, _ = _decode(runner, [alone], 7)
        assert np.abs(rows[index] - row[0]).max() < 1e-4
        runner.use_exit_policy(None)
        ends = [runner.forward([Span(one, runner.length(one), _TOKENS[:3])]).host() for one in (together[index], alone)]
        assert np.abs(ends[0] - ends[1]).max() < 1e-4
        runner.free_sequence(alone)
    runner.close()


def test_prompts_beside_answers_run_through_all_layers(random_model: RandomModel, way: dict[str, Any]) -> None:
    """Also a prompt of one token; rows and layers come in the order of the spans."""
    runner = _open(random_model("qwen3"), way)
    alone = runner.forward([Span(runner.open_sequence(), 0, _TOKENS[:1])]).host().copy()
    policy = Leaves((1,), at=1)
    runner.use_exit_policy(policy)
    first, second = (_holding(runner, _TOKENS[:size]) for size in (5, 6))
    output = runner.forward(
        [
            Span(first, 5, _TOKENS[5:6], may_exit=True),
            Span(runner.open_sequence(), 0, _TOKENS[:1]),
            Span(second, 6, _TOKENS[6:7], may_exit=True),
        ]
    )

    assert list(output.exit_layers) == [1, 4, 1]
    assert np.abs(output.host()[1] - alone[0]).max() < 1e-4
    runner.close()


def test_a_model_without_layers_to_leave_is_refused(random_model: RandomModel, way: dict[str, Any]) -> None:
    runner = _open(random_model("qwen3"), way)
    runner.capabilities = attrs.evolve(runner.capabilities, exit_layers=())
    with pytest.raises(ModelLoadError, match=r"layers of this model are .*built in an unknown way"):
        runner.use_exit_policy(Leaves((1,), at=1))
    runner.close()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_policies_decide_on_torchs_arrays_as_on_numpys(num_rows: int) -> None:
    """Where the arrays are; only the answer comes to the host."""
    from enginehouse_early_exit.policies import EntropyPolicy, MarginPolicy, SaturationPolicy

    rng = np.random.default_rng(num_rows)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    context = ExitContext(8, tuple(range(1, 8)))
    for policy, thresholds in (
        (MarginPolicy(), (0.1, 0.5)),
        (EntropyPolicy(), (1.0, 3.0)),
        (SaturationPolicy(), (0.01, 0.3)),
    ):
        for threshold in thresholds:
            bound = policy.bind(context, policy.options(threshold=threshold))
            for scale in (1.0, 4.0, 9.0):
                arrays = [
                    rng.standard_normal((num_rows, size), np.float32) * np.float32(scale) for size in (16, 16, 300)
                ]
                arrays[1] = arrays[0] + arrays[1] * np.float32(rng.uniform(0, 3))
                expected = bound.leaves(_GivenView(*arrays))
                found = bound.leaves(_GivenView(*(torch.from_numpy(array).to(device) for array in arrays)))

                assert isinstance(found, np.ndarray)
                assert found.dtype == np.bool_
                assert found.tolist() == expected.tolist()
