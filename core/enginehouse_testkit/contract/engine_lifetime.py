"""Contract of concurrent requests: batching, prefix reuse, cancellation, and isolation of failures."""

from __future__ import annotations

import asyncio
import time

import pytest

from enginehouse.contract.engine import EngineStream
from enginehouse.contract.errors import GenerationFailed, RequestError
from enginehouse_testkit.contract.engine_base import EngineContractBase, StumblingSampler
from enginehouse_testkit.contract.engine_driver import Answer, EngineDriver

__all__ = ["EngineLifetimeContract"]

_IDLE_S = 60.0
"""Maximum time for an engine to notice a cancellation."""


class EngineLifetimeContract(EngineContractBase):
    """Requests do not affect each other."""

    def test_batch_equals_alone(self, engine: EngineDriver) -> None:
        """Greedy texts in a batch equal those of each request alone, up to near-ties."""
        self.needs(engine, "num_logprobs")
        alone = [engine.ask(prompt, num_logprobs=2) for prompt in self.beginnings]
        together = engine.answers([engine.request(prompt, num_logprobs=2) for prompt in self.beginnings])

        texts = {answer.text() for answer in alone}
        assert len(texts) > 1, f"all prompts of `beginnings` get the text {texts}: set others for this model"
        for found, expected in zip(together, alone, strict=True):
            assert isinstance(found, Answer)
            self.assert_same_text(found, expected)

    def test_reuse_equals_replay(self, engine: EngineDriver) -> None:
        """A prompt that shares a prefix with an earlier prompt or answer gives the same text as without reuse."""
        self.needs(engine, "num_logprobs")
        first = engine.ask(num_logprobs=2)
        self.assert_same_text(engine.ask(num_logprobs=2), first)
        longer = engine.ask(f"Once upon a time{first.text()}", num_logprobs=2)
        engine.ask("Something else in between")
        self.assert_same_text(engine.ask(f"Once upon a time{first.text()}", num_logprobs=2), longer)

    def test_cancelled_requests_end_and_free_their_slot(self, engine: EngineDriver) -> None:
        """Iteration ends; cancelling again, or after the end, is not an error."""
        generation = engine.submit(engine.request(max_tokens=None))
        engine.run(_read_once_and_cancel(generation))
        self._assert_idle(engine)
        generation.cancel()

        assert engine.ask(max_tokens=3).finished().usage.completion_tokens == 3

    def test_requests_cancelled_before_they_are_read_are_gone(self, engine: EngineDriver) -> None:
        """Cancels more requests than there are slots."""
        generations = [engine.submit(engine.request(max_tokens=None)) for _ in range(6)]
        for generation in generations:
            engine.run(_cancel(generation))
        self._assert_idle(engine)

        assert engine.ask(max_tokens=3).finished().usage.completion_tokens == 3

    def test_an_exception_fails_one_request_only(self, engine: EngineDriver) -> None:
        """A sampler raises in the middle of a batch: only its own request fails."""
        samplers = engine.engine.info.engine.samplers
        if samplers is None or StumblingSampler.name not in samplers:
            pytest.skip("optional: the engine runs no sampler plugins")
        self.needs(engine, "num_logprobs")
        alone = [engine.ask(prompt, num_logprobs=2) for prompt in self.beginnings[:2]]
        stumbling = engine.request(temperature=1.0, extensions={StumblingSampler.name: {"kit_stumbles": True}})
        good = [engine.request(prompt, num_logprobs=2) for prompt in self.beginnings[:2]]
        first, failed, second = engine.answers([good[0], stumbling, good[1]])

        assert isinstance(failed, GenerationFailed)
        assert failed.plugin in (StumblingSampler.name, StumblingSampler.__module__)  # it was not registered
        for found, expected in zip((first, second), alone, strict=True):
            assert isinstance(found, Answer)
            self.assert_same_text(found, expected)
        self._assert_idle(engine)

    def test_a_refused_request_hurts_nobody(self, engine: EngineDriver) -> None:
        """A refusal does not affect concurrent requests."""
        good, refused = engine.answers([engine.request(max_tokens=4), engine.request(token_ids=[10**9])])

        assert isinstance(good, Answer)
        assert good.finished().usage.completion_tokens == 4
        assert isinstance(refused, RequestError), "submit accepts the token id 10**9: raise a RequestError"

    def _assert_idle(self, engine: EngineDriver) -> None:
        """Assert that soon no request waits or runs."""
        deadline = time.monotonic() + _IDLE_S
        while (stats := engine.run(engine.engine.stats())).num_running + stats.num_waiting:
            assert time.monotonic() < deadline, f"{stats.num_running} requests still run, {stats.num_waiting} wait"
            engine.run(asyncio.sleep(0.01))


async def _read_once_and_cancel(generation: EngineStream) -> None:
    async for _ in generation:
        generation.cancel()


async def _cancel(generation: EngineStream) -> None:
    generation.cancel()
