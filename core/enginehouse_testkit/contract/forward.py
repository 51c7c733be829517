"""Contract of forward passes: order, shape and values of the rows of logits."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from enginehouse.contract.backend import Outputs
from enginehouse.contract.errors import InvalidSpan
from enginehouse_testkit.contract.base import ContractBase
from enginehouse_testkit.contract.driver import RunnerDriver

__all__ = ["ForwardContract"]


class ForwardContract(ContractBase):
    """A row depends only on its sequence's tokens, not on chunking or on the rest of the batch."""

    def test_rows_differ_between_tokens(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Each row is that of its own position; no value is NaN or +inf."""
        rows = driver.alone(prompts[0])

        assert not np.isnan(rows).any()
        assert not np.isposinf(rows).any()
        assert not np.array_equal(rows[-1], rows[-2]), "the rows of two different tokens are equal"

    def test_rows_do_not_see_later_tokens(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """A token attends to the tokens before it and to itself."""
        prompt, other = prompts[0], [*prompts[0][:-1], prompts[1][0] if prompts[1][0] != prompts[0][-1] else 0]
        rows, expected = (driver.alone(token_ids)[:-1] for token_ids in (prompt, other))

        what = "two prompts with another last token: the rows before it must be equal: does the mask look ahead?"
        self.assert_same(rows, expected, driver.runner.capabilities, what)

    def test_last_is_the_row_of_the_last_token(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """With outputs ``last`` the row is that of ``all`` at the end of the span."""
        row = driver.feed(driver.open(), prompts[1], "last")

        what = "the row of a span with outputs 'last' against the last one of outputs 'all'"
        self.assert_same(row, driver.alone(prompts[1])[-1:], driver.runner.capabilities, what)

    def test_rows_may_be_overwritten(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """The sampler works in place; the next pass is not affected."""
        sequence = driver.open()
        driver.runner.forward([driver.span(sequence, prompts[0][:-1], "last")]).host().fill(np.nan)

        self.assert_replays(driver, sequence, prompts[0])

    def test_rows_come_in_span_order(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """All rows of one span, none of another, the last of a third: in span order."""
        wanted: tuple[Outputs, ...] = ("all", "none", "last", "all")
        spans = [driver.span(driver.open(), *pair) for pair in zip(prompts, wanted, strict=True)]
        rows = driver.forward(*spans)
        first, last = driver.alone(prompts[0]), driver.alone(prompts[3])
        expected = np.concatenate([first, driver.alone(prompts[2])[-1:], last])

        self.assert_same(rows, expected, driver.runner.capabilities, "several spans in one pass against each one alone")

    def test_no_rows_when_none_are_wanted(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """A prefill chunk without outputs returns no rows."""
        output = driver.runner.forward([driver.span(driver.open(), prompts[0], "none")])

        assert output.num_rows == 0
        assert output.host().shape == (0, driver.runner.tokenizer.vocab_size)

    @pytest.mark.parametrize("chunk_tokens", [2, 3, 7])
    def test_chunked_prefill_equals_one_pass(
        self, driver: RunnerDriver, prompts: list[list[int]], chunk_tokens: int
    ) -> None:
        """Chunk boundaries in a prompt do not change the rows."""
        rows = driver.feed(driver.open(), prompts[0], "all", chunk_tokens)

        what = f"a prompt in chunks of {chunk_tokens} against one pass: does a span take its positions from its start?"
        self.assert_same(rows, driver.alone(prompts[0]), driver.runner.capabilities, what)

    def test_decode_equals_prefill(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Token-by-token decoding gives the rows of one pass."""
        rows = driver.feed(driver.open(), prompts[0], "last", chunk_tokens=1)
        self.assert_same(rows, driver.alone(prompts[0])[-1:], driver.runner.capabilities, "the last row, fed by tokens")

        rows = driver.feed(driver.open(), prompts[1], "all", chunk_tokens=1)
        what = "a prompt token by token against one pass: does a span take its positions from its start?"
        self.assert_same(rows, driver.alone(prompts[1]), driver.runner.capabilities, what)

    def test_batched_prefill_equals_alone(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Prompts of different lengths do not affect each other."""
        rows = driver.forward(*(driver.span(driver.open(), token_ids, "last") for token_ids in prompts))
        expected = np.concatenate([driver.alone(token_ids)[-1:] for token_ids in prompts])

        self.assert_same(rows, expected, driver.runner.capabilities, "four prompts in one pass against each one alone")

    def test_batched_decode_equals_alone(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Sequences of different lengths decode together, also when one of them ends."""
        sequences = [driver.holding(token_ids[:-3]) for token_ids in prompts[:3]]
        for back in (3, 2, 1):
            batch = list(zip(sequences, prompts[: len(sequences)], strict=True))
            rows = driver.forward(*(driver.span(sequence, [ids[len(ids) - back]]) for sequence, ids in batch))
            expected = np.concatenate([driver.alone(ids[: len(ids) - back + 1])[-1:] for _, ids in batch])
            what = f"{len(batch)} sequences that decode in one pass against each one alone"
            self.assert_same(rows, expected, driver.runner.capabilities, what)
            driver.free(sequences.pop())

    def test_prefill_beside_decode_equals_alone(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """A prompt chunk and single tokens of running sequences in one pass, in any order."""
        if not driver.runner.capabilities.mixed_batch:
            pytest.skip("optional: the runner does not mix prefill and decode (capabilities.mixed_batch)")
        running = [driver.holding(token_ids[:-1]) for token_ids in prompts[:2]]
        rows = driver.forward(
            driver.span(running[0], prompts[0][-1:]),
            driver.span(driver.open(), prompts[2], "all"),
            driver.span(running[1], prompts[1][-1:]),
        )
        expected = [driver.alone(prompts[0])[-1:], driver.alone(prompts[2]), driver.alone(prompts[1])[-1:]]

        self.assert_same(rows, np.concatenate(expected), driver.runner.capabilities, "one pass against each span alone")

    def test_batch_of_forks_equals_alone(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Sequences with a common prefix diverge in one batch."""
        prompt = prompts[0]
        source = driver.holding(prompt)
        sequences = [source]
        for _ in range(2):
            copy, shared = driver.fork(source, len(prompt))
            if shared < len(prompt):
                driver.feed(copy, prompt[shared:], "none")
            sequences.append(copy)
        for step in range(2):
            rows = driver.forward(
                *(driver.span(sequence, [prompts[1 + index][step]]) for index, sequence in enumerate(sequences))
            )
            expected = [driver.alone(prompt + prompts[1 + index][: step + 1])[-1:] for index in range(3)]
            self.assert_same(
                rows, np.concatenate(expected), driver.runner.capabilities, "one pass against each span alone"
            )

    def test_fewer_layers_depend_on_the_tokens_only(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """With ``exit_layers``: equal logits in one pass and token by token, after a prefix of all layers."""
        offered, prompt = driver.runner.capabilities.exit_layers, prompts[0]
        if not offered:
            pytest.skip("optional: the runner has no exit layers (capabilities.exit_layers)")
        for num_layers in (offered[0], offered[-1]):
            whole, parts = driver.open(), driver.holding(prompt[:4])
            expected = driver.forward(attrs.evolve(driver.span(whole, prompt, "all"), num_layers=num_layers))
            found = [
                driver.forward(attrs.evolve(driver.span(parts, [token_id]), num_layers=num_layers))
                for token_id in prompt[4:]
            ]

            self.assert_same(np.concatenate(found), expected[4:], driver.runner.capabilities)

    def test_fewer_layers_are_taken_back_before_more_run(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Positions of the first layers only are not read by others; truncation restores the sequence."""
        offered, prompt = driver.runner.capabilities.exit_layers, prompts[0]
        if not offered:
            pytest.skip("optional: the runner has no exit layers (capabilities.exit_layers)")
        sequence = driver.holding(prompt[:-3])
        driver.forward(attrs.evolve(driver.span(sequence, prompt[-3:-1]), num_layers=offered[0]))
        with pytest.raises(InvalidSpan):
            driver.forward(driver.span(sequence, prompt[-1:]))

        assert driver.runner.truncate(sequence, len(prompt) - 3) == len(prompt) - 3
        rows = driver.forward(driver.span(sequence, prompt[-3:], "all"))
        self.assert_same(rows, driver.alone(prompt)[-3:], driver.runner.capabilities)
