"""The policies keep the contract, and measure what they say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import pytest

from enginehouse.contract.errors import ConfigError, ModelLoadError
from enginehouse.contract.exit_policy import ExitContext, ExitPolicy
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings, structure_options
from enginehouse_early_exit.policies import (
    EntropyPolicy,
    MarginPolicy,
    SaturationPolicy,
    entropy,
    margin,
    saturation,
)
from enginehouse_testkit.exit_policy_contract import ExitPolicyContract

POLICIES: list[Any] = [MarginPolicy(), EntropyPolicy(), SaturationPolicy()]
CONTEXT = ExitContext(30, tuple(range(1, 30)))
RNG = np.random.default_rng(11)


class TestMargin(ExitPolicyContract):
    light_packages = frozenset({"numpy", "array_api_compat"})
    policy_options = {"threshold": 0.4, "every": 1}

    @pytest.fixture(scope="class")
    @classmethod
    def exit_policy(cls) -> ExitPolicy:
        return MarginPolicy()


class TestEntropy(ExitPolicyContract):
    light_packages = frozenset({"numpy", "array_api_compat"})
    policy_options = {"threshold": 1.5, "min_layer": 2, "every": 2}

    @pytest.fixture(scope="class")
    @classmethod
    def exit_policy(cls) -> ExitPolicy:
        return EntropyPolicy()


class TestSaturation(ExitPolicyContract):
    light_packages = frozenset({"numpy", "array_api_compat"})
    policy_options = {"threshold": 0.9, "every": 1}

    @pytest.fixture(scope="class")
    @classmethod
    def exit_policy(cls) -> ExitPolicy:
        return SaturationPolicy()


def test_the_plugin_registers_its_policies() -> None:
    registry = PluginRegistry.load(PluginsSettings())

    assert list(registry.exit_policies) == ["margin", "entropy", "saturation"]


def probabilities(logits: np.ndarray) -> np.ndarray:
    """The softmax in float64, the plain way."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    result: np.ndarray = weights / weights.sum(axis=1, keepdims=True)
    return result


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0, 60.0])
def test_margin_and_entropy_are_those_of_the_softmax(scale: float) -> None:
    logits = (RNG.standard_normal((50, 200)) * scale).astype(np.float32)
    shares = probabilities(logits)
    ordered = np.sort(shares, axis=1)

    assert np.allclose(margin(logits), ordered[:, -1] - ordered[:, -2], atol=1e-5)
    assert np.allclose(entropy(logits), -(shares * np.log(np.maximum(shares, 1e-300))).sum(axis=1), atol=1e-4)


def test_measures_stay_in_their_ranges() -> None:
    """Also for logits that are far apart, or -inf."""
    for scale in (0.0, 1.0, 1e4, 1e30):
        logits = (RNG.standard_normal((20, 64)) * scale).astype(np.float32)
        logits[:, 5:9] = -np.inf
        states = (RNG.standard_normal((20, 16)) * min(scale, 1e4)).astype(np.float32)

        assert ((margin(logits) >= 0) & (margin(logits) <= 1)).all()
        assert ((entropy(logits) >= 0) & (entropy(logits) <= np.log(64) + 1e-5)).all()
        assert (np.abs(saturation(states, states[::-1])) <= 1 + 1e-5).all()


def test_measures_do_not_change_with_what_softmax_and_cosine_ignore() -> None:
    logits = RNG.standard_normal((20, 64)).astype(np.float32)
    states, others = RNG.standard_normal((2, 20, 16)).astype(np.float32)

    assert np.allclose(margin(logits + np.float32(50)), margin(logits), atol=1e-4)
    assert np.allclose(entropy(logits + np.float32(50)), entropy(logits), atol=1e-4)
    assert np.allclose(saturation(3 * states, others), saturation(states, others), atol=1e-5)
    assert np.allclose(saturation(states, states), 1.0, atol=1e-5)


class View:
    """Random states and logits of many tokens."""

    layer = 20
    hidden = RNG.standard_normal((200, 16)).astype(np.float32)
    previous_hidden = hidden + RNG.standard_normal((200, 16)).astype(np.float32) / 3
    rows = (RNG.standard_normal((200, 64)) * RNG.uniform(0, 8, (200, 1))).astype(np.float32)

    def logits(self) -> np.ndarray:
        return self.rows


