"""Simulates many replicas behind one server: the real rule of prefix-aware routing against others.

``cd tests && python -m bench.routing`` prints the table of docs/performance.md. Time is simulated, so the figures do
not depend on the machine; no model and no server is involved. A replica computes one prompt at a time and decodes up to
``SLOTS`` sequences beside it at a constant pace; its prefix cache is an LRU list of blocks that drops the last blocks
of a prompt first. Requests arrive at random (Poisson) and have the prefix of a tenant and a question of their own.

Two kinds of traffic: ``TUNING``, all prefixes equally long, was used to find and change the rule; the published figures
are those of ``HELD_OUT``, which was not, with other random numbers and lengths.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import define, evolve, field, frozen

from enginehouse_backendkit.prefix_affinity import PrefixAffinity

__all__ = ["ROUTERS", "Outcome", "Workload", "simulate"]

BLOCK_TOKENS = 64
ANSWER_TOKENS = 200
CACHE_BLOCKS = 1600
"""A replica caches 102,400 tokens: 17 prefixes."""

PREFILL_TOKENS_PER_S = 8000.0
TOKEN_S = 0.025
SLOTS = 32


@frozen
class Traffic:
    """Random numbers and lengths of prompts, from the shortest to the longest, all equally frequent.

    Attributes:
        seed: of the random numbers.
        prefix_blocks, question_blocks: of a tenant's prefix and of a question.
    """

    seed: int
    prefix_blocks: tuple[int, int]
    question_blocks: tuple[int, int]


TUNING = Traffic(seed=1, prefix_blocks=(94, 94), question_blocks=(8, 8))
"""A prefix of 6,000 tokens, as in llm-d's published benchmark, and a question of 500."""

HELD_OUT = Traffic(seed=2026, prefix_blocks=(16, 144), question_blocks=(2, 24))
"""Prefixes of 1,024 to 9,216 tokens, questions of 128 to 1,536."""


@frozen
class Workload:
    """Requests to ``num_replicas``.

    Attributes:
        demand: tokens of all prefixes over the tokens that all replicas cache.
        rate: requests per second and replica.
        skew: exponent of the tenants' popularity (Zipf); 0 is uniform.
    """

    num_replicas: int
    demand: float
    rate: float = 3.0
    skew: float = 0.0
    requests_per_replica: int = 60
    traffic: Traffic = TUNING

    @property
    def num_tenants(self) -> int:
        """Number of prefixes."""
        mean_blocks = sum(self.traffic.prefix_blocks) / 2
        return max(1, round(self.demand * self.num_replicas * CACHE_BLOCKS / mean_blocks))


@frozen
class Outcome:
    """Result of a simulation.

    Attributes:
        mean_first_s, p90_first_s: time to the first token.
        tokens_per_s: generated tokens per second and replica, until the last answer.
        cached: share of the prompts' tokens that was cached.
        decision_us: median time of a decision of the router, on this machine.
    """

    mean_first_s: float
    p90_first_s: float
    tokens_per_s: float
    cached: float
    decision_us: float


class Router(Protocol):
    """Chooses a replica."""

    def choose(self, blocks: Sequence[int], loads: Sequence[float]) -> int:
        """Return the number of a replica; ``loads`` are its open requests."""


@define
class _RoundRobin:
    turns: itertools.count[int] = field(factory=itertools.count)

    def choose(self, blocks: Sequence[int], loads: Sequence[float]) -> int:
        return next(self.turns) % len(loads)


@define
class _PowerOfTwo:
    draws: random.Random = field(factory=lambda: random.Random(2))

    def choose(self, blocks: Sequence[int], loads: Sequence[float]) -> int:
        return min(self.draws.choices(range(len(loads)), k=2), key=loads.__getitem__)


@define
class _Ray:
    """Ray Serve's ``PrefixCacheAffinityRouter`` with its defaults, restated: loads are ignored, nothing is dropped.

    The replicas with the longest match, if it is a tenth of the prompt, else that with the smallest tree; of several,
    the shorter queue of two.
    """

    holders: dict[int, set[int]] = field(factory=dict)
    sizes: dict[int, int] = field(factory=dict)
    draws: random.Random = field(factory=lambda: random.Random(3))

    def choose(self, blocks: Sequence[int], loads: Sequence[float]) -> int:
        matched, found = 0, set[int]()
        while matched < len(blocks) and (here := self.holders.get(blocks[matched])):
            found, matched = here, matched + 1
        if matched >= 0.1 * len(blocks):
            candidates = sorted(found)
        else:
            least = min(self.sizes.get(index, 0) for index in range(len(loads)))
            candidates = [index for index in range(len(loads)) if self.sizes.get(index, 0) == least]
        index = min(self.draws.choices(candidates, k=2), key=loads.__getitem__)
        for block in blocks:
            holders = self.holders.setdefault(block, set())
            self.sizes[index] = self.sizes.get(index, 0) + (index not in holders)
            holders.add(index)
        return index


