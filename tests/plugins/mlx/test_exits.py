"""Early exit: logits of the layer that was left; keys and values above it from the state there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import mlx.core as mx
import numpy as np
import pytest

from enginehouse.backend import ModelSource, Span
from enginehouse.config import ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse.early_exit import ExitOutput, ExitView, LayerAccess
from enginehouse.errors import ModelLoadError
from enginehouse.exit_settings import ExitPolicySettings
from enginehouse.models.opening import open_engine, plan_model
from enginehouse.plugins import PluginRegistry
from enginehouse.testing.server_thread import server_thread
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_mlx.exiting import ExitingRunner

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(300)]

RandomModel = Callable[..., Path]

_TOKENS = (np.arange(40, dtype=np.int32) * 31 + 5) % 90
_NAMES = ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "gpt_neox"]


class Leaves:
    """Leaves behind a given layer, or never; records what it was shown."""

    def __init__(self, layers: tuple[int, ...], at: int | None, *, reads_logits: bool = False) -> None:
        self.layers, self._at, self._reads_logits = layers, at, reads_logits
        self.shown: list[tuple[int, np.ndarray, np.ndarray]] = []

    def leaves(self, view: ExitView) -> Any:
        self.shown.append((view.layer, np.asarray(view.hidden).copy(), np.asarray(view.previous_hidden).copy()))
        if self._reads_logits:
            view.logits()
        return np.full(len(view.hidden), view.layer == self._at)


class OneLeaves:
    """The first of the rows that are left leaves behind each layer."""

    layers = (1, 2, 3)

    def leaves(self, view: ExitView) -> Any:
        return np.arange(len(view.hidden)) == 0


class Keeps:
    """A layer that leaves the states of some positions as they are."""

    def __init__(self, layer: Any, stays: list[int]) -> None:
        self._layer, self._stays = layer, mx.array(stays)

    def __call__(self, hidden: mx.array, *others: Any, **named: Any) -> mx.array:
        states = mx.array(self._layer(hidden, *others, **named))
        states[:, self._stays] = hidden[:, self._stays]
        return states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@pytest.fixture
def open_runner(random_model: RandomModel) -> Iterator[Callable[[str], Any]]:
    opened = []

    def open_one(name: str, **options: Any) -> Any:
        path = random_model(name)
        settings = MlxOptions(slots=4, context=128, **options)
        opened.append(MlxBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None))
        return opened[-1]

    yield open_one
    for runner in opened:
        runner.close()


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
@pytest.mark.parametrize("name", _NAMES)
def test_who_leaves_gets_the_logits_of_that_layer(
    open_runner: Callable[[str], Any], name: str, reads_logits: bool
) -> None:
    """Those of the shorter model, for the first token behind a prompt: whether the policy has read them or not."""
    runner = open_runner(name)
    assert isinstance(runner, LayerAccess)
    assert runner.num_layers == 4
    shallow = _holding(runner, _TOKENS[:9])
    expected = runner.forward([Span(shallow, 9, _TOKENS[9:10], "last", 2)]).host().copy()
    runner.use_exit_policy(Leaves((1, 2, 3), at=2, reads_logits=reads_logits))
    found, layers = _decode(runner, [_holding(runner, _TOKENS[:9])], int(_TOKENS[9]))

    assert layers == [2]
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("name", _NAMES)
def test_layers_above_get_keys_and_values_of_the_state_that_left(
    open_runner: Callable[[str], Any], random_model: RandomModel, name: str
) -> None:
    """Against a model whose upper layers change nothing for the token: computed with mlx-lm alone."""
    runner = open_runner(name)
    runner.use_exit_policy(Leaves((2,), at=2))
    num_prompt = 5 if name == "gemma2" else 9  # mlx-lm's Gemma 2 has no windows, and is served up to their length
    sequence = _holding(runner, _TOKENS[:num_prompt])
    for place in (num_prompt, num_prompt + 1):
        _decode(runner, [sequence], int(_TOKENS[place]))
    runner.use_exit_policy(None)
    whole = _TOKENS[: num_prompt + 3]
    found = runner.forward([Span(sequence, num_prompt + 2, whole[-1:])]).host()
    expected = _reference(random_model(name), whole, stays=[num_prompt, num_prompt + 1], left_at=2)

    assert np.abs(found - expected).max() < 1e-3


def _reference(folder: Path, token_ids: np.ndarray, stays: list[int], left_at: int) -> np.ndarray:
    """Logits of the last token, where layers from ``left_at`` on leave the states of some positions as they are."""
    from mlx_lm import load

    model: Any = load(str(folder))[0]
    layers = model.model.layers if "layers" in model.model else model.model.h
    layers[left_at:] = [Keeps(layer, stays) for layer in layers[left_at:]]
    return np.asarray(model(mx.array(token_ids[None]))[0, -1:])


def test_a_policy_that_never_lets_go_changes_nothing(open_runner: Callable[[str], Any]) -> None:
    runner = open_runner("qwen3")
    plain = _holding(runner, _TOKENS[:9])
    expected = runner.forward([Span(plain, 9, _TOKENS[9:10])]).host().copy()
    policy = Leaves((1, 3), at=None, reads_logits=True)
    runner.use_exit_policy(policy)
    found, layers = _decode(runner, [_holding(runner, _TOKENS[:9])], int(_TOKENS[9]))

    assert layers == [4]
    assert np.abs(found - expected).max() < 1e-5
    assert [layer for layer, _, _ in policy.shown] == [1, 3]


def test_states_are_those_behind_and_before_the_layer(open_runner: Callable[[str], Any]) -> None:
    runner = open_runner("qwen3")
    policy = Leaves((1, 2), at=None)
    runner.use_exit_policy(policy)
    _decode(runner, [_holding(runner, _TOKENS[:9])], int(_TOKENS[9]))
    (_, behind_first, before_first), (_, behind_second, before_second) = policy.shown

    assert behind_first.shape == (1, 64)
    assert np.array_equal(before_second, behind_first)
    assert not np.allclose(behind_first, before_first)
    assert not np.allclose(behind_second, before_second)


@pytest.mark.parametrize("name", _NAMES)
def test_tokens_of_a_batch_leave_one_by_one(open_runner: Callable[[str], Any], name: str) -> None:
    """Each gets what it would get alone, and so do the tokens behind it; their lengths and windows differ."""
    runner = open_runner(name)
    prompts = [_TOKENS[:9], _TOKENS[3:17], _TOKENS[20:25], _TOKENS[1:8]]
    together = [_holding(runner, prompt) for prompt in prompts]
    runner.use_exit_policy(OneLeaves())
    rows, layers = _decode(runner, together, 7)
    takes_one = not runner._model.halves.can_batch  # then each is the first of its call
    assert layers == ([1, 1, 1, 1] if takes_one else [1, 2, 3, 4])
    for index, prompt in enumerate(prompts):
        runner.use_exit_policy(Leaves((1, 2, 3), at=layers[index]))
        alone = _holding(runner, prompt)
        row, _ = _decode(runner, [alone], 7)
        assert np.abs(rows[index] - row[0]).max() < 1e-3
        runner.use_exit_policy(None)
        ends = [
            runner.forward([Span(one, runner.length(one), _TOKENS[:3])]).host().copy()
            for one in (together[index], alone)
        ]
        assert np.abs(ends[0] - ends[1]).max() < 1e-3
        runner.free_sequence(alone)


def test_prompts_beside_answers_run_through_all_layers(open_runner: Callable[[str], Any]) -> None:
    """Also a prompt of one token, and a draft of fewer layers; rows and layers come in the order of the spans."""
    runner = open_runner("qwen3")
    alone = runner.forward([Span(runner.open_sequence(), 0, _TOKENS[:1])]).host().copy()
    runner.use_exit_policy(Leaves((1,), at=1))
    first, second, third = (_holding(runner, _TOKENS[:size]) for size in (5, 6, 4))
    output = runner.forward(
        [
            Span(first, 5, _TOKENS[5:6], may_exit=True),
            Span(runner.open_sequence(), 0, _TOKENS[:1]),
            Span(third, 4, _TOKENS[4:6], "all", 2),
            Span(second, 6, _TOKENS[6:7], may_exit=True),
        ]
    )

    assert list(output.exit_layers) == [1, 4, 2, 2, 1]
    assert output.host().shape[0] == 5
    assert np.abs(output.host()[1] - alone[0]).max() < 1e-4


def test_a_model_whose_layers_cannot_be_left_is_refused(open_runner: Callable[[str], Any]) -> None:
    runner = open_runner("qwen3")
    runner.capabilities = attrs.evolve(runner.capabilities, exit_layers=())
    with pytest.raises(ModelLoadError, match="cannot leave between them"):
        runner.use_exit_policy(Leaves((1,), at=1))


def test_the_trial_finds_a_model_that_mixes_its_sequences(open_runner: Callable[[str], Any]) -> None:
    """Here the loop adds the mean over the batch between two layers; alone each sequence is right."""
    runner = open_runner("qwen3")
    body = runner._model.halves.body
    own = type(body)

    class Mixing(own):  # type: ignore[misc, valid-type]
        def __call__(self, inputs: Any, cache: Any = None, *others: Any) -> Any:
            output = own.__call__(self, inputs, cache, *others)
            return output + 0.1 * (output.mean(axis=0, keepdims=True) - output)

    body.__class__ = Mixing
    with pytest.raises(ModelLoadError, match="cannot leave between them"):
        runner.use_exit_policy(Leaves((1,), at=1))


async def test_where_mlx_draws_a_policy_is_refused(random_model: RandomModel) -> None:
    """Drawing one step ahead and asking a policy between two layers exclude each other; the page says what to set."""
    model = ModelSettings(
        source=str(random_model("qwen3")),
        backend="mlx",
        context=64,
        slots=1,
        isolation="thread",
        exit_policy=ExitPolicySettings(name="margin"),
        options={"draws": "mlx"},
    )
    plan = plan_model("m", model, PluginRegistry.load(PluginsSettings()))
    with pytest.raises(ModelLoadError, match=r"the backend 'mlx' has no access to the layers.*early-exit\.md"):
        await open_engine(plan, model, Settings(models={"m": model}), lambda share, what: None)


def test_tokens_leave_early_over_http(random_model: RandomModel) -> None:
    """All of them, none of them, and plain decoding beside them; several at once say the same as alone."""

    def model(policy: ExitPolicySettings | None) -> ModelSettings:
        return ModelSettings(
            source=str(random_model("qwen3")),
            backend="mlx",
            context=128,
            slots=4,
            isolation="thread",
            exit_policy=policy,
        )

    def asked(name: str, threshold: float) -> ExitPolicySettings:
        return ExitPolicySettings(name=name, options={"threshold": threshold, "min_layer": 2, "every": 4})

    def answer(name: str, **fields: Any) -> tuple[list[str], dict[str, Any], httpx.Headers]:
        body = {"model": name, "prompt": "The capital of", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        found = client.post("/v1/completions", json={**body, **fields}, headers={"X-Enginehouse-Details": "1"})
        assert found.status_code == 200, found.text
        texts = [choice["text"] for choice in found.json()["choices"]]
        return texts, found.json()["enginehouse"]["optimizations"], found.headers

    models = {"plain": model(None), "all": model(asked("margin", 0.0)), "none": model(asked("saturation", 1.0))}
    settings = Settings(models=models, server=ServerSettings(port=0, profile="octomil"))
    with server_thread(settings) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        while client.get("/health").json()["status"] == "loading":
            time.sleep(0.05)
        plain, left, stayed = (answer(name) for name in models)
        together = answer("all", prompt=["The capital of"] * 3)

    # The first token belongs to the prompt; the others left behind layer 2 of 4.
    assert (left[1]["early_exit_tokens"], left[1]["skipped_layers"]) == (15, 15 * 2)
    assert left[2]["x-octomil-early-exit-tokens"] == "15"
    assert left[0] != plain[0]
    assert together[0] == left[0] * 3
    assert (stayed[0], stayed[1]["early_exit_tokens"]) == (plain[0], 0)


def test_a_runner_without_a_policy_says_nothing_of_layers(open_runner: Callable[[str], Any]) -> None:
    runner = open_runner("qwen3")
    assert isinstance(runner, ExitingRunner)
    output = runner.forward([Span(runner.open_sequence(), 0, _TOKENS[:3], may_exit=True)])

    assert not isinstance(output, ExitOutput)