@pytest.mark.parametrize(
    ("policy", "from_loose_to_strict"),
    [
        (MarginPolicy(), [0.0, 0.2, 0.5, 0.8, 1.0]),
        (EntropyPolicy(), [9.0, 2.0, 1.0, 0.3, 0.0]),
        (SaturationPolicy(), [0.1, 0.8, 0.93, 0.96, 1.0]),
    ],
)
def test_a_stricter_threshold_lets_fewer_leave(policy: Any, from_loose_to_strict: list[float]) -> None:
    """And never one that a looser one keeps."""
    masks = [
        policy.bind(CONTEXT, policy.options(threshold=threshold)).leaves(View()) for threshold in from_loose_to_strict
    ]

    assert masks[0].all()
    assert 0 < masks[2].sum() < 200
    for looser, stricter in pairwise(masks):
        assert not (stricter & ~looser).any()


@attrs.frozen(eq=False)
class GivenView:
    """Arrays of any library."""

    hidden: Any
    previous_hidden: Any
    rows: Any
    layer: int = 4

    def logits(self) -> Any:
        return self.rows


def on_torch(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array).to("cuda:0" if torch.cuda.is_available() else "cpu")


def on_mlx(array: np.ndarray) -> Any:
    return pytest.importorskip("mlx.core").array(array)


@pytest.mark.parametrize(
    "convert", [pytest.param(on_torch, marks=pytest.mark.hf), pytest.param(on_mlx, marks=pytest.mark.mlx)]
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_policies_decide_on_arrays_of_other_libraries_as_on_numpys(
    num_rows: int, convert: Callable[[np.ndarray], Any]
) -> None:
    """Where the arrays are, if their library follows the standard; so is the answer, for which nothing waits."""
    rng = np.random.default_rng(num_rows)
    context = ExitContext(8, tuple(range(1, 8)))
    thresholds = {"margin": (0.1, 0.5), "entropy": (1.0, 3.0), "saturation": (0.01, 0.3)}
    for policy in POLICIES:
        for threshold in thresholds[policy.name]:
            bound = policy.bind(context, policy.options(threshold=threshold))
            for scale in (1.0, 4.0, 9.0):
                arrays = [
                    rng.standard_normal((num_rows, size), np.float32) * np.float32(scale) for size in (16, 16, 300)
                ]
                arrays[1] = arrays[0] + arrays[1] * np.float32(rng.uniform(0, 3))
                expected = bound.leaves(GivenView(*arrays))
                given = GivenView(*map(convert, arrays))
                found = bound.leaves(given)

                assert type(found) in (type(given.hidden), np.ndarray)
                assert getattr(found, "device", None) == getattr(given.hidden, "device", getattr(found, "device", None))
                assert str(found.dtype).rpartition(".")[2] == "bool"
                assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("policy", POLICIES, ids=[policy.name for policy in POLICIES])
def test_layers_begin_at_the_first_one_and_go_on_in_steps(policy: Any) -> None:
    def layers(**options: Any) -> tuple[int, ...]:
        bound: tuple[int, ...] = policy.bind(CONTEXT, policy.options(**options)).layers
        return bound

    assert layers() == (15, 19, 23, 27)
    assert layers(min_layer=26, every=1) == (26, 27, 28, 29)
    assert layers(min_layer=29) == (29,)
    assert policy.bind(ExitContext(2, (1,)), policy.options()).layers == (1,)
    with pytest.raises(ModelLoadError, match="of 30 layers, none from 30 on"):
        layers(min_layer=30)
    with pytest.raises(ModelLoadError):
        policy.bind(ExitContext(1, ()), policy.options())


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (MarginPolicy(), {"threshold": 1.5}),
        (EntropyPolicy(), {"threshold": -1}),
        (SaturationPolicy(), {"threshold": 0}),
        (MarginPolicy(), {"min_layer": 0}),
        (MarginPolicy(), {"every": 0}),
        (MarginPolicy(), {"treshold": 0.5}),
    ],
)
def test_wrong_settings_are_named(policy: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"models.m.exit_policy.{next(iter(options))}"):
        structure_options(policy.options, options, "models.m.exit_policy")
