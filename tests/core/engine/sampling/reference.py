"""A slow, plain sampler in float64 that sorts everything; what the fast one must agree with."""

import math

import numpy as np

from enginehouse.engine.sampling.candidates import uniform


def changed_logits(row, params, prompt, answer):
    """Logits after bias and penalties, one token at a time, as Python floats."""
    logits = [float(value) for value in row]
    forced = [token_id for token_id, value in params.logit_bias.items() if value >= 100]
    for token_id, value in params.logit_bias.items():
        logits[token_id] = -math.inf if value <= -100 else logits[token_id] + value
    if forced:
        logits = [logit if token_id in forced else -math.inf for token_id, logit in enumerate(logits)]
    if params.repeat_last_n >= 0:
        last = [*((one, True) for one in prompt), *((one, False) for one in answer)]
        last = last[max(0, len(last) - params.repeat_last_n) :]
        prompt, answer = ([one for one, is_prompt in last if is_prompt is wanted] for wanted in (True, False))
    for token_id in {*prompt, *answer}:
        logit = logits[token_id]
        logits[token_id] = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
    for token_id in set(answer):
        logits[token_id] -= params.presence_penalty + params.frequency_penalty * answer.count(token_id)
    return logits


def ordered(logits):
    """Ids of the tokens that can be drawn, by logit descending, then id."""
    ids = [token_id for token_id, logit in enumerate(logits) if logit > -math.inf]
    return sorted(ids, key=lambda token_id: (-logits[token_id], token_id))


def distribution(logits, params):
    """Ids in order and their probabilities after temperature, top-k, top-p and min-p."""
    ids = ordered(logits)
    scaled = np.array([logits[token_id] for token_id in ids], np.float64)
    weights = np.exp((scaled - scaled[0]) / params.temperature)
    if params.top_k:
        weights = weights[: params.top_k]
    if params.top_p < 1:
        sums = np.cumsum(weights)
        weights = weights[: int(np.searchsorted(sums, params.top_p * sums[-1])) + 1]
    if params.min_p:
        weights = weights[weights >= params.min_p * weights[0]]
    return ids[: len(weights)], weights / weights.sum()


def draw(logits, params, choice, position):
    """The token that the specification asks for."""
    if params.temperature == 0:
        return ordered(logits)[0]
    ids, probabilities = distribution(logits, params)
    passed = np.cumsum(probabilities) > uniform(params.seed, choice, position)
    return ids[int(np.argmax(passed)) if passed.any() else -1]


def chi_square_z(counts, probabilities):
    """How many standard deviations the counts are from the probabilities (Wilson and Hilferty's approximation).

    Cells that expect fewer than five are put together.
    """
    expected = np.asarray(probabilities) * np.sum(counts)
    small = expected < 5
    observed = np.append(np.asarray(counts)[~small], np.asarray(counts)[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
