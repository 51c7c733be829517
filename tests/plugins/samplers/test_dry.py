import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract.sampler import History
from enginehouse_samplers.dry import DryFields, DrySampler

SAMPLER = DrySampler()
TOKENS = tuple(bytes([97 + token_id]) for token_id in range(8))  # a to h
texts = st.text("abcdefgh", max_size=60)


def ids(text):
    return np.array([ord(char) - 97 for char in text], np.int32)


def penalties(text, **fields):
    """Penalty by letter."""
    step = SAMPLER.create(DryFields(**{"dry_multiplier": 1.0, "dry_sequence_breakers": (), **fields}))
    found = step.penalties(History(ids(text), TOKENS))
    if found is None:
        return {}
    return {chr(97 + token_id): float(amount) for token_id, amount in zip(found.token_ids, found.amounts, strict=True)}


def reference(text, multiplier, base, allowed_length, last_n, breakers):  # noqa: PLR0917
    """From the definition: for each earlier place, how far the end of the text repeats what stands before it."""
    text = text if last_n < 0 else text[-last_n:] if last_n else ""
    longest = {}
    for place in range(1, len(text)):
        length = 0
        while length < min(place, allowed_length + 50):
            char = text[len(text) - 1 - length]
            if char in breakers or text[place - 1 - length] != char:
                break
            length += 1
        if length:
            longest[text[place]] = max(longest.get(text[place], 0), length)
    return {
        char: multiplier * base ** (length - allowed_length)
        for char, length in longest.items()
        if length >= allowed_length and char not in breakers
    }


@given(
    texts,
    st.sampled_from([0.5, 3.0]),
    st.sampled_from([1.0, 1.75, 2.0]),
    st.integers(0, 4),
    st.sampled_from([-1, 1, 5, 30]),
    st.sampled_from([(), ("a",), ("b", "c")]),
)
def test_dry_penalises_what_the_definition_says(text, multiplier, base, allowed_length, last_n, breakers):  # noqa: PLR0917
    found = penalties(
        text,
        dry_multiplier=multiplier,
        dry_base=base,
        dry_allowed_length=allowed_length,
        dry_penalty_last_n=last_n,
        dry_sequence_breakers=breakers,
    )

    assert found == pytest.approx(reference(text, multiplier, base, allowed_length, last_n, breakers))


@given(st.text("ab", min_size=100, max_size=200))
def test_dry_counts_long_repetitions_up_to_a_limit(text):
    assert penalties(text) == pytest.approx(reference(text, 1.0, 1.75, 2, -1, ()))


def test_dry_grows_with_the_length_of_the_repetition():
    assert penalties("abcdefabcde") == {"f": pytest.approx(1.75**3)}
    assert penalties("abcdefabcde", dry_multiplier=0.8, dry_base=2.0) == {"f": pytest.approx(0.8 * 8)}
    assert penalties("abcdefabcde", dry_allowed_length=6) == {}
    assert penalties("abcdefabcde", dry_allowed_length=5) == {"f": pytest.approx(1.0)}


def test_dry_takes_the_longest_of_several_places():
    assert penalties("bcdgabcdhabc") == {"d": pytest.approx(1.75)}


def test_dry_follows_no_repetition_across_a_breaker():
    assert penalties("abcdeabcd", dry_sequence_breakers=("b",)) == {"e": pytest.approx(1.0)}
    assert penalties("abcdeabcd", dry_sequence_breakers=("d",)) == {}
    assert penalties("abcdeabcd", dry_sequence_breakers=("bc",)) == {}
    assert penalties("abcdefabcde", dry_sequence_breakers=("bc",)) == {"f": pytest.approx(1.0)}


def test_dry_never_penalises_a_breaker():
    assert penalties("abcdeabcd", dry_sequence_breakers=("e",)) == {}


def test_dry_is_bounded_whatever_is_asked():
    """All penalties stay finite numbers."""
    found = penalties("a" * 2000, dry_multiplier=100.0, dry_base=10.0, dry_allowed_length=0)

    assert found.keys() == {"a"}
    assert math.isinf(found["a"]) is False


@pytest.mark.parametrize("text", ["", "a", "ab"])
def test_dry_penalises_nothing_in_texts_without_repetition(text):
    assert penalties(text) == {}


@pytest.mark.parametrize("fields", [{}, {"dry_base": 2.0}, {"dry_multiplier": 1.0, "dry_penalty_last_n": 0}])
def test_dry_is_off_without_strength_or_range(fields):
    assert SAMPLER.create(DryFields(**fields)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dry_multiplier", -0.1),
        ("dry_multiplier", math.inf),
        ("dry_base", 0.9),
        ("dry_base", math.nan),
        ("dry_allowed_length", -1),
        ("dry_allowed_length", 101),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", ("",)),
        ("dry_sequence_breakers", ("x" * 101,)),
        ("dry_sequence_breakers", tuple(map(str, range(33)))),
    ],
)
def test_dry_refuses_values_out_of_range(field, value):
    with pytest.raises(ValueError, match=field):
        DryFields(**{field: value})
