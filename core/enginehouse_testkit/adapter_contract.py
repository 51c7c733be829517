"""Contract suite for runners with adapters, as a test class; the oracle is the same model with merged weights.

::

    class TestMyAdapters(AdapterContract):
        @pytest.fixture(scope="class")
        @classmethod
        def model(cls):
            return ModelUnderTest(backend=MyBackend(), source=ModelSource("small"), options=MyOptions(context=64))

        @pytest.fixture(scope="class")
        @classmethod
        def adapted(cls, tmp_path_factory):
            return AdaptedModel(adapters=(first, second), open_merged=open_merged, damaged=(no_tensors, other_model))

The adapters must change logits by much more than ``max_logit_difference``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import attrs
import numpy as np
import pytest
from attrs import define, frozen

from enginehouse.contract.adapters import AdapterKeeper, AdapterSet
from enginehouse.contract.backend import Runner, Span
from enginehouse.contract.errors import AdapterRefused, CacheFull, InvalidSpan
from enginehouse_testkit.contract.base import ContractBase
from enginehouse_testkit.contract.driver import Rows, RunnerDriver, largest_difference

__all__ = ["AdaptedModel", "AdapterContract"]


@frozen(eq=False)
class AdaptedModel:
    """Adapters to test with.

    Attributes:
        adapters: two adapters of the model.
        open_merged: opens the model with adapters merged into its weights: path to scale.
        damaged: files that must be refused.
        activated: an activated adapter (aLoRA) with its invocation tokens; None if the runner has no format for them.
    """

    adapters: tuple[Path, Path]
    open_merged: Callable[[Mapping[Path, float]], Runner]
    damaged: Sequence[Path] = ()
    activated: tuple[Path, tuple[int, ...]] | None = None


@define
class _Walked:
    """A sequence of the random walk: its tokens, and its adapters."""

    token_ids: list[int]
    adapter: AdapterSet


class AdapterContract(ContractBase):
    """Tests every guarantee of :class:`enginehouse.contract.adapters.AdapterKeeper`.

    Attributes:
        num_adapter_steps: steps of the random walk.
    """

    num_adapter_steps: ClassVar[int] = 200

    @pytest.fixture
    def keeper(self, runner: Runner) -> AdapterKeeper:
        """The runner, which takes adapters."""
        assert runner.capabilities.adapters != "none" and isinstance(runner, AdapterKeeper)
        return runner

    @pytest.fixture
    def handles(self, keeper: AdapterKeeper, adapted: AdaptedModel, driver: RunnerDriver) -> Iterator[list[int]]:
        """Both adapters, loaded; unloaded afterwards, while sequences still hold what they computed."""
        handles = [keeper.load_adapter(path) for path in adapted.adapters]
        yield handles
        for handle in handles:
            keeper.unload_adapter(handle)

    def _with(self, driver: RunnerDriver, token_ids: Sequence[int], adapter: AdapterSet) -> Rows:
        """Return the rows of all positions of a prompt with adapters, alone in one pass."""
        sequence = driver.open()
        rows = driver.forward(attrs.evolve(driver.span(sequence, token_ids, "all"), adapter=adapter))
        driver.free(sequence)
        return rows

    def test_logits_equal_those_of_merged_weights(
        self, driver: RunnerDriver, adapted: AdaptedModel, handles: list[int], prompts: list[list[int]]
    ) -> None:
        """For each adapter, other scales, and the sum of two."""
        first, second = adapted.adapters
        cases: list[dict[Path, float]] = [{first: 1.0}, {second: 1.0}, {first: -0.5}, {first: 0.7, second: 0.3}]
        by_path = dict(zip(adapted.adapters, handles, strict=True))
        for merged in cases:
            oracle = RunnerDriver(adapted.open_merged(merged))
            adapter = tuple((by_path[path], scale) for path, scale in merged.items())
            try:
                for prompt in prompts:
                    rows, base = self._with(driver, prompt, adapter), driver.alone(prompt)
                    self.assert_same(rows, oracle.alone(prompt), driver.runner.capabilities, f"adapters {merged}")
                    assert largest_difference(rows, base) > 3 * self.max_logit_difference, "the adapter has no effect"
            finally:
                oracle.free_all()
                oracle.runner.close()

    def test_the_base_model_is_unchanged_to_the_bit(
        self, driver: RunnerDriver, keeper: AdapterKeeper, adapted: AdaptedModel, prompts: list[list[int]]
    ) -> None:
        """While adapters are loaded, with the scale 0, and after they are unloaded."""
        before = driver.alone(prompts[0])
        handles = [keeper.load_adapter(path) for path in adapted.adapters]
        adapter = tuple((handle, 1.0) for handle in handles)
        self._with(driver, prompts[1], adapter)
        beside = driver.alone(prompts[0])
        silent = self._with(driver, prompts[0], ((handles[0], 0.0),))
        for handle in handles:
            keeper.unload_adapter(handle)

        assert np.array_equal(before, beside) and np.array_equal(before, silent)
        assert np.array_equal(before, driver.alone(prompts[0]))

    def test_sequences_with_adapters_do_not_influence_each_other(
        self, driver: RunnerDriver, handles: list[int], prompts: list[list[int]]
    ) -> None:
        """Random appends, forks and cuts over sequences with four sets: each equals its own tokens alone."""
        sets: list[AdapterSet] = [(), ((handles[0], 1.0),), ((handles[1], 1.0),), ((handles[0], 0.5),)]
        randomness, runner = random.Random(20), driver.runner
        walked: dict[int, _Walked] = {}
        vocab = sorted({token_id for prompt in prompts for token_id in prompt})
        limit = min(runner.capabilities.max_context, 24)
        for step in range(self.num_adapter_steps):
            if len(walked) < 4:
                walked[driver.open()] = _Walked([], sets[step % len(sets)])
            action = randomness.random()
            chosen = randomness.choice(list(walked))
            if action < 0.1 and runner.capabilities.truncate == "any" and walked[chosen].token_ids:
                length = runner.truncate(chosen, randomness.randrange(len(walked[chosen].token_ids)))
                del walked[chosen].token_ids[length:]
            elif action < 0.2 and runner.capabilities.fork != "none" and walked[chosen].token_ids:
                other = next(handle for handle in walked if handle != chosen)
                driver.free(other)
                del walked[other]
                forked, length = driver.fork(chosen, randomness.randrange(1, len(walked[chosen].token_ids) + 1))
                walked[forked] = _Walked(walked[chosen].token_ids[:length], walked[chosen].adapter)
            else:
                self._append(driver, walked, randomness, vocab, limit)
            for handle in [handle for handle, one in walked.items() if len(one.token_ids) >= limit]:
                driver.free(handle)
                del walked[handle]

    def _append(
        self,
        driver: RunnerDriver,
        walked: dict[int, _Walked],
        randomness: random.Random,
        vocab: Sequence[int],
        limit: int,
    ) -> None:
        """Append one to three tokens to some sequences in one pass, and compare the rows."""
        one_set = randomness.choice(list(walked.values())).adapter
        is_mixed = driver.runner.capabilities.adapters == "mixed"
        spans: list[Span] = []
        for handle, one in walked.items():
            if is_mixed or one.adapter == one_set:
                count = randomness.randint(1, min(3, limit - len(one.token_ids)))
                added = [randomness.choice(vocab) for _ in range(count)]
                one.token_ids += added
                spans.append(attrs.evolve(driver.span(handle, added), adapter=one.adapter))
        try:
            rows = driver.forward(*spans)
        except CacheFull:
            for span in spans:
                del walked[span.sequence].token_ids[span.start :]
            return
        for index, span in enumerate(spans):
            one = walked[span.sequence]
            expected = self._with(driver, one.token_ids, one.adapter)[-1:]
            self.assert_same(rows[index : index + 1], expected, driver.runner.capabilities, f"adapters {one.adapter}")

    def test_spans_with_unknown_adapters_are_refused(
        self, driver: RunnerDriver, handles: list[int], prompts: list[list[int]]
    ) -> None:
        """An unloaded handle; and with ``per_pass``, two sets in one pass. Nothing changes."""
        first, second = driver.open(), driver.open()
        unknown = attrs.evolve(driver.span(first, prompts[0][:2]), adapter=((max(handles) + 1, 1.0),))
        with pytest.raises(InvalidSpan):
            driver.forward(unknown)
        if driver.runner.capabilities.adapters == "per_pass":
            spans = [
                attrs.evolve(driver.span(first, prompts[0][:2]), adapter=((handles[0], 1.0),)),
                driver.span(second, prompts[1][:2]),
            ]
            with pytest.raises(InvalidSpan):
                driver.forward(*spans)

        assert driver.runner.length(first) == driver.runner.length(second) == 0

    def test_damaged_files_are_refused(
        self, driver: RunnerDriver, keeper: AdapterKeeper, adapted: AdaptedModel, prompts: list[list[int]]
    ) -> None:
        """Each with a message that names it; the model is unchanged."""
        before = driver.alone(prompts[0])
        for path in (*adapted.damaged, adapted.adapters[0].with_name("missing")):
            with pytest.raises(AdapterRefused, match=path.name):
                keeper.load_adapter(path)

        assert np.array_equal(before, driver.alone(prompts[0]))

    def test_activated_adapters_say_their_invocation_tokens(self, keeper: AdapterKeeper, adapted: AdaptedModel) -> None:
        """Others have none; damaged files are refused or have none, too."""
        assert [keeper.invocation_tokens(path) for path in adapted.adapters] == [(), ()]
        if adapted.activated is not None:
            path, invocation = adapted.activated
            assert keeper.invocation_tokens(path) == invocation
            keeper.unload_adapter(keeper.load_adapter(path))
        with pytest.raises(AdapterRefused, match="missing"):
            keeper.invocation_tokens(adapted.adapters[0].with_name("missing"))

    def test_activated_adapters_act_from_their_tokens_on(
        self, driver: RunnerDriver, keeper: AdapterKeeper, adapted: AdaptedModel, prompts: list[list[int]]
    ) -> None:
        """A sequence started without an adapter goes on with one; forks of its first part are the base model's."""
        path = adapted.adapters[0] if adapted.activated is None else adapted.activated[0]
        prompt, limits = max(prompts, key=len), driver.runner.capabilities
        if len(prompt) < 4:
            pytest.skip("no prompt of four tokens")
        place, adapter = len(prompt) // 2, ((keeper.load_adapter(path), 1.0),)
        sequence = driver.open()
        before = driver.forward(driver.span(sequence, prompt[:place], "all"))
        after = driver.forward(attrs.evolve(driver.span(sequence, prompt[place:], "all"), adapter=adapter))
        base = driver.alone(prompt)
        whole = self._with(driver, prompt, adapter)
        keeper.unload_adapter(adapter[0][0])

        self.assert_same(before, base[:place], limits, "before the tokens")
        assert largest_difference(after, base[place:]) > 3 * self.max_logit_difference
        assert largest_difference(after, whole[place:]) > 0, "the keys and values before the tokens are the adapter's"
