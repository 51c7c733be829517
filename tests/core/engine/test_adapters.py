"""Adapters in the serving loop: what sequences share, whose turn it is, and what is loaded when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from enginehouse.contract.adapters import Adapter, cache_key, digest_of
from enginehouse.contract.backend import ForwardOutput, Span
from enginehouse.contract.errors import AdapterRefused
from enginehouse.contract.types import EngineRequest, EngineSettings
from enginehouse.engine.loop import StepEngine
from enginehouse_testkit.fake_adapters import write_fake_adapter
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

from .harness import Result, drive, make_request, prompt_of, run

KINDS = pytest.mark.parametrize("kind", ["per_pass", "mixed"])


class Watched(FakeRunner):
    """Notes the adapters of each pass, and what is loaded."""

    def __init__(self, options: FakeOptions) -> None:
        super().__init__(options)
        self.passes: list[list[tuple[tuple[int, float], ...]]] = []
        self.loaded: list[int] = []

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        self.passes.append([span.adapter for span in spans])
        return super().forward(spans)

    def load_adapter(self, path: Path) -> int:
        handle = super().load_adapter(path)
        self.loaded.append(handle)
        return handle

    def unload_adapter(self, adapter: int) -> None:
        super().unload_adapter(adapter)
        self.loaded.remove(adapter)


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    paths = [write_fake_adapter(tmp_path / f"{number}.json", number) for number in range(4)]
    return [Adapter(path.stem, str(path), digest_of(path)) for path in paths]


_INVOCATION = (7, 8)


@pytest.fixture
def activated(tmp_path: Path) -> Adapter:
    path = write_fake_adapter(tmp_path / "activated.json", 50, _INVOCATION)
    return Adapter("activated", str(path), digest_of(path))


def prompt_with(length: int, *places: int) -> list[int]:
    """Return a prompt with the invocation tokens at some places."""
    prompt = [token_id if token_id not in _INVOCATION else 9 for token_id in prompt_of(3, length)]
    for place in places:
        prompt[place : place + len(_INVOCATION)] = _INVOCATION
    return prompt


def engine_over(
    kind: str, max_adapters: int = 8, chunk: int | None = None, **options: object
) -> tuple[StepEngine, Watched]:
    runner = Watched(FakeOptions(mixing=kind, **options))  # type: ignore[arg-type]
    return StepEngine(runner, EngineSettings(max_adapters=max_adapters, prefill_chunk_tokens=chunk), {}), runner


def request_with(*adapters: Adapter, **fields: object) -> EngineRequest:
    return make_request(adapters=adapters, **fields)


@KINDS
def test_sequences_with_the_same_prompt_share_nothing_across_adapters(kind: str, adapters: list[Adapter]) -> None:
    """Neither with cached sequences nor with running ones; those of one adapter do share."""
    prompt = prompt_of(1, 100)
    sets: list[tuple[Adapter, ...]] = [
        (),
        (adapters[0],),
        (adapters[1],),
        (msgspec.structs.replace(adapters[0], scale=0.5),),
        (adapters[0], adapters[1]),
    ]
    alone = [run(engine_over(kind)[0], [(request_with(*used), prompt)])[0].text for used in sets]
    engine, _ = engine_over(kind)
    first = [run(engine, [(request_with(*used), prompt)])[0] for used in sets]
    second = [run(engine, [(request_with(*used), prompt)])[0] for used in sets]
    together = run(engine_over(kind)[0], [(request_with(*used), prompt) for used in sets])

    assert len({text[0] for text in alone}) == len(sets)
    assert [one.text for one in first] == [one.text for one in second] == [one.text for one in together] == alone
    assert [one.summary.usage.cached_tokens for one in first if one.summary] == [0] * len(sets)
    assert all(one.summary is not None and one.summary.usage.cached_tokens == 99 for one in second)
    assert all(one.summary is not None and one.summary.usage.cached_tokens == 0 for one in together)


def test_no_text_of_a_client_names_the_namespace_of_an_adapter(adapters: list[Adapter]) -> None:
    adapted = cache_key("", (adapters[0],))

    assert cache_key(adapted, ()) != adapted
    assert cache_key("salt", ()) == "salt"
    assert len({cache_key(space, used) for space in ("", "a", adapted) for used in [(), (adapters[0],)]}) == 6


def test_sets_take_turns_where_a_pass_has_one(adapters: list[Adapter]) -> None:
    """Each pass has one set; with three at work, three passes have them all, and begin with that of the pass before."""
    engine, runner = engine_over("per_pass")
    sets = [(), (adapters[0],), (adapters[1],)]
    run(engine, [(request_with(*used, ignore_eos=True), prompt_of(seed, 5)) for seed, used in enumerate(sets)])

    assert all(len(set(one)) == 1 for one in runner.passes)
    turns = [one[0] for one in runner.passes]
    rounds = [turns[start : start + 3] for start in range(0, len(turns), 3)]
    assert len(rounds) == 20 and all(len(set(one)) == 3 for one in rounds)
    assert all(before[-1] == after[0] for before, after in pairwise(rounds))
    assert runner.loaded == [1, 2]


def test_one_pass_has_all_sets_where_they_mix(adapters: list[Adapter]) -> None:
    engine, runner = engine_over("mixed")
    sets = [(), (adapters[0],), (adapters[1],)]
    run(engine, [(request_with(*used, ignore_eos=True), prompt_of(seed, 5)) for seed, used in enumerate(sets)])

    assert len(runner.passes) == 20
    assert all(len(set(one)) == 3 for one in runner.passes)


@KINDS
def test_answers_are_the_same_in_every_company(kind: str, adapters: list[Adapter], activated: Adapter) -> None:
    """Over a small cache, so that sequences are preempted and prefixes evicted; several choices, drawn with a seed."""
    randomness = random.Random(7)
    cases = [
        ((), *(request_with(*used, max_tokens=30, num_choices=2), prompt_with(40, 12 + seed % 3, 30)))
        for seed, used in enumerate([(), (adapters[0],), (activated,), (adapters[2],)] * 3)
    ]
    alone = [run(engine_over(kind)[0], [(request, prompt)])[0].text for _, request, prompt in cases]
    engine, _ = engine_over(kind, cache_tokens=300, context=128)
    results: dict[str, Result] = {}
    for _, request, prompt in cases:
        results[request.request_id] = Result()
        engine.add(request, prompt)
        for _ in range(randomness.randrange(4)):
            for request_id, event in engine.step():
                results[request_id].take(event)
    drive(engine, results)

    assert [one.text for one in results.values()] == alone
    assert engine.stats().num_preemptions


@KINDS
def test_least_recently_used_adapter_leaves_and_one_in_use_stays(kind: str, adapters: list[Adapter]) -> None:
    engine, runner = engine_over(kind, max_adapters=2)
    for used in (0, 1, 0, 2):
        run(engine, [(request_with(adapters[used]), prompt_of(used, 5))])

    assert runner.loaded == [1, 3] and engine.stats().num_adapters == 2

    results = run(engine, [(request_with(one), prompt_of(5, 5)) for one in adapters])  # two of four must wait
    assert all(one.error is None and one.summary is not None for one in results)
    assert len(runner.loaded) == 2


@KINDS
def test_removed_adapter_leaves_with_its_last_sequence(kind: str, adapters: list[Adapter]) -> None:
    engine, runner = engine_over(kind)
    request = request_with(adapters[0])
    alone = run(engine_over(kind)[0], [(request, prompt_of(1, 5))])[0]
    results = {request.request_id: Result()}
    engine.add(request, prompt_of(1, 5))
    for request_id, event in engine.step():
        results[request_id].take(event)
    engine.remove_adapter(adapters[0].digest)
    was_loaded = list(runner.loaded)
    drive(engine, results)

    assert was_loaded == [1] and not runner.loaded
    assert results[request.request_id].text == alone.text


def test_adapter_whose_file_has_changed_is_refused_and_others_go_on(adapters: list[Adapter]) -> None:
    engine, _ = engine_over("mixed")
    write_fake_adapter(Path(adapters[0].path), 99)
    Path(adapters[1].path).unlink()
    results = run(engine, [(request_with(*used), prompt_of(1, 5)) for used in [(adapters[0],), ()]])
    with pytest.raises(AdapterRefused, match="cannot be read"):
        engine.add(request_with(adapters[1]), prompt_of(1, 5))

    assert isinstance(results[0].error, AdapterRefused) and "changed" in results[0].error.message
    assert results[1].summary is not None
    assert not engine.has_work()


def test_request_with_more_adapters_than_places_is_refused(adapters: list[Adapter]) -> None:
    engine, _ = engine_over("mixed", max_adapters=2)
    result = run(engine, [(request_with(*adapters[:3]), prompt_of(1, 5))])[0]

    assert isinstance(result.error, AdapterRefused) and "max_adapters" in result.error.message


# -- activated LoRA --------------------------------------------------------------------------------


def answer_of(prompt: list[int], place: int, path: str, **options: object) -> list[int]:
    """Decode greedily without an engine: the first ``place`` tokens by the base model, the others with the adapter."""
    runner = FakeRunner(FakeOptions(mixing="mixed", **options))  # type: ignore[arg-type]
    adapter = ((runner.load_adapter(Path(path)), 1.0),)
    handle, token_ids = runner.open_sequence(), list(prompt)
    if place:
        runner.forward([Span(handle, 0, np.array(prompt[:place], np.int32), "none")])
    done = place
    for _ in range(20):
        rows = runner.forward([Span(handle, done, np.array(token_ids[done:], np.int32), "last", adapter=adapter)])
        done = len(token_ids)
        token_ids.append(int(rows.host()[0].argmax()))
    return token_ids[len(prompt) :]


@KINDS
@pytest.mark.parametrize("options", [{}, {"num_checkpoints": 8}, {"window": 32}, {"fork": "none"}], ids=str)
def test_an_activated_adapter_acts_from_its_tokens_on(
    kind: str, options: dict[str, object], activated: Adapter
) -> None:
    """From the first of them, at their last occurrence; with chunks, neighbours, several choices and preemption."""
    cases = [((0,), 0), ((40,), 40), ((10, 40), 40), ((97,), 97), ((98,), 98)]
    wanted = [answer_of(prompt_with(100, *places), place, activated.path, **options) for places, place in cases]
    for chunk in (None, 7):
        engine, _ = engine_over(kind, chunk=chunk, cache_tokens=700, **options)
        requests = [
            (request_with(activated, ignore_eos=True, num_choices=2), prompt_with(100, *places)) for places, _ in cases
        ]
        beside = [(request_with(ignore_eos=True), prompt_of(seed, 60)) for seed in range(3)]
        results = run(engine, [*requests, *beside])[: len(cases)]

        for result, token_ids in zip(results, wanted, strict=True):
            assert result.token_ids == {0: token_ids, 1: token_ids}


def test_what_stands_before_its_tokens_is_shared_with_the_base_model(activated: Adapter) -> None:
    """In both directions, and never more; a later turn, whose last invocation is another one, reuses no more either."""
    engine, _ = engine_over("mixed")
    first, later = prompt_with(100, 60), prompt_with(140, 60, 120)
    used = {
        "adapter": (request_with(activated), first),
        "base": (request_with(), first),
        "again": (request_with(activated), first),
        "later": (request_with(activated), later),
    }
    results = {name: run(engine, [one])[0] for name, one in used.items()}
    alone = {name: run(engine_over("mixed")[0], [one])[0] for name, one in used.items()}
    cached = {name: one.summary.usage.cached_tokens for name, one in results.items() if one.summary is not None}

    assert cached == {"adapter": 0, "base": 60, "again": 60, "later": 100}
    assert [one.text for one in results.values()] == [one.text for one in alone.values()]


def test_running_sequences_share_what_stands_before_its_tokens(activated: Adapter) -> None:
    prompt = prompt_with(200, 150)
    cases = [(request_with(*used, ignore_eos=True), prompt) for used in [(), (activated,), (activated,), ()]]
    together = run(engine_over("mixed")[0], cases)
    alone = [run(engine_over("mixed")[0], [one])[0] for one in cases]

    assert [one.text for one in together] == [one.text for one in alone]
    assert [one.summary.usage.cached_tokens for one in together if one.summary is not None] == [0, 150, 150, 199]


def test_an_activated_adapter_is_refused_where_it_could_not_act(activated: Adapter, adapters: list[Adapter]) -> None:
    engine, _ = engine_over("mixed")
    with pytest.raises(AdapterRefused, match=r"does not have its invocation tokens \(7, 8\)"):
        engine.add(request_with(activated), prompt_with(20))
    with pytest.raises(AdapterRefused, match="no other adapters"):
        engine.add(request_with(adapters[0], activated), prompt_with(20, 5))

    assert not engine.has_work()


def test_invocation_tokens_of_a_file_that_has_changed_are_not_remembered(activated: Adapter) -> None:
    """A request that was refused for the file must not change what the right file means later."""
    engine, prompt = engine_over("mixed")[0], prompt_with(40, 30)
    right = Path(activated.path).read_bytes()
    write_fake_adapter(Path(activated.path), 50)
    refused = run(engine, [(request_with(activated), prompt)])[0]
    Path(activated.path).write_bytes(right)
    result = run(engine, [(request_with(activated, ignore_eos=True), prompt)])[0]

    assert isinstance(refused.error, AdapterRefused) and "changed" in refused.error.message
    assert result.token_ids == {0: answer_of(prompt, 30, activated.path)}
