"""A slow, plain sampler in float64, written from the definitions, that the real one is compared with.

Knows nothing of the engine: a request is a dictionary of its fields, a distribution is a probability per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import frozen

OWN_ORDER = (
    "penalties",
    "dry",
    "temperature",
    "top_k",
    "typical_p",
    "top_p",
    "min_p",
    "xtc",
    "top_n_sigma",
    "mirostat",
    "adaptive_p",
)
"""The steps in their own order, as the documents have it."""


class Distribution:
    """Tokens in play, and the logits of all tokens after what has happened so far."""

    def __init__(self, row):
        self.row = np.array(row, np.float64)
        self.alive = [token_id for token_id in range(len(self.row)) if self.row[token_id] > -math.inf]

    @property
    def ordered(self):
        """Ids in play, most probable first, ties by id."""
        return sorted(self.alive, key=lambda token_id: (-self.row[token_id], token_id))

    def probabilities(self):
        """Of the ordered ids."""
        logits = self.row[self.ordered]
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    def keep(self, ids):
        self.alive = list(ids)

    def scale(self, temperature):
        """Later penalties count from the scaled logits."""
        self.row = self.row / temperature


@frozen(kw_only=True)
class Context:
    """What steps look at besides the logits.

    Attributes:
        mu: Mirostat's state; None is its beginning.
        acts: whether XTC does something at this position.
    """

    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    token_texts: Sequence[str] = ()
    mu: float | None = None
    acts: bool = False


def distribution(row, fields, *, order=None, **context):
    """(vocab_size,) float64 probabilities of the next token.

    Args:
        fields: the request's.
        order: names of the steps.
        context: see :class:`Context`.
    """
    left = Distribution(row)
    for step in sorted(order or OWN_ORDER, key="adaptive_p".__eq__):  # always last
        _STEPS[step](left, fields, Context(**context))
    result = np.zeros(len(left.row))
    result[left.ordered] = left.probabilities()
    return result


def _penalties(left, fields, context):
    prompt, answer = list(context.prompt), list(context.answer)
    factor = fields.get("repetition_penalty", 1.0)
    for token_id in {*prompt, *answer}:
        logit = left.row[token_id]
        left.row[token_id] = logit / factor if logit > 0 else logit * factor
    for token_id in set(answer):
        left.row[token_id] -= fields.get("presence_penalty", 0.0)
        left.row[token_id] -= fields.get("frequency_penalty", 0.0) * answer.count(token_id)


def _dry(left, fields, context):
    multiplier = fields.get("dry_multiplier", 0.0)
    if not multiplier:
        return
    base, allowed = fields.get("dry_base", 1.75), fields.get("dry_allowed_length", 2)
    breakers = fields.get("dry_sequence_breakers", ["\n", ":", '"', "*"])
    tokens = [*context.prompt, *context.answer]
    last_n = fields.get("dry_penalty_last_n", -1)
    tokens = tokens if last_n < 0 else tokens[-last_n:]

    def breaks(token_id):
        return any(breaker in context.token_texts[token_id] for breaker in breakers)

    longest: dict[int, int] = {}
    for place in range(1, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            if breaks(tokens[len(tokens) - 1 - length]):
                break
            length += 1
        longest[tokens[place]] = max(longest.get(tokens[place], 0), length)
    for token_id, length in longest.items():
        if length >= max(1, allowed) and not breaks(token_id):
            left.row[token_id] -= multiplier * base ** (length - allowed)


def _temperature(left, fields, _):
    temperature = fields.get("temperature", 1.0)
    span = fields.get("dynatemp_range", 0.0)
    if span and len(left.alive) > 1:
        probabilities = left.probabilities()
        entropy = -sum(p * math.log(p) for p in probabilities if p)
        share = (entropy / math.log(len(left.alive))) ** fields.get("dynatemp_exponent", 1.0)
        low, high = max(0.0, temperature - span), temperature + span
        temperature = low + (high - low) * share
    left.scale(temperature)


def _top_k(left, fields, _):
    left.keep(left.ordered[: fields.get("top_k", 0) or None])


def _smallest_set(ids: Sequence[int], probabilities: Sequence[float], mass: float) -> list[int]:
    kept: list[int] = []
    reached = 0.0
    for token_id, probability in zip(ids, probabilities, strict=True):
        kept.append(token_id)
        reached += probability
        if reached >= mass:
            break
    return kept


def _typical_p(left, fields, _):
    mass = fields.get("typical_p", 1.0)
    if mass == 1.0:
        return
    probabilities = left.probabilities()
    entropy = -sum(p * math.log(p) for p in probabilities if p)
    distances = [abs(-math.log(p) - entropy) if p else math.inf for p in probabilities]
    typical = sorted(range(len(distances)), key=lambda place: (distances[place], place))
    ids = left.ordered
    left.keep(_smallest_set([ids[place] for place in typical], probabilities[typical], mass))


def _top_p(left, fields, _):
    if fields.get("top_p", 1.0) < 1.0:
        left.keep(_smallest_set(left.ordered, left.probabilities(), fields["top_p"]))


def _min_p(left, fields, _):
    probabilities = left.probabilities()
    floor = fields.get("min_p", 0.0) * probabilities[0]
    left.keep(token_id for token_id, p in zip(left.ordered, probabilities, strict=True) if p >= floor)


def _xtc(left, fields, context):
    if not fields.get("xtc_probability") or not context.acts:
        return
    likely = int((left.probabilities() >= fields.get("xtc_threshold", 0.1)).sum())
    left.keep(left.ordered[max(likely - 1, 0) :])


def _top_n_sigma(left, fields, _):
    num_sigmas = fields.get("top_n_sigma", 0.0)
    if num_sigmas <= 0:
        return
    possible = left.row[left.row > -math.inf]
    floor = possible.max() - num_sigmas * possible.std()
    left.keep([token_id for token_id in left.ordered if left.row[token_id] >= floor] or left.ordered[:1])


def _mirostat(left, fields, context):
    if not fields.get("mirostat"):
        return
    mu = 2 * fields.get("mirostat_tau", 5.0) if context.mu is None else context.mu
    if fields["mirostat"] == 1:
        left.keep(left.ordered[: max(1, int(_zipf_count(left, mu)))])
        return
    surprises = [-math.log2(p) if p else math.inf for p in left.probabilities()]
    left.keep([token_id for token_id, s in zip(left.ordered, surprises, strict=True) if s <= mu] or left.ordered[:1])


def _zipf_count(left, mu):
    """The number of tokens that the paper's equations give for a surprise of mu."""
    probabilities = left.probabilities()[:100]
    steps = range(len(probabilities) - 1)
    t = [math.log((i + 2) / (i + 1)) for i in steps]
    b = [math.log(probabilities[i] / probabilities[i + 1]) for i in steps]
    s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    epsilon = s - 1
    return (epsilon * 2**mu / (1 - len(left.row) ** -epsilon)) ** (1 / s)


