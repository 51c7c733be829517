"""Shared base of the runner contract tests: fixtures, tolerances, comparison of logit rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest

from enginehouse.contract.backend import Runner, RunnerCapabilities
from enginehouse_testkit.contract.driver import Rows, RunnerDriver, largest_difference
from enginehouse_testkit.contract.form import FormContract, form_of_rows
from enginehouse_testkit.contract.opening import ModelUnderTest

__all__ = ["ContractBase"]


class ContractBase(FormContract):
    """Fixtures and settings; override the class attributes where a backend needs it.

    The fixture ``model`` is provided by the author, see :mod:`enginehouse_testkit.runner_contract`.

    Attributes:
        max_logit_difference: between rows that were computed differently (other chunks, other batch), when the
            runner is not ``batch_invariant``. A batch-invariant runner must give equal rows.
        exact: require equal rows; None: as the runner's ``batch_invariant`` says.
        max_fill_tokens: a larger cache is not filled up, and the tests of a full cache are skipped.
        num_random_steps: length of the random walk over all operations.
        adds_space: the tokenizer prepends a space to a text (SentencePiece's dummy prefix).
        texts: source texts of the prompts.
    """

    max_logit_difference: ClassVar[float] = 0.05
    exact: ClassVar[bool | None] = None
    max_fill_tokens: ClassVar[int] = 2048
    num_random_steps: ClassVar[int] = 40
    adds_space: ClassVar[bool] = False
    texts: ClassVar[tuple[str, ...]] = (
        "The capital of France is a city on the river Seine, and many people live there.",
        "Once upon a time, in a land of mountains and stops, a small engine served tokens.",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17",
        "def add(left, right):\n    return left + right\n\nprint(add(1, 2))",
    )

    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls, model: ModelUnderTest) -> Callable[[], Runner]:
        """Factory that opens a new runner."""
        return model.open_runner

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, make_runner: Callable[[], Runner]) -> Iterator[Runner]:
        """The runner shared by the tests of a class."""
        runner = make_runner()
        yield runner
        runner.close()

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, runner: Runner) -> str:
        """Faults in the rows and lengths of the runner."""
        return form_of_rows(runner, cls.max_logit_difference, cls.exact)

    @pytest.fixture
    def driver(self, runner: Runner) -> Iterator[RunnerDriver]:
        """Drives the shared runner and frees every sequence after the test."""
        driver = RunnerDriver(runner)
        yield driver
        driver.free_all()

    @pytest.fixture
    def prompts(self, runner: Runner) -> list[list[int]]:
        """Four different prompts of 7 to 20 tokens, as ids, short enough to run in one batch."""
        room = runner.capabilities.max_batch_tokens // len(self.texts)
        lengths = [min(length, room) for length in (20, 13, 16, 7)]
        prefix = list(runner.tokenizer.prefix_token_ids)
        encoded = [prefix + runner.tokenizer.encode(text, False) for text in self.texts]
        return [token_ids[:length] for token_ids, length in zip(encoded, lengths, strict=True)]

    def assert_same(self, rows: Rows, expected: Rows, capabilities: RunnerCapabilities, what: str = "") -> None:
        """Assert that two ways to compute the same rows agree within the runner's guarantee.

        Args:
            what: what was computed in two ways, and the likely reason of a difference.
        """
        exact = capabilities.batch_invariant if self.exact is None else self.exact
        allowed = 0.0 if exact else self.max_logit_difference
        difference = largest_difference(rows, expected)
        why = "batch_invariant, or exact, is set" if exact else "max_logit_difference of the suite"
        assert difference <= allowed, f"{what}: logits differ by {difference:.3g}, allowed is {allowed} ({why})"

    def assert_replays(self, driver: RunnerDriver, sequence: int, token_ids: Sequence[int], what: str = "") -> None:
        """Assert that ``sequence``, a prefix of ``token_ids``, gives the reference's rows for the remaining tokens."""
        length = driver.runner.length(sequence)
        rows = driver.feed(sequence, token_ids[length:], "all")
        what = what or f"a sequence of {length} tokens, continued, against the same tokens in one pass"
        self.assert_same(rows, driver.alone(token_ids)[length:], driver.runner.capabilities, what)
