"""The samplers, found through their hook and used through core; and the one that docs/plugin-fields.md shows."""

import re
from pathlib import Path

import attrs
import numpy as np
import pytest

from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.plugin_steps import build_steps
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings

VOCAB_SIZE = 3000
ROW = np.random.default_rng(0).normal(0, 2, VOCAB_SIZE).astype(np.float32)


@pytest.fixture(scope="module")
def samplers():
    return PluginRegistry.load(PluginsSettings(allow=("samplers",))).samplers


def test_hook_register_samplers_hands_over_all(samplers):
    assert set(samplers) == {"adaptive_p", "dry", "dynatemp", "mirostat", "top_n_sigma", "typical_p", "xtc"}
    assert all(isinstance(sampler, SamplerPlugin) for sampler in samplers.values())


def test_every_field_says_what_it_means(samplers):
    fields = [a for sampler in samplers.values() for a in attrs.fields(sampler.request_fields)]

    assert len(fields) == 16
    assert all(len(field.metadata["description"]) > 20 and field.validator is not None for field in fields)


def test_sampler_of_the_documents_works():
    page = (Path(__file__).parents[3] / "docs" / "plugin-fields.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class EvenSampler" in block]
    names = {"__name__": "documented"}
    exec(block, names)
    documented = {"even": names["EvenSampler"]()}

    assert isinstance(documented["even"], SamplerPlugin)
    drawn = {draw(documented, {"even": {"even_only": True}}, position, temperature=5.0) for position in range(50)}
    assert {token_id % 2 for token_id in drawn} == {0}
    assert draw(documented, {"even": {"even_only": False}}) == draw(documented, {})


def draw(samplers, extensions, position=0, **params):
    params = SamplingParams(extensions=extensions, seed=3, **params)
    sampler = SequenceSampler(params, choice=0, vocab_size=VOCAB_SIZE, steps=build_steps(params, samplers))
    return sampler.sample(ROW.copy(), position).token_id


def test_fields_at_their_defaults_change_nothing(samplers):
    off = {
        "typical_p": {"typical_p": 1.0},
        "top_n_sigma": {"top_n_sigma": -1.0},
        "xtc": {"xtc_threshold": 0.2},
        "dry": {"dry_multiplier": 0.0, "dry_base": 3.0},
        "dynatemp": {"dynatemp_range": 0.0},
        "mirostat": {"mirostat": 0, "mirostat_tau": 1.0},
        "adaptive_p": {"adaptive_target": -0.5, "adaptive_decay": 0.5},
    }

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
