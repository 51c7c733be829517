"""Workload of a benchmark: prompts, answer lengths, and due times. Deterministic for a given seed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from attrs import field, frozen
from attrs.validators import ge, gt, optional

__all__ = ["Lengths", "Planned", "Workload", "parse_lengths"]

# fmt: off
_WORDS = (
    "river", "stone", "cloud", "engine", "paper", "window", "garden", "music", "travel", "silver", "bridge",
    "planet", "coffee", "winter", "orange", "market", "village", "doctor", "science", "ocean",
)
# fmt: on
_MAX_LENGTH = 1_000_000


@frozen
class Lengths:
    """A distribution of integers: uniform from ``low`` to ``high``, or normal within these bounds."""

    low: int = field(validator=[ge(1)])
    high: int
    mean: float | None = None
    deviation: float = 0.0

    def __str__(self) -> str:
        """Format for :func:`parse_lengths`."""
        if self.mean is not None:
            return f"normal:{self.mean:g}:{self.deviation:g}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, source: random.Random) -> int:
        """Draw a value."""
        if self.mean is None:
            return source.randint(self.low, self.high)
        return min(self.high, max(self.low, round(source.gauss(self.mean, self.deviation))))


def parse_lengths(text: str) -> Lengths:
    """Parse ``128`` (constant), ``64-512`` (uniform), or ``normal:256:64`` (mean, deviation).

    Raises:
        ValueError: it is none of these.
    """
    if found := re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text):
        low, high = int(found[1]), int(found[2] or found[1])
        if 1 <= low <= high <= _MAX_LENGTH:
            return Lengths(low, high)
    if found := re.fullmatch(r"normal:(\d{1,7}):(\d{1,7})", text):
        mean, deviation = int(found[1]), int(found[2])
        if 1 <= mean <= _MAX_LENGTH:
            return Lengths(1, min(_MAX_LENGTH, mean + 4 * deviation), float(mean), float(deviation))
    raise ValueError(f"{text!r} is not a length; write 128, 64-512 or normal:256:64")


@frozen
class Planned:
    """One request: its due time, in seconds from the start, and its content."""

    number: int
    due_s: float
    prompt: str
    max_tokens: int


@frozen(kw_only=True)
class Workload:
    """Parameters of a workload.

    Attributes:
        num_requests: total number of requests.
        prompt_words: words of each prompt; most tokenizers make one token of each.
        output_tokens: length of each answer.
        shared_words: words that all prompts begin with.
        rate: requests per second on average, at random times (Poisson); None: each client sends its next request when
            its last one is answered.
        seed: seed of prompts, lengths and times.
    """

    num_requests: int = field(validator=gt(0))
    prompt_words: Lengths
    output_tokens: Lengths
    shared_words: int = field(default=0, validator=ge(0))
    rate: float | None = field(default=None, validator=optional(gt(0)))
    seed: int = 0

    def requests(self) -> Iterator[Planned]:
        """Yield all requests in order; prompts differ from their first unshared word on."""
        source = random.Random(self.seed)
        shared = " ".join(random.Random(-1).choices(_WORDS, k=self.shared_words))
        due_s = 0.0
        for number in range(self.num_requests):
            words = source.choices(_WORDS, k=self.prompt_words.draw(source))
            begin = f"{shared} " if shared else ""
            prompt = f"{begin}{source.randrange(10**9)} {' '.join(words)}"
            yield Planned(number, due_s, prompt, self.output_tokens.draw(source))
            if self.rate is not None:
                due_s += source.expovariate(self.rate)