def _adaptive_p(left, fields, _):
    """The first token: its target is the request's."""
    target = fields.get("adaptive_target", -1.0)
    if target < 0:
        return
    distances = np.abs(left.probabilities() - target) / 0.3
    left.row[left.ordered] = 5 - 10 * distances**2 / (1 + distances)


def next_mu(mu, probability, fields):
    """Mirostat's state after a token that was drawn with ``probability``."""
    tau = fields.get("mirostat_tau", 5.0)
    mu = 2 * tau if mu is None else mu
    return mu - fields.get("mirostat_eta", 0.1) * (-math.log2(probability) - tau)


_STEPS = {
    "penalties": _penalties,
    "dry": _dry,
    "temperature": _temperature,
    "top_k": _top_k,
    "typical_p": _typical_p,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc": _xtc,
    "top_n_sigma": _top_n_sigma,
    "mirostat": _mirostat,
    "adaptive_p": _adaptive_p,
}


def chi_square_p(counts, probabilities):
    """How probable it is that counts of these probabilities differ from them at least as much as ``counts`` do.

    Cells that expect fewer than five are put together. The tail is Wilson and Hilferty's approximation.
    """
    counts, expected = np.asarray(counts, np.float64), np.asarray(probabilities, np.float64) * np.sum(counts)
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom == 0:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2
