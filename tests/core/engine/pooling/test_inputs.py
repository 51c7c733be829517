"""Texts to inputs: layouts, prompts, shortening as Hugging Face does, and equal inputs only once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from enginehouse.contract.errors import InvalidRequest, UnsupportedTask
from enginehouse.contract.types import PoolingRequest, PoolText
from enginehouse.engine.pooling.inputs import InputMaker, LayoutArrangement, PoolInputs
from enginehouse_testkit.fake_pooler import FakePooler, FakePoolerOptions


def make(texts: list[PoolText], options: dict[str, Any] | None = None, **fields: Any) -> PoolInputs:
    pooler = FakePooler(FakePoolerOptions(context=12, **options or {}))
    compares = fields.pop("compares", False)
    arrangement = LayoutArrangement(pooler.tokenizer, pooler.capabilities)
    maker = InputMaker(pooler.tokenizer, pooler.capabilities, pooler.info, arrangement, compares=compares)
    return maker.make(PoolingRequest(inputs=tuple(texts), **{"task": pooler.info.task, **fields}))


def text_of(made: PoolInputs, place: int) -> str:
    """The bytes of an input as text; control tokens as dots."""
    return "".join(chr(one) if one < 256 else "." for one in made.inputs[place].token_ids.tolist())


def test_equal_inputs_are_one() -> None:
    made = make([PoolText("ab"), PoolText("b"), PoolText("ab")])

    assert [text_of(made, place) for place in range(2)] == [".ab.", ".b."]
    assert made.places.tolist() == [0, 1, 0]
    assert made.num_tokens == (4, 3, 4)


@pytest.mark.parametrize(
    ("first", "second", "end", "start"),
    [
        ("abc", "0123456789", ".abc..01234.", ".abc..56789."),
        ("abcdefghij", "01", ".abcdef..01.", ".efghij..01."),
        ("abcdefghij", "0123456789", ".abcd..0123.", ".ghij..6789."),
        ("abcd", "012345678", ".abcd..0123.", ".abcd..5678."),
    ],
)
def test_of_a_pair_the_longer_text_is_shortened_first(first: str, second: str, end: str, start: str) -> None:
    for side, expected in (("end", end), ("start", start)):
        made = make([PoolText(first, None, second)], {"task": "rerank"}, truncate=side)
        assert text_of(made, 0) == expected
        assert made.num_truncated == 1
        assert made.inputs[0].second_from == expected.index("..") + 2


def test_prompts_are_counted_where_pooling_leaves_them_out() -> None:
    prompts = {"prompts": {"q": "q:="}, "default_prompt": "q"}
    out, included, none = (
        make([PoolText("ab")], {**prompts, "include_prompt": False}),
        make([PoolText("ab")], prompts),
        make([PoolText("ab")], prompts, prompt_name=""),
    )

    assert (out.inputs[0].num_prompt, included.inputs[0].num_prompt) == (4, 0)
    assert text_of(out, 0) == text_of(included, 0) == ".q:=ab."
    assert text_of(none, 0) == ".ab."


def test_compared_texts_have_the_prompts_of_their_roles() -> None:
    prompts = {"prompts": {"query": "?-", "passage": "!-"}}
    made = make([PoolText("a", None, "b"), PoolText("a", None, "c")], prompts, task="rerank", compares=True)

    assert [text_of(made, place) for place in range(3)] == [".?-a.", ".!-b.", ".!-c."]
    assert made.places.tolist() == [[0, 1], [0, 2]]
    assert made.num_tokens == (10, 10)


def test_given_ids_are_taken_without_a_layout() -> None:
    made = make([PoolText(token_ids=(7, 8))])

    assert np.array_equal(made.inputs[0].token_ids, [7, 8])
    for ids in ((), (-1,), (9999,), tuple(range(13))):
        with pytest.raises(InvalidRequest, match=r"input\[0\]"):
            make([PoolText(token_ids=ids)])


def test_other_tasks_are_refused() -> None:
    for task, hint in (("rerank", 'rerank = "cosine" in its settings'), ("classify", "needs one for 'classify'")):
        with pytest.raises(UnsupportedTask, match=hint):
            make([PoolText("a", None, "b")], task=task)
