"""Prefix-aware routing: chooses the replica that has probably computed most of a prompt, unless it is too busy.

Used by plugins that spread the requests of one model over several servers or replicas. Pure and synchronous: no I/O,
no clock, no threads; knows neither servers nor requests, only hashes of text blocks and numbers of running requests.
It remembers where prompts were sent, not what a replica holds, so a match is an estimate.

Source: the rule (share of the prompt that must match, limit of imbalance, few remembered blocks first) is that of
SGLang's gateway; blocks with chained hashes and one LRU list per replica are those of llm-d's approximate scorer.
Changed: both in one rule, one table for all replicas. The limit of imbalance compares a matching replica with the mean
of the others, since the least busy one of many is far below the mean by chance alone, the more so the more there are;
it grows with the root of the mean, since a ratio would leave a part of the replicas idle for ever where all prompts
share one prefix. A new prefix goes where few blocks are remembered, among the replicas no busier than the mean: its
place decides the load of all later requests with it, and a difference in running requests lasts seconds.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any, Literal

from attrs import define, field, frozen
from attrs.validators import ge, gt, le

__all__ = ["BLOCK_BYTES", "MAX_BLOCKS_OF_PROMPT", "PrefixAffinity", "PrefixChoice", "prefix_blocks"]

BLOCK_BYTES = 256
"""UTF-8 bytes of a block, about 64 tokens of English text."""

MAX_BLOCKS_OF_PROMPT = 256
"""Blocks of a prompt that are compared; prompts that are equal so far (64 KiB) count as equal."""

_HASH_BYTES = 8
_DIGITS = bytes.maketrans(b"\x00\x01", b"01")
_BITS = bytes.maketrans(b"01", b"\x00\x01")


def prefix_blocks(parts: Iterable[str | bytes], namespace: str = "") -> tuple[int, ...]:
    """Return the hash chain of a prompt: one 64-bit number per whole block, of everything up to its end.

    The numbers are the same in every process. A prompt shorter than a block has none.

    Args:
        parts: the prompt in the order in which a model reads it; how it is divided makes no difference.
        namespace: separates equal texts: the namespace of the prefix cache, an adapter.
    """
    limit = BLOCK_BYTES * MAX_BLOCKS_OF_PROMPT
    text = bytearray()
    for part in parts:
        text += part if isinstance(part, bytes) else part[: limit - len(text)].encode("utf-8", "surrogatepass")
        if len(text) >= limit:
            break
    chain = hashlib.blake2b(digest_size=_HASH_BYTES, key=hashlib.sha256(namespace.encode()).digest())
    blocks = []
    for end in range(BLOCK_BYTES, min(len(text), limit) + 1, BLOCK_BYTES):
        chain.update(text[end - BLOCK_BYTES : end])
        blocks.append(int.from_bytes(chain.copy().digest(), "big"))
    return tuple(blocks)


@frozen
class PrefixChoice:
    """A chosen replica.

    Attributes:
        index: of the replica in ``loads``.
        reason: ``prefix``: it has most of the prompt; ``load``: no replica has enough of the prompt, and this one is no
            busier than the mean; ``balance``: the same, since those that have the prompt are too busy.
        matched: blocks of the prompt that were sent to it before.
    """

    index: int
    reason: Literal["prefix", "load", "balance"]
    matched: int


def _check_total(instance: PrefixAffinity, attribute: Any, value: int) -> None:
    if value < MAX_BLOCKS_OF_PROMPT:
        raise ValueError(f"max_blocks: {value}; at least {MAX_BLOCKS_OF_PROMPT}, the blocks of one prompt")


@define(eq=False)
class PrefixAffinity:
    """The prompts that each replica was sent, and the choice of a replica for the next one.

    Replicas are numbered from 0; numbers may have gaps and be used again after :meth:`forget`.

    Attributes:
        min_share: share of a prompt's blocks that must match for a replica to be preferred.
        slack: a matching replica may have this many more running requests than the mean of the others,
        deviations: or this many standard deviations of what chance alone gives (Poisson: the root of the mean),
            whichever is more.
        blocks_per_replica: blocks remembered per replica. Fewer than its KV cache holds lose matches; more make matches
            that are none, which cost little: such a prompt is computed wherever it goes.
        max_blocks: blocks remembered in all, in equal parts for each replica; about 250 bytes each.
    """

    min_share: float = field(default=0.3, validator=[gt(0), le(1)])
    slack: float = field(default=8, validator=ge(0))
    deviations: float = field(default=2.0, validator=ge(0))
    blocks_per_replica: int = field(default=8192, validator=ge(1))
    max_blocks: int = field(default=2_000_000, validator=_check_total)
    # block -> bits of the replicas that have it. For each replica, a block's bit implies those of all blocks before it
    # in its chain: chains are learnt from the end, so the last blocks of a chain are the oldest and are dropped first.
    _holders: dict[int, int] = field(factory=dict, init=False, repr=False)
    _kept: dict[int, OrderedDict[int, None]] = field(factory=dict, init=False, repr=False)
    _sizes: list[int] = field(factory=list, init=False, repr=False)  # remembered blocks by replica
    _turn: int = field(default=0, init=False, repr=False)

    def __len__(self) -> int:
        """Number of remembered blocks, counted once per replica."""
        return sum(map(len, self._kept.values()))

    def choose(self, blocks: Sequence[int], loads: Sequence[float]) -> PrefixChoice:
        """Return the replica for a prompt. Remembers nothing about it: see :meth:`learn`.

        Args:
            blocks: from :func:`prefix_blocks`.
            loads: running requests by replica; ``math.inf`` for a replica that must not be chosen.

        Raises:
            ValueError: every replica is excluded, or there is none.
        """
        least = min(loads, default=math.inf)
        if least == math.inf:
            raise ValueError("no replica can be chosen: each load is infinite")
        if not blocks:
            return PrefixChoice(self._next_of([index for index, load in enumerate(loads) if load == least]), "load", 0)
        needed = max(1, math.ceil(self.min_share * len(blocks)))
        usable = [load for load in loads if load != math.inf] if math.inf in loads else loads
        total, count = sum(usable), len(usable)
        mean = max(least, total / count)  # rounded, it may be below all
        # The largest x that is at most y + slack or y + deviations * sqrt(y), where y is the mean of the others,
        # (total - x) / (count - 1).
        root = (math.sqrt(self.deviations**2 + 4 * count * total) - self.deviations) / (2 * count)
        limit = max(mean + self.slack * (count - 1) / count, root**2 + self.deviations * root)
        allowed = _mask(loads, limit)
        depth = self._depth(blocks, allowed)
        if depth >= needed:
            holders = _indices(self._holders[blocks[depth - 1]] & allowed, len(loads))
            return PrefixChoice(min(holders, key=loads.__getitem__), "prefix", depth)
        index = self._place(blocks, loads, _mask(loads, mean))
        all_usable = -1 if usable is loads else _mask(loads, sys.float_info.max)
        is_held = self._depth(blocks, all_usable) >= needed
        return PrefixChoice(index, "balance" if is_held else "load", self._depth(blocks, 1 << index))

    def learn(self, index: int, blocks: Sequence[int]) -> None:
        """Remember that a prompt was sent to a replica."""
        if index < 0:
            raise ValueError(f"{index} is not the number of a replica; they count from 0")
        kept = self._kept.get(index)
        if kept is None:
            kept = self._kept[index] = OrderedDict()
            for other in list(self._kept):
                self._trim(other)
        bit, holders = 1 << index, self._holders
        for block in reversed(blocks[:MAX_BLOCKS_OF_PROMPT]):
            if block in kept:
                kept.move_to_end(block)
            else:
                kept[block] = None
                holders[block] = holders.get(block, 0) | bit
        self._trim(index)

    def forget(self, index: int) -> None:
        """Drop everything about a replica, whose cache is gone. Does nothing for an unknown one."""
        for block in self._kept.pop(index, ()):
            self._drop(block, 1 << index)
        if 0 <= index < len(self._sizes):
            self._sizes[index] = 0

    def _depth(self, blocks: Sequence[int], mask: int) -> int:
        """Return how many blocks of a prompt a replica of the mask has, by bisection: see ``_holders``."""
        low, high, holders = 0, len(blocks), self._holders
        while low < high:
            middle = (low + high + 1) // 2
            if holders.get(blocks[middle - 1], 0) & mask:
                low = middle
            else:
                high = middle - 1
        return low

    def _next_of(self, indices: Sequence[int]) -> int:
        self._turn += 1
        return indices[(self._turn - 1) % len(indices)]

    def _place(self, blocks: Sequence[int], loads: Sequence[float], mask: int) -> int:
        """Return the replica of the mask with the fewest blocks; of several the least busy; of these by the prompt."""
        self._sizes.extend([0] * (len(loads) - len(self._sizes)))
        candidates = list(_indices(mask, len(loads)))
        for key in (self._sizes, loads):
            least = min(map(key.__getitem__, candidates))
            candidates = [index for index in candidates if key[index] == least]
        return candidates[blocks[0] % len(candidates)]

    def _trim(self, index: int) -> None:
        kept = self._kept[index]
        limit = max(1, min(self.blocks_per_replica, self.max_blocks // len(self._kept)))
        while len(kept) > limit:
            block, _ = kept.popitem(last=False)
            self._drop(block, 1 << index)
        self._sizes.extend([0] * (index + 1 - len(self._sizes)))
        self._sizes[index] = len(kept)

    def _drop(self, block: int, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _mask(loads: Sequence[float], limit: float) -> int:
    """Return one bit per replica: whether its load is at most ``limit``."""
    return int(bytes(map(float(limit).__ge__, loads)).translate(_DIGITS)[::-1], 2)


def _indices(mask: int, count: int) -> Iterable[int]:
    """Return the numbers of the bits of a mask, below ``count``."""
    bits = f"{mask:b}".encode().translate(_BITS)
    return compress(range(count), reversed(bits))
