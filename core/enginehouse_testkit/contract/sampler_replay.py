"""Contract of replay: a sampler's tokens depend on the request alone, not on other requests or scheduling."""

from __future__ import annotations

import itertools

import msgspec

from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.types import EngineRequest, EngineSettings, SamplingParams, StopParams, TextDelta
from enginehouse.engine.loop import StepEngine
from enginehouse_testkit.contract.sampler_base import SamplerContractBase
from enginehouse_testkit.contract.steps import events_of
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

__all__ = ["SamplerReplayContract"]

_numbers = itertools.count()


class SamplerReplayContract(SamplerContractBase):
    """Tests of a step through core's sampler and through core's engine."""

    def test_draws_replay(self, sampler: SamplerPlugin, requests: list[SamplingParams]) -> None:
        """The same request gives the same tokens, also after the sampler was used for others."""
        for params in requests:
            first = self.drawn(sampler, params)
            self.drawn(sampler, msgspec.structs.replace(params, seed=params.seed + 1))
            assert self.drawn(sampler, params) == first

    def test_it_acts(self, sampler: SamplerPlugin, requests: list[SamplingParams]) -> None:
        """At least one request of the suite gives other tokens than without the plugin."""
        seeded = [msgspec.structs.replace(params, seed=seed) for params in requests for seed in range(8)]
        plain = [self.drawn(sampler, msgspec.structs.replace(params, extensions={})) for params in seeded]

        assert any(self.drawn(sampler, params) != other for params, other in zip(seeded, plain, strict=True))

    def test_greedy_stays_possible(self, sampler: SamplerPlugin, requests: list[SamplingParams]) -> None:
        """At temperature 0 the same token is sampled for every seed."""
        for params in requests:
            greedy = msgspec.structs.replace(params, temperature=0.0)
            other = msgspec.structs.replace(greedy, seed=params.seed + 1)
            assert self.drawn(sampler, greedy) == self.drawn(sampler, other)

    def test_choices_have_states_of_their_own(self, sampler: SamplerPlugin, requests: list[SamplingParams]) -> None:
        """The first of three choices equals the choice of a request with one."""
        for params in requests:
            (three,), _ = _texts(sampler, [params], num_choices=3)
            (one,), _ = _texts(sampler, [params])
            assert three[0] == one[0]

    def test_text_is_the_same_under_preemption_and_in_chunks(
        self, sampler: SamplerPlugin, requests: list[SamplingParams]
    ) -> None:
        """Four requests in a cache too small for all give the same text as each one alone."""
        for params in requests:
            seeded = [msgspec.structs.replace(params, seed=seed) for seed in range(4)]
            alone = [_texts(sampler, [one], first=number)[0][0] for number, one in enumerate(seeded)]
            tight = FakeOptions(context=120, slots=4, cache_tokens=160)
            together, num_preemptions = _texts(sampler, seeded, options=tight, chunk_tokens=7)

            assert num_preemptions > 0
            assert together == alone


def _texts(
    sampler: SamplerPlugin,
    requests: list[SamplingParams],
    *,
    num_choices: int = 1,
    options: FakeOptions | None = None,
    chunk_tokens: int = 256,
    first: int = 0,
) -> tuple[list[dict[int, list[int]]], int]:
    """Run all requests at once; return the token ids of each by choice, and the number of preemptions."""
    settings = EngineSettings(slots=4, prefill_chunk_tokens=chunk_tokens)
    engine = StepEngine(FakeRunner(options), settings, {sampler.name: sampler})
    ids: dict[str, dict[int, list[int]]] = {}
    for number, params in enumerate(requests, first):
        stopping = StopParams(max_tokens=40, ignore_eos=True)
        name = f"kit-{next(_numbers)}"
        request = EngineRequest(request_id=name, sampling=params, stopping=stopping, num_choices=num_choices)
        prompt = [97 + (number + place) % 5 for place in range(30)]
        engine.check(request, len(prompt))
        engine.add(request, prompt)
        ids[name] = {}
    for name, event in events_of(engine):
        if isinstance(event, EnginehouseError):
            raise event
        if isinstance(event, TextDelta):
            ids[name].setdefault(event.choice, []).extend(event.token_ids)
    num_preemptions = engine.stats().num_preemptions
    engine.close()
    return list(ids.values()), num_preemptions
