"""Several samplers at once give the same text whatever happens around it; each alone is in test_contract.py."""

import itertools

import pytest

from enginehouse.contract.types import EngineRequest, EngineSettings, StopParams, TextDelta
from enginehouse.engine.loop import StepEngine
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

from .drawing import params_of

FIELDS = [
    {"dynatemp_range": 0.7, "xtc_probability": 0.5, "xtc_threshold": 0.05, "top_n_sigma": 2.0, "typical_p": 0.9},
    {"adaptive_target": 0.3, "min_p": 0.02, "xtc_probability": 0.3, "xtc_threshold": 0.05},
    {"mirostat": 2, "mirostat_tau": 4.0, "dry_multiplier": 0.5, "dynatemp_range": 0.4},
]
_ids = itertools.count()


@pytest.fixture(scope="module")
def samplers():
    return PluginRegistry.load(PluginsSettings(allow=("samplers",))).samplers


def request_of(samplers, fields, *, seed=7, num_choices=1, max_tokens=40):
    return EngineRequest(
        request_id=f"r{next(_ids)}",
        num_choices=num_choices,
        sampling=params_of(fields, samplers, seed=seed),
        stopping=StopParams(max_tokens=max_tokens, ignore_eos=True),
    )


def texts_of(samplers, requests, options=None, **settings):
    """The token ids of every choice, by request; all requests at once."""
    engine = StepEngine(FakeRunner(options), EngineSettings(**settings), samplers)
    ids = {request.request_id: {} for request in requests}
    for number, request in enumerate(requests):
        prompt = [97 + (number + place) % 5 for place in range(30)]
        engine.check(request, len(prompt))
        engine.add(request, prompt)
    while engine.has_work():
        for request_id, event in engine.step():
            if isinstance(event, TextDelta):
                ids[request_id].setdefault(event.choice, []).extend(event.token_ids)
            assert not isinstance(event, Exception), event
    return [ids[request.request_id] for request in requests], engine.stats().num_preemptions


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_text_is_the_same_under_preemption_and_in_chunks(samplers, fields):
    requests = [request_of(samplers, fields, seed=seed, max_tokens=60) for seed in range(4)]
    alone = [texts_of(samplers, [*requests[:number], request])[0][-1] for number, request in enumerate(requests)]
    tight = FakeOptions(context=120, slots=4, cache_tokens=200)
    together, num_preemptions = texts_of(samplers, requests, tight, slots=4, prefill_chunk_tokens=7)

    assert num_preemptions > 0
    assert together == alone
    assert len({tuple(ids[0]) for ids in together}) == 4


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_choices_have_states_of_their_own(samplers, fields):
    """The first of three choices is the one of a request with one; the others differ."""
    (three,), _ = texts_of(samplers, [request_of(samplers, fields, num_choices=3)])
    (one,), _ = texts_of(samplers, [request_of(samplers, fields)])

    assert three[0] == one[0]
    assert len({tuple(ids) for ids in three.values()}) == 3
