"""Every sampler, alone and together and in many orders, draws what a plain float64 reference says it should.

Seeds are fixed, so a test fails always or never. Real logits are those of SmolLM2 through llama.cpp.
"""

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings

from .drawing import count_draws, sampler_for
from .reference import chi_square_p, distribution, next_mu

LEAST_P = 1e-4
TEXTS = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLM:")
VOCAB_SIZE = len(TEXTS)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 39, 7, 8, 2, 6]
ANSWER = [3, 1, 4, 1, 5, 30, 3, 1, 4]
"""Prompt and answer repeat themselves: 1 and, after a shorter repetition, 2 would go on with something."""

ALONE = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.08},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.7},
    {"typical_p": 0.6},
    {"typical_p": 0.95},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.4, "xtc_threshold": 0.08},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"dynatemp_range": 0.9, "dynatemp_exponent": 0.5},
    {"dynatemp_range": 1.5, "dynatemp_exponent": 2.0, "temperature": 1.2},
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 0.5, "dry_base": 1.2, "dry_allowed_length": 1, "dry_penalty_last_n": 12},
    {"dry_multiplier": 0.7, "dry_sequence_breakers": ["e", "x"]},
    {"mirostat": 2, "mirostat_tau": 1.6},
    {"mirostat": 2, "mirostat_tau": 0.7},
    {"mirostat": 1, "mirostat_tau": 1.6},
    {"adaptive_target": 0.2},
    {"adaptive_target": 0.0, "adaptive_decay": 0.5},
]
TOGETHER = [
    ({"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}, None),
    ({"temperature": 1.3, "top_k": 12, "typical_p": 0.8, "top_p": 0.95}, None),
    ({"temperature": 1.4, "min_p": 0.03, "xtc_probability": 0.5, "xtc_threshold": 0.05}, None),
    ({"temperature": 0.9, "repetition_penalty": 1.2, "dry_multiplier": 0.6, "top_n_sigma": 1.4}, None),
    ({"dynatemp_range": 0.8, "top_k": 15, "xtc_probability": 0.7}, None),
    ({"dry_multiplier": 0.4, "presence_penalty": 0.5, "temperature": 0.7, "mirostat": 2, "mirostat_tau": 1.2}, None),
    ({"mirostat": 1, "mirostat_tau": 1.1, "temperature": 1.2}, None),
    ({"adaptive_target": 0.4, "min_p": 0.05, "temperature": 0.8}, None),
    ({"adaptive_target": 0.1, "top_k": 8, "temperature": 1.3}, ("top_k", "adaptive_p", "temperature")),
    ({"top_k": 10, "top_p": 0.7, "temperature": 2.0}, ("top_k", "top_p", "temperature")),
    ({"top_k": 10, "top_p": 0.7, "temperature": 2.0}, ("top_p", "temperature", "top_k")),
    (
        {"top_k": 25, "typical_p": 0.7, "top_p": 0.9, "min_p": 0.02, "xtc_probability": 0.5, "temperature": 1.5},
        ("penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"),
    ),
    (
        {"top_k": 9, "dry_multiplier": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.7},
        ("top_k", "temperature", "dry", "penalties"),
    ),
    ({"dynatemp_range": 0.7, "top_k": 8, "min_p": 0.05}, ("top_k", "temperature", "min_p")),
    ({"xtc_probability": 0.6, "xtc_threshold": 0.1, "top_p": 0.9}, ("xtc", "top_p")),
    ({"typical_p": 0.5, "temperature": 0.6, "top_k": 30}, ("typical_p", "temperature")),
]
EVERYTHING = [*((fields, None) for fields in ALONE), *TOGETHER]


@pytest.fixture(scope="module")
def samplers():
    return PluginRegistry.load(PluginsSettings(allow=("samplers",))).samplers


def row_of(seed):
    """A random row in which what DRY and the penalties are about is likely, and one token is impossible."""
    row = np.random.default_rng(seed).normal(0, 2, VOCAB_SIZE).astype(np.float32)
    row[[1, 5, 9, 30]] = np.float32([4.4, 3.9, 4.2, 4.6])
    row[10 + seed] = -np.inf
    return row


def expected_of(row, fields, **context):
    """The distribution over positions: XTC acts at its share of them."""
    share = fields.get("xtc_probability", 0.0)
    acting = distribution(row, fields, acts=True, **context)
    return share * acting + (1 - share) * distribution(row, fields, acts=False, **context)


def check(counts, expected):
    assert counts[expected == 0].sum() == 0
    assert chi_square_p(counts, expected) > LEAST_P


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("fields", "order"), EVERYTHING, ids=str)
def test_draws_are_distributed_as_the_reference_says(samplers, fields, order, seed):
    row = row_of(seed)
    context = {"prompt": PROMPT, "answer": ANSWER, "token_texts": TEXTS, "order": order}
    sampler = sampler_for(fields, samplers, vocab_size=VOCAB_SIZE, seed=seed, **context)

    check(count_draws(sampler, row, 2000), expected_of(row, fields, **context))


@pytest.mark.parametrize(
    ("drawn", "claimed"),
    [
        ({"temperature": 1.0}, {"temperature": 1.15}),
        ({"xtc_probability": 0.4, "xtc_threshold": 0.05}, {"xtc_probability": 0.55, "xtc_threshold": 0.05}),
        ({"dry_multiplier": 0.8}, {}),
        ({"dry_multiplier": 0.8}, {"dry_multiplier": 0.8, "dry_allowed_length": 3}),
        ({"dynatemp_range": 0.9, "dynatemp_exponent": 0.5}, {}),
        ({"mirostat": 2, "mirostat_tau": 1.6}, {"mirostat": 2, "mirostat_tau": 0.8}),
        ({"mirostat": 1, "mirostat_tau": 1.6}, {"mirostat": 2, "mirostat_tau": 1.6}),
        ({"adaptive_target": 0.2}, {"adaptive_target": 0.3}),
        ({"typical_p": 0.9}, {"typical_p": 0.7}),
        ({"top_n_sigma": 1.4}, {"top_n_sigma": 1.0}),
    ],
    ids=str,
)
def test_comparison_distinguishes_different_requests(samplers, drawn, claimed):
    """Else the tests above could not fail."""
    row = row_of(1)
    context = {"prompt": PROMPT, "answer": ANSWER, "token_texts": TEXTS}
    counts = count_draws(sampler_for(drawn, samplers, vocab_size=VOCAB_SIZE, seed=1, **context), row, 3000)
    with pytest.raises(AssertionError):
        check(counts, expected_of(row, claimed, **context))


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.4},
        {"mirostat": 2, "mirostat_tau": 1.0, "mirostat_eta": 1.0, "temperature": 1.5, "dry_multiplier": 0.5},
        {"mirostat": 1, "mirostat_tau": 1.5, "mirostat_eta": 0.4, "temperature": 1.2},
        {"dry_multiplier": 1.0, "dry_allowed_length": 1, "repetition_penalty": 1.1},
        {"dynatemp_range": 0.6, "presence_penalty": 0.4, "top_k": 12},
    ],
    ids=str,
)
def test_whole_texts_are_distributed_as_the_reference_says(samplers, fields):
    """Each token at its place in the reference's running sum, which is uniform when all of them are right."""
    rows = np.random.default_rng(5).normal(0, 1.5, (8, VOCAB_SIZE)).astype(np.float32)
    jitter = np.random.default_rng(6)
    places = []
    for seed in range(120):
        sampler = sampler_for(fields, samplers, vocab_size=VOCAB_SIZE, prompt=PROMPT, token_texts=TEXTS, seed=seed)
        answer, mu = [], None
        for position, row in enumerate(rows):
            expected = distribution(row, fields, prompt=PROMPT, answer=answer, token_texts=TEXTS, mu=mu)
            token_id = sampler.sample(row.copy(), position).token_id
            assert expected[token_id] > 0
            places.append(expected[:token_id].sum() + jitter.random() * expected[token_id])
            if "mirostat" in fields:
                mu = next_mu(mu, expected[token_id], fields)
            sampler.accept(token_id)
            answer.append(token_id)

    assert chi_square_p(np.histogram(places, bins=20, range=(0, 1))[0], np.full(20, 0.05)) > LEAST_P