@define
class _Prefix:
    """The rule that the server uses, with its defaults."""

    affinity: PrefixAffinity = field(factory=PrefixAffinity)

    def choose(self, blocks: Sequence[int], loads: Sequence[float]) -> int:
        index = self.affinity.choose(blocks, loads).index
        self.affinity.learn(index, blocks)
        return index


ROUTERS: dict[str, Callable[[], Router]] = {
    "round robin": _RoundRobin,
    "power of two": _PowerOfTwo,
    "Ray's prefix router": _Ray,
    "prefix affinity": _Prefix,
}


@define
class _Replica:
    waiting: deque[tuple[float, tuple[int, ...]]] = field(factory=deque)
    num_running: int = 0
    prefill_ends_s: float = 0.0
    cache: OrderedDict[int, None] = field(factory=OrderedDict)

    def cached(self, blocks: Sequence[int]) -> int:
        """Return the number of cached blocks of a prompt, and keep all its blocks from now on."""
        num_cached = next((at for at, block in enumerate(blocks) if block not in self.cache), len(blocks))
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHE_BLOCKS:
            self.cache.popitem(last=False)
        return num_cached


def _arrivals(work: Workload) -> list[tuple[float, tuple[int, ...]]]:
    traffic = work.traffic
    draws = random.Random(traffic.seed)
    tenants = range(work.num_tenants)
    weights = list(itertools.accumulate((tenant + 1) ** -work.skew for tenant in tenants))
    names, now, arrivals = itertools.count(), 0.0, []
    prefixes = [tuple(itertools.islice(names, draws.randint(*traffic.prefix_blocks))) for _ in tenants]
    for _ in range(work.requests_per_replica * work.num_replicas):
        now += draws.expovariate(work.rate * work.num_replicas)
        (tenant,) = draws.choices(tenants, cum_weights=weights)
        question = itertools.islice(names, draws.randint(*traffic.question_blocks))
        arrivals.append((now, (*prefixes[tenant], *question)))
    return arrivals


def simulate(work: Workload, router: Router) -> Outcome:
    """Serve all requests and return what clients see. The same arguments give the same times."""
    replicas = [_Replica() for _ in range(work.num_replicas)]
    loads: list[float] = [0.0] * work.num_replicas
    arrivals = deque(_arrivals(work))
    num_requests, num_blocks = len(arrivals), sum(len(blocks) for _, blocks in arrivals)
    ends, first_s, decisions = [], [], []
    num_cached, last_s = 0, 0.0
    while arrivals or ends:
        if arrivals and (not ends or arrivals[0][0] <= ends[0][0]):
            now, blocks = arrivals.popleft()
            began = time.perf_counter()
            index = router.choose(blocks, loads)
            decisions.append(time.perf_counter() - began)
            loads[index] += 1
            replicas[index].waiting.append((now, blocks))
        else:
            now, index = heapq.heappop(ends)
            loads[index] -= 1
            replicas[index].num_running -= 1
            last_s = now
        replica = replicas[index]
        while replica.waiting and replica.num_running < SLOTS:
            arrived, blocks = replica.waiting.popleft()
            hits = replica.cached(blocks)
            num_cached += hits
            prefill_s = (len(blocks) - hits) * BLOCK_TOKENS / PREFILL_TOKENS_PER_S
            replica.prefill_ends_s = max(now, replica.prefill_ends_s) + prefill_s
            replica.num_running += 1
            first_s.append(replica.prefill_ends_s - arrived)
            heapq.heappush(ends, (replica.prefill_ends_s + ANSWER_TOKENS * TOKEN_S, index))
    first_s.sort()
    decisions.sort()
    return Outcome(
        mean_first_s=sum(first_s) / num_requests,
        p90_first_s=first_s[int(0.9 * num_requests)],
        tokens_per_s=num_requests * ANSWER_TOKENS / last_s / work.num_replicas,
        cached=num_cached / num_blocks,
        decision_us=1e6 * decisions[num_requests // 2],
    )


def main() -> None:
    """Print the table."""
    print(
        "| replicas | demand / capacity | router | first token, mean; p90 | tokens/s per replica | cached | decision |"
    )
    print("|---|---|---|---|---|---|---|")
    works = [Workload(1, 0.75), Workload(3, 0.75), *(Workload(8, demand) for demand in (0.25, 0.75, 1.5, 4.0))]
    works += [Workload(100, 0.75), Workload(100, 0.75, skew=1.0), Workload(1000, 0.75, requests_per_replica=30)]
    works += [Workload(1000, 0.75, skew=1.0, requests_per_replica=30)]
    for work in (evolve(work, traffic=HELD_OUT) for work in works):
        for name, make in ROUTERS.items():
            got = simulate(work, make())
            skewed = ", skewed" if work.skew else ""
            first = f"{got.mean_first_s:.2f}; {got.p90_first_s:.2f} s"
            rest = f"{got.tokens_per_s:.0f} | {100 * got.cached:.0f} % | {got.decision_us:.0f} us"
            print(f"| {work.num_replicas} | {work.demand:g}{skewed} | {name} | {first} | {rest} |", flush=True)


if __name__ == "__main__":
    main()
