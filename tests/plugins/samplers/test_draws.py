"""Token by token the draw is the one that the reference says, for any fields in any order.

Stricter than the comparison of distributions: the number that a draw depends on is known, so there is one right token.
"""

import itertools

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from enginehouse.engine.sampling.candidates import uniform
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings

from .drawing import sampler_for
from .reference import OWN_ORDER, distribution, next_mu

TEXTS = tuple("abcdefghijklmnopqrstuvwxyz0123456789\n:")
VOCAB_SIZE = len(TEXTS)
SAMPLERS = PluginRegistry.load(PluginsSettings(allow=("samplers",))).samplers
_UNDECIDED = 2e-5  # float32 logits may draw a border this much elsewhere

truncations = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.sampled_from([1, 5, 20]),
        "top_p": st.sampled_from([0.35, 0.8, 0.97]),
        "min_p": st.sampled_from([0.013, 0.11, 0.6]),
        "typical_p": st.sampled_from([0.23, 0.71, 0.98]),
        "top_n_sigma": st.sampled_from([0.31, 1.13, 2.9]),
        "xtc_threshold": st.sampled_from([0.013, 0.087, 0.37]),
        "xtc_probability": st.sampled_from([0.5, 1.0]),
    },
)
mirostats = st.fixed_dictionaries(
    {"mirostat": st.just(2)},
    optional={"mirostat_tau": st.sampled_from([0.4, 1.7, 3.3]), "mirostat_eta": st.sampled_from([0.05, 0.9])},
)
others = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.35, 0.9, 1.8]),
        "dynatemp_range": st.sampled_from([0.3, 1.2]),
        "dynatemp_exponent": st.sampled_from([0.6, 2.0]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-0.7, 0.9]),
        "frequency_penalty": st.sampled_from([-0.2, 0.6]),
        "dry_multiplier": st.sampled_from([0.4, 2.5]),
        "dry_base": st.sampled_from([1.0, 2.1]),
        "dry_allowed_length": st.sampled_from([0, 1, 3]),
        "dry_penalty_last_n": st.sampled_from([-1, 9]),
        "dry_sequence_breakers": st.sampled_from([[], ["a", "\n"], ["b"]]),
    },
)
fields_of_requests = st.builds(lambda some, more: {**some, **more}, st.one_of(truncations, mirostats), others)
orders = st.one_of(st.none(), st.permutations(OWN_ORDER))
texts = st.lists(st.integers(0, 5), max_size=14)  # the likeliest tokens, few, so that they repeat themselves


def drawn(expected, number):
    """The token at which the running sum passes ``number``, most probable first; None when that is too close."""
    ids = sorted(range(len(expected)), key=lambda token_id: (-expected[token_id], token_id))
    sums = list(itertools.accumulate(expected[token_id] for token_id in ids))
    if any(abs(total - number) < _UNDECIDED for total in sums[:-1]):
        return None
    return next(token_id for token_id, total in zip(ids, sums, strict=True) if total > number or total == sums[-1])


@settings(max_examples=300, deadline=None)
@given(fields_of_requests, orders, st.integers(0, 2**32), texts, texts)
def test_each_draw_is_the_references(fields, order, seed, prompt, answer):
    """Over some positions of one text, in which each token is accepted before the next one is drawn."""
    rows = np.random.default_rng(seed).normal(0, 2, (6, VOCAB_SIZE)).astype(np.float32)
    rows[:, 7] = -np.inf
    rows[:, :6] += np.float32(4)
    context = {"prompt": prompt, "token_texts": TEXTS}
    sampler = sampler_for(
        fields, SAMPLERS, vocab_size=VOCAB_SIZE, answer=answer, order=order and tuple(order), seed=seed, **context
    )
    answer, mu, num_compared = list(answer), None, 0
    for position, row in enumerate(rows):
        acts = uniform(seed, 0, position, "xtc:act") < fields.get("xtc_probability", 0)
        expected = distribution(row, fields, order=order, answer=answer, mu=mu, acts=acts, **context)
        token_id = sampler.sample(row.copy(), position).token_id
        wanted = drawn(expected, uniform(seed, 0, position))
        if wanted is None:
            break  # Mirostat would go on from another state
        assert token_id == wanted
        if "mirostat" in fields:
            mu = next_mu(mu, expected[token_id], fields)
        sampler.accept(token_id)
        answer.append(token_id)
        num_compared += 1
    assume(num_compared)