@pytest.fixture(scope="module")
def real_row(smollm2_gguf):
    """Logits that SmolLM2 gives after a text which repeats itself, the text's ids, and the texts of all tokens."""
    from enginehouse_llamacpp.backend import LlamaCppBackend
    from enginehouse_llamacpp.options import LlamaCppOptions

    options = LlamaCppOptions(context=256, slots=1, threads=1)
    runner = LlamaCppBackend().open(ModelSource(str(smollm2_gguf), smollm2_gguf), options, lambda _share, _what: None)
    token_ids = runner.tokenizer.encode("One small step for a man, one small step for a dog, one small step", False)
    rows = runner.forward([Span(runner.open_sequence(), 0, np.array(token_ids, np.int32))]).host()
    row = rows[0].copy()
    texts = tuple(token.decode(errors="replace") for token in runner.tokenizer.token_bytes)
    runner.close()
    return row, token_ids, texts


@pytest.mark.llamacpp
@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({"temperature": 1.4}, None),
        ({"typical_p": 0.8, "temperature": 1.3}, None),
        ({"top_n_sigma": 1.5, "temperature": 3.0}, None),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.02, "temperature": 1.5}, None),
        ({"dry_multiplier": 0.9, "temperature": 1.2}, None),
        ({"dynatemp_range": 0.9, "temperature": 1.1}, None),
        ({"mirostat": 2, "mirostat_tau": 3.0, "temperature": 1.6}, None),
        (
            {"dry_multiplier": 0.3, "top_k": 60, "typical_p": 0.9, "min_p": 0.001, "temperature": 2.0},
            ("dry", "top_k", "typical_p", "min_p", "temperature"),
        ),
    ],
    ids=str,
)
def test_draws_from_real_logits_are_distributed_as_the_reference_says(samplers, real_row, fields, order):
    row, prompt, texts = real_row
    context = {"prompt": prompt, "token_texts": texts, "order": order}
    sampler = sampler_for(fields, samplers, vocab_size=row.size, seed=3, **context)

    check(count_draws(sampler, row, 500), expected_of(row, fields, **context))
