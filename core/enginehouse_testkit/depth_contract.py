"""Contract suite for runners that can run only some of a model's layers, over model families, as a test class.

::

    class TestDepth(DepthContract):
        windowed = "gemma3_text"

        @pytest.fixture(params=["qwen3", "gemma3_text"])
        def family(self, request):
            return request.param

        @pytest.fixture
        def open_family(self):
            return my_function  # from a family's name to a runner of a small random model of four layers

        @pytest.fixture
        def logits_of_fewer(self):
            return another_function  # see below

The runner contract tests ``exit_layers`` for a single model; this one compares each family with its own library, and
needs models that are deep enough to mix depths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.backend import DeviceSampler, Draw, LastSampled, Outputs, Runner, Span
from enginehouse.contract.errors import InvalidSpan
from enginehouse.contract.types import SamplingParams
from enginehouse_testkit.contract.driver import Rows, largest_difference

__all__ = ["DepthContract", "FewerLayers", "OpenFamily"]

OpenFamily = Callable[[str], Runner]
"""Opens a small random model of a family: four layers, a context of at least 128 tokens."""

FewerLayers = Callable[[str, int, NDArray[np.int32]], Rows]
"""Reference by the library alone: logits of all tokens of a family's model that ends after some of its layers."""


class DepthContract:
    """Tests every guarantee about a span's `num_layers`, against the library alone and over model families.

    Attributes:
        usual: the family for tests that need only one.
        windowed: a family with sliding-window layers, or another one.
        max_logit_difference: between rows that were computed differently.
        num_token_ids: token ids below this one are used; every family has them.
    """

    usual: ClassVar[str] = "qwen3"
    windowed: ClassVar[str] = "gemma3_text"
    max_logit_difference: ClassVar[float] = 1e-3
    num_token_ids: ClassVar[int] = 90

    @pytest.fixture
    def token_ids(self) -> NDArray[np.int32]:
        """Forty tokens, more than a window holds."""
        return (np.arange(40, dtype=np.int32) * 31 + 5) % self.num_token_ids

    @pytest.fixture
    def open_drawing(self, open_family: OpenFamily) -> OpenFamily:
        """Opens a model whose runner samples on the device, where that is a setting."""
        return open_family

    @pytest.fixture
    def opened(self, open_family: OpenFamily) -> Iterator[OpenFamily]:
        """Opens models that are closed after the test."""
        yield from _closing(open_family)

    @pytest.fixture
    def opened_drawing(self, open_drawing: OpenFamily) -> Iterator[OpenFamily]:
        """Opens models whose runners sample on the device, and that are closed after the test."""
        yield from _closing(open_drawing)

    def depths(self, family: str) -> Sequence[int]:
        """Return the numbers of layers with which the library can open a model of that family."""
        return (1, 3)

    def test_fewer_layers_are_the_shorter_model(
        self, opened: OpenFamily, logits_of_fewer: FewerLayers, family: str, token_ids: NDArray[np.int32]
    ) -> None:
        """One span, chunks and single tokens agree, with and without a separable vocabulary projection."""
        runner = opened(family)
        assert runner.capabilities.exit_layers == (1, 2, 3)
        for num_layers in self.depths(family):
            expected = logits_of_fewer(family, num_layers, token_ids)
            whole, parts = runner.open_sequence(), runner.open_sequence()
            found = _append(runner, whole, token_ids, num_layers)
            pieces = np.split(token_ids, [20, 37, 38, 39])
            found_in_parts = np.concatenate([_append(runner, parts, piece, num_layers) for piece in pieces])

            self.assert_same(found, expected)
            self.assert_same(found_in_parts, expected)
            assert np.abs(expected).max() > 1  # otherwise nearly everything would be equal
            runner.free_sequence(whole)
            runner.free_sequence(parts)

    @pytest.mark.parametrize("kind", ["usual", "windowed"])
    def test_drafts_are_taken_back_before_all_layers_run(
        self, opened: OpenFamily, token_ids: NDArray[np.int32], kind: str
    ) -> None:
        """A draft shares the memory of the text before it; after verification, logits equal those of a plain pass."""
        runner = opened(getattr(self, kind))
        plain, drafted = runner.open_sequence(), runner.open_sequence()
        expected = _append(runner, plain, token_ids)
        _append(runner, drafted, token_ids[:30])
        for place in range(30, 34):
            _append(runner, drafted, token_ids[place : place + 1], 2)
        _append(runner, drafted, token_ids[34:35], 1)
        for num_layers in (None, 3, 2):
            with pytest.raises(InvalidSpan, match="fewer layers"):
                _append(runner, drafted, token_ids[35:], num_layers)
        fork, kept = runner.fork(drafted, 33)
        with pytest.raises(InvalidSpan, match="fewer layers"):
            _append(runner, fork, token_ids[kept:])

        assert runner.truncate(fork, 30) == runner.truncate(drafted, 30) == 30
        self.assert_same(_append(runner, drafted, token_ids[30:]), expected[30:])
        self.assert_same(_append(runner, fork, token_ids[30:]), expected[30:])

    @pytest.mark.parametrize("kind", ["usual", "windowed"])
    def test_one_pass_may_run_different_numbers_of_layers(
        self, opened: OpenFamily, token_ids: NDArray[np.int32], kind: str
    ) -> None:
        """Each span gets the same rows as alone."""
        runner = opened(getattr(self, kind))
        wanted: list[tuple[int, Outputs, int | None]] = [
            (7, "last", None),
            (1, "last", 2),
            (1, "all", None),
            (5, "all", 1),
        ]
        spans, alone = [], []
        for size, rows, num_layers in wanted:
            sequence = runner.open_sequence()
            runner.forward([Span(sequence, 0, token_ids[:9], "none")])
            spans.append(Span(sequence, 9, token_ids[9 : 9 + size], rows, num_layers))
            alone.append(runner.forward(spans[-1:]).host().copy())
            runner.truncate(sequence, 9)
        together = runner.forward(spans).host()

        assert together.shape[0] == 1 + 1 + 1 + 5
        self.assert_same(together, np.concatenate(alone))

    def test_drafts_follow_what_the_runner_drew(self, opened_drawing: OpenFamily, token_ids: NDArray[np.int32]) -> None:
        """Greedy drafts: each token is sampled on the device and used by the next span without a host copy."""
        runner = opened_drawing(self.usual)
        if not isinstance(runner, DeviceSampler):
            pytest.skip("optional: the runner does not draw (capabilities.sampling)")
        drafted, checked = runner.open_sequence(), runner.open_sequence()
        sampling, drawn_ids = SamplingParams(temperature=0.0), []
        output = runner.forward([Span(drafted, 0, token_ids[:9], "last", 2)])
        for step in range(5):
            drawn = runner.sample(output, [Draw(row=0, sequence=drafted, sampling=sampling, number=0.0)])
            output = runner.forward([Span(drafted, 9 + step, LastSampled(), "last", 2)])
            drawn_ids.append(drawn.host()[0].token_id)
        text = np.concatenate([token_ids[:9], np.array(drawn_ids, np.int32)])

        assert drawn_ids == _append(runner, checked, text, 2)[8:-1].argmax(1).tolist()

    def test_layers_that_are_not_there_are_refused(self, opened: OpenFamily, token_ids: NDArray[np.int32]) -> None:
        """The full number of layers is refused, too."""
        runner = opened(self.usual)
        sequence = runner.open_sequence()
        for num_layers in (0, 4, 9):
            with pytest.raises(InvalidSpan, match=f"num_layers={num_layers} is not supported"):
                _append(runner, sequence, token_ids[:3], num_layers)

    def assert_same(self, found: Rows, expected: Rows) -> None:
        """Assert that two ways to compute the same rows agree."""
        difference = largest_difference(found, expected)
        assert difference < self.max_logit_difference, f"logits differ by {difference}"


def _closing(open_family: OpenFamily) -> Iterator[OpenFamily]:
    opened: list[Runner] = []

    def open_one(family: str) -> Runner:
        opened.append(open_family(family))
        return opened[-1]

    yield open_one
    for runner in opened:
        runner.close()


def _append(runner: Runner, sequence: int, token_ids: NDArray[np.int32], num_layers: int | None = None) -> Rows:
    """Append these tokens to a sequence and return their rows."""
    return runner.forward([Span(sequence, runner.length(sequence), token_ids, "all", num_layers)]).host().copy()
