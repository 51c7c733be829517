"""Contract suite for poolers, as a test class. A backend author writes one fixture and inherits the tests.

::

    class TestMyPooler(PoolerContract):
        @pytest.fixture(scope="class")
        @classmethod
        def model(cls):
            return ModelUnderTest(backend=MyBackend(), source=ModelSource("small"), options=MyOptions())

A fixture ``make_pooler``, a function that opens a new pooler, works too. The tests share one pooler. ``max_difference``
is a class attribute: the largest difference between two numbers of the same row that was computed in different passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.errors import StepAborted
from enginehouse.contract.pooler import Pooler, PoolerCapabilities, PoolerInput
from enginehouse.contract.types import PoolTask
from enginehouse_testkit.contract.form import FormContract, members_problem, problem_of
from enginehouse_testkit.contract.opening import ModelUnderTest

__all__ = ["PoolerContract"]

_TEXTS = (
    "The capital of France is a city on the river Seine.",
    "a",
    "Größe, naïve café, 日本語のテキスト, 🙂",
    "def add(left, right):\n    return left + right",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17",
    "many people live there, and many people work there, and nobody knows why",
    "",
)


class PoolerContract(FormContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.pooler.Pooler`.

    Attributes:
        max_difference: allowed where the pooler is not ``batch_invariant``, for embeddings of length 1 or logits.
        max_longest: a longer input than this is not tried.
    """

    max_difference: ClassVar[float] = 2e-3
    max_longest: ClassVar[int] = 2048

    @pytest.fixture(scope="class")
    @classmethod
    def make_pooler(cls, model: ModelUnderTest) -> Callable[[], Pooler]:
        """Factory that opens a new pooler."""
        return model.open_pooler

    @pytest.fixture(scope="class")
    @classmethod
    def pooler(cls, make_pooler: Callable[[], Pooler]) -> Iterator[Pooler]:
        """The pooler shared by the tests of a class."""
        pooler = make_pooler()
        yield pooler
        pooler.close()

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, pooler: Pooler) -> str:
        """Missing members, contradictions in the capabilities, and faults in the shape of rows."""
        return members_problem("open", Pooler, pooler) or problem_of(lambda: _problem_of_form(pooler))

    @pytest.fixture
    def inputs(self, pooler: Pooler) -> list[PoolerInput]:
        """Inputs of different lengths, as core makes them of texts; for rerank of pairs."""
        return [_arranged(pooler, text) for text in _TEXTS]

    def assert_same(self, pooler: Pooler, rows: NDArray[np.float32], expected: NDArray[np.float32], what: str) -> None:
        """Assert that rows that were computed in two ways agree within the pooler's guarantee."""
        scale = max(1.0, float(np.abs(expected).max()))
        allowed = 0.0 if pooler.capabilities.batch_invariant else self.max_difference * scale
        difference = float(np.abs(rows - expected).max())
        why = "batch_invariant is set" if pooler.capabilities.batch_invariant else "max_difference of the suite"
        assert difference <= allowed, f"{what}: rows differ by {difference:.3g}, allowed is {allowed:.3g} ({why})"

    # -- rows --------------------------------------------------------------------------------------

    def test_rows_are_those_of_each_input_alone(self, pooler: Pooler, inputs: list[PoolerInput]) -> None:
        """A row does not depend on the other inputs of its pass."""
        together = pooler.pool(inputs).copy()
        alone = np.concatenate([pooler.pool([one]).copy() for one in inputs])

        self.assert_same(pooler, together, alone, "several inputs in one pass, against each alone")

    def test_order_of_inputs_is_the_order_of_rows(self, pooler: Pooler, inputs: list[PoolerInput]) -> None:
        """Inputs in another order give the same rows in that order; the longest need not come first."""
        expected = pooler.pool(inputs).copy()
        for order in (np.arange(len(inputs))[::-1], np.random.default_rng(7).permutation(len(inputs))):
            rows = pooler.pool([inputs[place] for place in order]).copy()
            self.assert_same(pooler, rows, expected[order], "the same inputs in another order")

    def test_rows_do_not_depend_on_earlier_passes(self, pooler: Pooler, inputs: list[PoolerInput]) -> None:
        """The same pass gives equal rows each time, also after other passes."""
        first = pooler.pool(inputs).copy()
        pooler.pool([inputs[0]])

        self.assert_same(pooler, pooler.pool(inputs).copy(), first, "the same pass again")

    def test_different_inputs_have_different_rows(self, pooler: Pooler, inputs: list[PoolerInput]) -> None:
        """All tokens of an input count."""
        rows = pooler.pool(inputs).copy()

        assert len(np.unique(rows, axis=0)) == len(inputs), "two different inputs have the same row"

    def test_inputs_are_not_changed(self, pooler: Pooler, inputs: list[PoolerInput]) -> None:
        """Core computes equal inputs once, and keeps their ids."""
        before = [one.token_ids.copy() for one in inputs]
        pooler.pool(inputs)

        assert all(np.array_equal(one.token_ids, ids) for one, ids in zip(inputs, before, strict=True))

    def test_embeddings_have_length_one_if_stated(self, pooler: Pooler, inputs: list[PoolerInput]) -> None:
        """``is_normalized`` is true of the rows."""
        if pooler.info.task != "embed" or not pooler.capabilities.is_normalized:
            pytest.skip("optional: rows of length 1 (is_normalized)")
        lengths = np.linalg.norm(pooler.pool(inputs), axis=1)

        assert np.allclose(lengths, 1.0, atol=1e-4), f"is_normalized is True, but rows have the lengths {lengths}"

    def test_second_text_of_a_pair_counts(self, pooler: Pooler) -> None:
        """The row of a pair depends on both texts, and on which is the first."""
        if pooler.capabilities.pair is None:
            pytest.skip("optional: pairs of texts (capabilities.pair)")
        encode = pooler.tokenizer.encode
        first, second, third = (encode(_TEXTS[place], False) for place in (0, 3, 5))
        arrange = pooler.capabilities.pair.arrange
        rows = pooler.pool([arrange(first, second), arrange(first, third), arrange(third, second)])

        assert len(np.unique(rows, axis=0)) == 3, "pairs that differ in one text have the same row"

    def test_prompt_tokens_are_left_out_of_pooling(self, pooler: Pooler) -> None:
        """With ``include_prompt`` False, the number of prompt tokens has an effect."""
        if pooler.capabilities.include_prompt:
            pytest.skip("optional: prompts that pooling leaves out (include_prompt)")
        token_ids = pooler.tokenizer.encode(_TEXTS[0], False)
        arrange = pooler.capabilities.text.arrange
        rows = pooler.pool([arrange(token_ids), arrange(token_ids, num_prompt=3)])

        assert not np.array_equal(rows[0], rows[1])

    # -- limits ------------------------------------------------------------------------------------

    def test_longest_input_is_computed(self, pooler: Pooler) -> None:
        """An input of ``max_tokens`` passes, alone."""
        row = pooler.pool([_long_input(pooler, min(pooler.capabilities.max_tokens, self.max_longest))])

        assert np.isfinite(row).all()

    def test_full_pass_is_computed(self, pooler: Pooler) -> None:
        """As many tokens, and as many inputs, as ``capabilities`` allow in one pass; of different lengths."""
        limits = pooler.capabilities
        most = min(limits.max_batch_texts, 256)
        by_texts = [_arranged(pooler, _TEXTS[place % 2]) for place in range(most)]
        while sum(len(one.token_ids) for one in by_texts) > limits.max_batch_tokens:
            by_texts.pop()
        room = min(limits.max_batch_tokens, 4 * self.max_longest)
        by_tokens: list[PoolerInput] = []
        while room >= 8 and len(by_tokens) < limits.max_batch_texts:
            by_tokens.append(_long_input(pooler, min(limits.max_tokens - len(by_tokens) % 3, room, self.max_longest)))
            room -= len(by_tokens[-1].token_ids)
        for inputs in (by_texts, by_tokens):
            rows = pooler.pool(inputs).copy()
            assert rows.shape == (len(inputs), limits.dimensions)
            self.assert_same(pooler, rows[-1:], pooler.pool(inputs[-1:]).copy(), "the last input of a full pass")

    # -- tokenizer ---------------------------------------------------------------------------------

    def test_tokenizer_forms_no_control_tokens_of_texts(self, pooler: Pooler) -> None:
        """Ids are inside the vocabulary, nothing is nothing, and a control token's name is text."""
        tokenizer = pooler.tokenizer
        assert list(tokenizer.encode("", False)) == []
        assert tokenizer.vocab_size == pooler.info.vocab_size == len(tokenizer.token_bytes)
        for text in (*_TEXTS, *(f"say {name} now" for name in tokenizer.special_tokens)):
            token_ids = tokenizer.encode(text, False)
            assert all(0 <= token_id < tokenizer.vocab_size for token_id in token_ids), text
            formed = tokenizer.control_token_ids & set(token_ids) - _unknown_ids(pooler)
            assert not formed, f"encode({text!r}, special=False) gave the control tokens {sorted(formed)}"

    # -- lifetime ----------------------------------------------------------------------------------

    def test_abort_without_a_pass_does_nothing(self, pooler: Pooler, inputs: list[PoolerInput]) -> None:
        """``abort`` concerns a running pass only."""
        expected = pooler.pool(inputs).copy()
        pooler.abort()

        self.assert_same(pooler, pooler.pool(inputs).copy(), expected, "a pass after abort()")

    def test_abort_from_another_thread_leaves_a_usable_pooler(self, pooler: Pooler, inputs: list[PoolerInput]) -> None:
        """A pass that is aborted ends, with its rows or with StepAborted; the next one is right."""
        expected = pooler.pool(inputs).copy()
        aborting = threading.Timer(0.001, pooler.abort)
        aborting.start()
        try:
            pooler.pool([_long_input(pooler, min(pooler.capabilities.max_tokens, self.max_longest))])
        except StepAborted:
            pass
        finally:
            aborting.join()

        self.assert_same(pooler, pooler.pool(inputs).copy(), expected, "a pass after one that was aborted")

    def test_close_may_be_called_twice(self, make_pooler: Callable[[], Pooler]) -> None:
        """A new pooler opens beside another one, and closes."""
        pooler = make_pooler()
        pooler.close()
        pooler.close()


