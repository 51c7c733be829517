"""Valid files and answers, damaged at random. Each case is a seeded generator: case 1234 of a check is always the same.

A check gets a number of cases in every run, and a time with ``-m slow``: an hour for all of them together, or the
seconds that ``FUZZ_SECONDS`` says. Processor time and memory of each case are bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from attrs import frozen

__all__ = ["Amount", "amounts", "damage_bytes", "damage_json", "damaged_document", "run_damaged"]

NUM_CHECKS = 9
"""Checks that share the time of a long run."""

_CASE_S = 10.0
_CASE_BYTES = 384 * 2**20
_MAX_DOCUMENT_CHARS = 2**22
_SHARE_S = float(os.environ.get("FUZZ_SECONDS", "3600")) / NUM_CHECKS


@frozen
class Amount:
    """How much is tried: so many cases, or for so many seconds."""

    num_cases: int = 0
    seconds: float = 0.0


def amounts(num_cases: int) -> pytest.MarkDecorator:
    """The parameter ``amount`` of a check: a number of cases in every run, a share of the time with ``-m slow``."""
    long = pytest.param(Amount(seconds=_SHARE_S), marks=[pytest.mark.slow, pytest.mark.timeout(2 * _SHARE_S + 60)])
    return pytest.mark.parametrize("amount", [Amount(num_cases=num_cases), long], ids=["cases", "time"])


def run_damaged(name: str, amount: Amount, check: Callable[[Random], None]) -> int:
    """Call ``check`` with the generator of each case.

    Raises:
        AssertionError: a case raised, took too long, or needed too much memory; names its number.
    """
    began, number = time.monotonic(), 0
    while number < amount.num_cases or time.monotonic() - began < amount.seconds:
        try:
            with _bounded():
                check(Random(f"{name} {number}"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of libraries in Rust are no Exception
            said = f"case {number} of {name}: {type(error).__name__}: {error}"[:2000]
            raise AssertionError(said.encode("utf-8", "backslashreplace").decode()) from error
        number += 1
    print(f"{name}: {number} cases in {time.monotonic() - began:.0f} s")
    return number


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Bounds of one case: seconds of this process on the processor, and memory beyond what it has. On Linux only."""
    if sys.platform != "linux":
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        num_bytes = int(file.read().split()[0]) * resource.getpagesize()
    old = signal.signal(signal.SIGVTALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes + _CASE_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, _CASE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, old)


def _too_long(number: int, frame: object) -> None:
    raise AssertionError(f"more than {_CASE_S:g} s of computing")


def _flip(random: Random, data: bytearray) -> None:
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _cut(random: Random, data: bytearray) -> None:
    del data[random.randrange(len(data)) :]


def _drop(random: Random, data: bytearray) -> None:
    begin = random.randrange(len(data))
    del data[begin : begin + random.choice([1, 2, 4, 8, 40])]


def _repeat(random: Random, data: bytearray) -> None:
    begin = random.randrange(len(data))
    piece = data[begin : begin + random.choice([1, 4, 30, 300])]
    data[begin:begin] = piece * random.choice([1, 2, 50])


_WORDS = (
    b"\xff" * 8,
    bytes(8),
    b"\x7f" + b"\xff" * 7,
    b"9" * 30,
    b"[" * 3000,
    b"{",
    b'"',
    b"\r\n",
    b"\n\n",
    b"\\u0000",
)


def _write(random: Random, data: bytearray) -> None:
    begin = random.randrange(len(data))
    word = random.choice(_WORDS)
    data[begin : begin + random.choice([0, len(word)])] = word


def _number(random: Random, data: bytearray) -> None:
    """A number of four or eight bytes in place of what is there: a length, a count or an offset."""
    size = random.choice([4, 8])
    value = random.choice([0, 1, 2, 3, 255, 2**16, 2**20, 2**24, 2**30, 2**31, 2**32 - 1, 2**40, 2**62, 2**64 - 1])
    begin = random.randrange(len(data))
    data[begin : begin + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")


def damage_bytes(random: Random, data: bytes) -> bytes:
    """One to four changes: bits, cuts, repetitions, numbers, and what has a meaning in texts."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        if changed:
            random.choice([_flip, _flip, _cut, _drop, _repeat, _write, _number, _number])(random, changed)
    return bytes(changed)


def _nasty(random: Random) -> Any:
    return random.choice(
        [
            *(None, True, False, 0, 1, -1, 2, 2**31, 2**53, 2**63, 2**64, 10**30, 10**300, 400_000_000),
            *(0.0, -0.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
            *("", "a", "a" * 1000, "A" * 400, "!!!", "\0", "\ud800", "<|im_end|>", "1e9", "nan", "../../x", "é"),
            *([], [[]], {}, {"a": 1}, [None] * 1000, ["a"] * 50, {"": {}}, [0.5, "x", None]),
        ]
    )


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every member of every object and list: where it is, and by which key."""
    members = list(value.items()) if isinstance(value, dict) else list(enumerate(value[:200]))
    for key, member in members:
        yield value, key
        if isinstance(member, dict | list):
            yield from _places(member)


def damage_json(random: Random, value: Any) -> Any:
    """A copy with one to three changes: values of other kinds and sizes, members that are gone, doubled or nested."""
    changed = json.loads(json.dumps(value))
    for _ in range(random.randint(1, 3)):
        places = list(_places(changed))
        if not places:
            return _nasty(random)
        holder, key = random.choice(places)
        match random.randrange(6):
            case 0:
                del holder[key]
            case 1:
                size = len(json.dumps(holder[key]))
                times = min(random.choice([1, 2, 1000]), max(1, _MAX_DOCUMENT_CHARS // size))
                holder[key] = json.loads(
                    json.dumps([holder[key]] * times)
                )  # copies: a further change is in one of them
            case 2:
                for _ in range(random.choice([1, 3, 100])):
                    holder[key] = {str(key): holder[key]} if random.random() < 0.5 else [holder[key]]
            case 3:
                other, other_key = random.choice(places)
                with contextlib.suppress(KeyError, IndexError, ValueError):
                    holder[key] = json.loads(json.dumps(other[other_key]))
            case _:
                holder[key] = _nasty(random)
    return changed


def damaged_document(random: Random, value: Any) -> bytes:
    """A JSON document, changed as a value, as bytes, or both."""
    if random.random() < 0.8:
        value = damage_json(random, value)
    text = json.dumps(value, ensure_ascii=random.random() < 0.5)
    if random.random() < 0.05:
        depth = random.choice([500, 5000, 100_000])
        text = text.replace("1", "[" * depth + "]" * depth, 1)
    if random.random() < 0.1:
        text = text.replace("{", '{"a": 1, "a": 2, ', 1).replace(", }", "}")
    data = text.encode("utf-8", "surrogatepass")
    return damage_bytes(random, data) if random.random() < 0.3 else data
