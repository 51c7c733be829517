"""Early exit: logits of the layer that was left; keys and values above it from the state there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.exit_policy import ExitOutput
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import open_engine, plan_model
from enginehouse.settings.config import ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse.settings.features import ExitPolicySettings
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_mlx.exiting import ExitingRunner
from enginehouse_testkit.contract.exits import LeaveAt
from enginehouse_testkit.depth_contract import OpenFamily
from enginehouse_testkit.leaving_contract import AfterLeaving, LeavingContract
from enginehouse_testkit.server_thread import server_thread

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(300)]

RandomModel = Callable[..., Path]

_TOKENS = (np.arange(40, dtype=np.int32) * 31 + 5) % 90


class Keeps:
    """A layer that leaves the states of some positions as they are."""

    def __init__(self, layer: Any, stays: Sequence[int]) -> None:
        self._layer, self._stays = layer, mx.array(list(stays))

    def __call__(self, hidden: mx.array, *others: Any, **named: Any) -> mx.array:
        states = mx.array(self._layer(hidden, *others, **named))
        states[:, self._stays] = hidden[:, self._stays]
        return states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _open(path: Path, **options: Any) -> Any:
    settings = MlxOptions(slots=4, context=128, **options)
    return MlxBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)


class TestLeaving(LeavingContract):
    """Against mlx-lm alone."""

    max_batch_difference = 1e-3
    refusal = "cannot leave between them"

    @pytest.fixture(params=["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "gpt_neox"])
    def family(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def open_family(self, random_model: RandomModel) -> OpenFamily:
        return lambda family: _open(random_model(family))

    @pytest.fixture
    def logits_after_leaving(self, random_model: RandomModel) -> AfterLeaving:
        from mlx_lm import load

        def logits(family: str, token_ids: np.ndarray, stays: Sequence[int], left_at: int) -> np.ndarray:
            model: Any = load(str(random_model(family)))[0]
            layers = model.model.layers if "layers" in model.model else model.model.h
            layers[left_at:] = [Keeps(layer, stays) for layer in layers[left_at:]]
            return np.asarray(model(mx.array(token_ids[None]))[0, -1:])

        return logits

    def num_prompt_tokens(self, family: str) -> int:
        return 5 if family == "gemma2" else 9  # mlx-lm's Gemma 2 has no windows, and is served up to their length

    def check_layers(self, runner: Any, layers: Sequence[int]) -> None:
        takes_one = not runner.model.halves.can_batch  # then each is the first of its call
        assert list(layers) == ([1, 1, 1, 1] if takes_one else [1, 2, 3, 4])


def test_the_trial_finds_a_model_that_mixes_its_sequences(random_model: RandomModel) -> None:
    """Here the loop adds the mean over the batch between two layers; alone each sequence is right."""
    runner = _open(random_model("qwen3"))
    body = runner.model.halves.body
    own = type(body)

    class Mixing(own):  # type: ignore[misc, valid-type]
        def __call__(self, inputs: Any, cache: Any = None, *others: Any) -> Any:
            output = own.__call__(self, inputs, cache, *others)
            return output + 0.1 * (output.mean(axis=0, keepdims=True) - output)

    body.__class__ = Mixing
    with pytest.raises(ModelLoadError, match="cannot leave between them"):
        runner.use_exit_policy(LeaveAt((1,), 1))
    runner.close()


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


def test_a_runner_without_a_policy_says_nothing_of_layers(random_model: RandomModel) -> None:
    runner = _open(random_model("qwen3"))
    assert isinstance(runner, ExitingRunner)
    output = runner.forward([Span(runner.open_sequence(), 0, _TOKENS[:3], may_exit=True)])

    assert not isinstance(output, ExitOutput)
    runner.close()