def _arranged(pooler: Pooler, text: str) -> PoolerInput:
    """Return the input that core makes of a short text; for rerank of a pair with a fixed first text."""
    token_ids = pooler.tokenizer.encode(text, False)
    if pooler.info.task == "rerank" and (pair := pooler.capabilities.pair) is not None:
        first = pooler.tokenizer.encode("where is it", False)
        return pair.arrange(first, token_ids[: pooler.capabilities.max_tokens - pair.num_added(is_pair=True) - 8])
    layout = pooler.capabilities.text
    return layout.arrange(token_ids[: pooler.capabilities.max_tokens - layout.num_added(is_pair=False)])


def _long_input(pooler: Pooler, num_tokens: int) -> PoolerInput:
    """Return an input of exactly that many tokens, if it is at least as long as the layout and two more."""
    token_ids = pooler.tokenizer.encode(_TEXTS[0], False)
    layout = pooler.capabilities.pair if pooler.info.task == "rerank" else pooler.capabilities.text
    assert layout is not None
    is_pair = pooler.info.task == "rerank"
    room = num_tokens - layout.num_added(is_pair=is_pair)
    repeated: list[int] = (token_ids * (room // len(token_ids) + 1))[:room]
    return layout.arrange(repeated[:1], repeated[1:]) if is_pair else layout.arrange(repeated)


def _unknown_ids(pooler: Pooler) -> frozenset[int]:
    """Return the id of unknown characters, a control token that a text may well give."""
    names = ("[UNK]", "<unk>")
    return frozenset(pooler.tokenizer.special_tokens[name] for name in names if name in pooler.tokenizer.special_tokens)


def _problem_of_form(pooler: Pooler) -> str:
    limits, info = pooler.capabilities, pooler.info
    if not isinstance(limits, PoolerCapabilities):
        return f"capabilities must be PoolerCapabilities, not {type(limits).__name__}"
    for is_wrong, what in _contradictions(pooler):
        if is_wrong:
            return what
    ids = [token_id for layout in (limits.text, limits.pair) if layout is not None for token_id in _ids(layout)]
    if any(not 0 <= token_id < info.vocab_size for token_id in ids):
        return f"the layouts have ids outside the vocabulary of {info.vocab_size}: {ids}"
    return _problem_of_rows(pooler, [_arranged(pooler, text) for text in _TEXTS[:3]])


def _contradictions(pooler: Pooler) -> Iterator[tuple[bool, str]]:
    limits, info = pooler.capabilities, pooler.info
    task, labels = info.task, len(limits.labels)
    yield task not in get_args(PoolTask), f"info.task is {task!r}; it must be one of {', '.join(get_args(PoolTask))}"
    yield (
        info.max_context != limits.max_tokens,
        (f"info.max_context is {info.max_context}, capabilities.max_tokens {limits.max_tokens}; they must be equal"),
    )
    yield limits.max_batch_tokens < limits.max_tokens, "max_batch_tokens is smaller than max_tokens"
    yield limits.max_batch_texts < 1 or limits.dimensions < 1, "max_batch_texts and dimensions must be at least 1"
    yield task == "rerank" and limits.pair is None, "a model for rerank needs capabilities.pair"
    yield bool(labels) and labels != limits.dimensions, f"{labels} labels for {limits.dimensions} columns"
    yield task == "classify" and not labels, "a model for classify needs labels"
    yield (
        any(not 0 < size < limits.dimensions for size in limits.dimension_choices),
        (f"dimension_choices must be between 0 and {limits.dimensions}: {limits.dimension_choices}"),
    )
    yield (
        limits.default_prompt not in ("", *limits.prompts),
        f"default_prompt: no prompt {limits.default_prompt!r}",
    )
    yield task == "embed" and limits.activation != "none", "embeddings have no activation"
    yield (
        limits.pass_tokens is not None and not 0 < limits.pass_tokens <= limits.max_batch_tokens,
        (f"pass_tokens {limits.pass_tokens} must be between 1 and max_batch_tokens"),
    )


def _ids(layout: Any) -> Sequence[int]:
    return (*layout.before, *layout.between, *layout.after)


def _problem_of_rows(pooler: Pooler, inputs: Sequence[PoolerInput]) -> str:
    rows = pooler.pool(inputs)
    expected = (len(inputs), pooler.capabilities.dimensions)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.float32 or rows.shape != expected:
        found = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        return f"pool gave {found}; float32 of shape {expected} was expected"
    if not np.isfinite(rows).all():
        return "pool gave numbers that are not finite"
    return ""
