"""The three samplers, found through their hook and used through core."""

import numpy as np
import pytest

from enginehouse.config import PluginsSettings
from enginehouse.engine.sampling import SequenceSampler, build_steps
from enginehouse.plugins import PluginRegistry
from enginehouse.sampler import SamplerPlugin
from enginehouse.types import SamplingParams

VOCAB_SIZE = 3000
ROW = np.random.default_rng(0).normal(0, 2, VOCAB_SIZE).astype(np.float32)


@pytest.fixture(scope="module")
def samplers():
    return PluginRegistry.load(PluginsSettings(allow=("samplers",))).samplers


def test_hook_register_samplers_hands_over_three(samplers):
    assert set(samplers) == {"typical_p", "top_n_sigma", "xtc"}
    assert all(isinstance(sampler, SamplerPlugin) for sampler in samplers.values())


def draw(samplers, extensions, position=0, **params):
    params = SamplingParams(extensions=extensions, seed=3, **params)
    sampler = SequenceSampler(params, choice=0, vocab_size=VOCAB_SIZE, steps=build_steps(params, samplers))
    return sampler.sample(ROW.copy(), position).token_id


def test_fields_at_their_defaults_change_nothing(samplers):
    off = {"typical_p": {"typical_p": 1.0}, "top_n_sigma": {"top_n_sigma": -1.0}, "xtc": {"xtc_threshold": 0.2}}

    for position in range(50):
        assert draw(samplers, off, position) == draw(samplers, {}, position)


def test_top_n_sigma_bounds_what_is_drawn(samplers):
    drawn = {draw(samplers, {"top_n_sigma": {"top_n_sigma": 1}}, position, temperature=5.0) for position in range(200)}

    assert len(drawn) > 20
    assert ROW[list(drawn)].min() >= ROW.max() - ROW.std()


def test_xtc_excludes_the_top_choices_of_top_k(samplers):
    """At temperature 5 each of ten candidates has a probability of about 0.1."""
    xtc = {"xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.05}}
    best = np.argsort(-ROW)[:10]

    assert {draw(samplers, xtc, position, temperature=5.0, top_k=10) for position in range(100)} == {best[-1]}
    assert len({draw(samplers, {}, position, temperature=5.0, top_k=10) for position in range(100)}) == 10


def test_xtc_acts_on_its_share_of_positions_and_can_be_replayed(samplers):
    xtc = {"xtc": {"xtc_probability": 0.3, "xtc_threshold": 0.01}}
    drawn = [draw(samplers, xtc, position, temperature=0.5, top_k=2) for position in range(1000)]
    second = int(np.argsort(-ROW)[1])
    share = np.exp(2 * ROW[second]) / (np.exp(2 * ROW[second]) + np.exp(2 * ROW.max()))
    expected = 0.3 + 0.7 * share

    assert abs(drawn.count(second) / 1000 - expected) < 4 * np.sqrt(expected * (1 - expected) / 1000)
    assert drawn == [draw(samplers, xtc, position, temperature=0.5, top_k=2) for position in range(1000)]


def test_typical_sees_the_whole_row(samplers):
    """Of a flat row it keeps about the share of tokens that it is told to keep."""
    drawn = {draw(samplers, {"typical_p": {"typical_p": 0.2}}, position, temperature=100.0) for position in range(400)}
    scaled = ROW / 100
    probabilities = np.exp(scaled) / np.exp(scaled).sum()
    entropy = -(probabilities * np.log(probabilities)).sum()
    distance = np.abs(-np.log(probabilities) - entropy)

    assert distance[list(drawn)].max() <= np.quantile(distance, 0.21)
    assert len(drawn) > 250
