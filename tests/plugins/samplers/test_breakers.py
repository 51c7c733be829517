"""Where texts hold a sequence breaker, against a plain search in the text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse_samplers.breakers import BreakerCache

TOKENS = (b"a", b"b", b"ab", b"ba", b"\n", b"a\nb", b"", b"\xe2\x80", b"\xa2", b"b:", b"::", b"<|end|>")
strings = st.lists(
    st.sampled_from(["\n", "ab", "ba", "abba", "a\nb\n", ":", "b::", "\u2022", "<|end|>a", "zz"]),
    max_size=4,
    unique=True,
)


def reference(token_ids, breakers):
    """Free tokens at the end: those behind the last one that overlaps a breaker."""
    text = b"".join(TOKENS[token_id] for token_id in token_ids)
    last = -1
    for pattern in (breaker.encode() for breaker in breakers):
        for start in range(len(text) - len(pattern) + 1):
            if text[start : start + len(pattern)] == pattern:
                last = max(last, start + len(pattern) - 1)
    num_free, begin = 0, len(text)
    for token_id in reversed(token_ids):
        begin -= len(TOKENS[token_id])
        if last >= begin and TOKENS[token_id]:
            break
        num_free += 1
    return num_free


@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=30), strings, st.integers(1, 12))
def test_distance_is_that_of_a_search_in_the_text(token_ids, breakers, most):
    found = BreakerCache().of(TOKENS, tuple(breakers)).distance(np.array(token_ids, np.int32), most)

    assert found == min(reference(token_ids, breakers), most)


@pytest.mark.parametrize("breakers", [(), ("a",), ("b", "\n"), ("ab",), ("\u2022",), ("a\nb", "|")], ids=str)
def test_holds_one_says_which_tokens_hold_a_breaker(breakers):
    holds = BreakerCache().of(TOKENS, breakers).holds_one

    assert holds.tolist() == [any(breaker.encode() in token for breaker in breakers) for token in TOKENS]


def test_cache_distinguishes_vocabularies():
    cache = BreakerCache()
    first = cache.of(TOKENS, ("a",))

    assert cache.of(TOKENS, ("a",)) is first
    assert cache.of((b"x", b"a"), ("a",)).holds_one.tolist() == [False, True]
    assert cache.of(TOKENS, ("a",)).holds_one.tolist() == first.holds_one.tolist()


def test_cache_does_not_grow_without_end():
    cache = BreakerCache()
    kept = [cache.of(TOKENS, (f"breaker {number}",)) for number in range(200)]

    assert sum(cache.of(TOKENS, (f"breaker {number}",)) is kept[number] for number in range(190, 200)) >= 7
    assert cache.of(TOKENS, ("breaker 0",)) is not kept[0]
