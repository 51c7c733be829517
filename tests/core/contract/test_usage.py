"""Usage: it adds up, and each field is shown where its metadata says."""

from __future__ import annotations

import msgspec
import pytest

from enginehouse.api.metrics import family
from enginehouse.contract.usage import USAGE_FIELDS, Usage, UsageCounter


def test_counts_add_up_and_the_longest_time_counts() -> None:
    total = Usage(prompt_tokens=3, queue_s=0.5) + Usage(prompt_tokens=4, queue_s=0.25, replays=1)

    assert total == Usage(prompt_tokens=7, queue_s=0.5, replays=1)
    assert sum([total], Usage()) == total


def test_a_tally_is_counted_in_place_and_reports_values() -> None:
    tally = UsageCounter(prompt_tokens=5)
    assert tally.work() is None, "what events show is not work beside them"
    before = tally.snapshot()
    tally.add_drafts("lookup", num_drafted=2)
    tally += Usage(completion_tokens=1)

    assert before == Usage(prompt_tokens=5)
    assert tally.snapshot() == Usage(prompt_tokens=5, completion_tokens=1, drafted_tokens=2, drafts={"lookup": (2, 0)})
    assert tally.work() == Usage(drafted_tokens=2, drafts={"lookup": (2, 0)})
    with pytest.raises(AttributeError):
        before.prompt_tokens = 6  # type: ignore[misc]


def test_usage_crosses_the_link() -> None:
    usage = Usage(prompt_tokens=5, decode_s=0.25, discarded_tokens=1)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(usage), type=Usage) == usage


@pytest.mark.parametrize(
    ("is_complete", "expected"),
    [
        (True, {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 2, "queue_s": 0.0}),
        (False, {"prompt_tokens": 0, "completion_tokens": 2}),
    ],
)
def test_zeros_are_shown_only_where_they_say_something(is_complete: bool, expected: dict[str, float]) -> None:
    usage = Usage(completion_tokens=2, reasoning_tokens=1, forced_tokens=1)
    shown = {name: value for name, _, value in usage.shown(is_complete=is_complete)}
    times = {"prefill_s": 0.0, "decode_s": 0.0} if is_complete else {}

    assert shown == {**expected, **times, "forced_tokens": 1}


def test_each_metric_is_a_family_of_its_kind() -> None:
    for name, shown in USAGE_FIELDS.items():
        if shown.metric is not None:
            found = family(shown.metric)
            assert (found.kind, found.meaning) == ("histogram" if name.endswith("_s") else "counter", shown.help)
