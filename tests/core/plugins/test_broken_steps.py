"""Steps, decoders, drafters and exit policies that break in a worker: named, contained, and without blame."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from .harness import FlakyServer, Place, cells

CONFIG = """
[plugins]
deny = ["llguidance"]
[models.broken]
source = "."
backend = "fake"
step_timeout_s = 1.0
[models.drafted]
source = "."
backend = "fake"
load = "lazy"
drafters = ["flaky"]
step_timeout_s = 1.0
[models.exits]
source = "."
backend = "fake"
num_layers = 4
load = "lazy"
exit_policy = "flaky"
step_timeout_s = 1.0
"""
STEP = {"flaky_step": True, "temperature": 1, "seed": 1}
PROCESS = {"flaky_process": True}
CHOICE = {"structured_outputs": {"choice": ["a"]}}
DRAFTED, EXITS = {"model": "drafted"}, {"model": "exits"}
NO_RESULT = ("raise", "exit", "slow", "end", "hang")
NAMED = "plugin_failed"
FATAL = {"ended": NAMED, "is_remembered": True}
ALL = ("raise", "type", "exit", "interrupt", "slow", "end", "hang")

PLACES = [
    Place(name="sampler.create", fields=STEP),
    Place(name="sampler.its step", fields=STEP, deeds=ALL, quick=("raise", "type", "interrupt")),
    Place(name="logits processor.create", fields=PROCESS, owner="flaky_processor"),
    Place(name="logits processor.process", fields=PROCESS, owner="flaky_processor", deeds=ALL, quick=(*ALL[:2], "end")),
    Place(name="structured decoder.compile", fields=CHOICE, code="invalid_value"),
    Place(name="structured decoder.start", fields=CHOICE),
    Place(name="structured decoder.fill_bitmask", fields=CHOICE, deeds=NO_RESULT, **FATAL),
    Place(name="structured decoder.accept", fields=CHOICE, deeds=NO_RESULT, **FATAL),
    Place(name="structured decoder.forced_token_ids", fields=CHOICE),
    Place(name="structured decoder.is_finished", fields=CHOICE),
    Place(name="drafter.open", fields=DRAFTED, outcome="goes on", deeds=NO_RESULT, ended=NAMED),
    Place(name="drafter.propose", fields=DRAFTED, outcome="goes on", deeds=ALL, ended=NAMED),
    Place(name="drafter.close", fields=DRAFTED, outcome="goes on", deeds=NO_RESULT, ended=NAMED),
    Place(name="exit policy.leaves", fields=EXITS, outcome="goes on", deeds=ALL, quick=("raise",), ended=NAMED),
]
LOADS = [
    Place(name="drafter.bind", fields=DRAFTED, quick=("raise",)),
    Place(name="exit policy.bind", fields=EXITS, quick=("raise",)),
]


@pytest.fixture(scope="module")
def flaky(start_flaky: Callable[[str], FlakyServer]) -> FlakyServer:
    return start_flaky(CONFIG)


@pytest.mark.parametrize(("place", "deed"), cells(PLACES))
def test_step_that_breaks(flaky: FlakyServer, place: Place, deed: str) -> None:
    if place.name.startswith("exit policy"):
        flaky.load("exits")  # a policy that has failed is off
    flaky.check_cell(place, deed)


@pytest.mark.parametrize(("place", "deed"), cells(LOADS))
def test_step_that_breaks_while_a_model_is_loaded(flaky: FlakyServer, place: Place, deed: str) -> None:
    model = str(place.fields["model"])
    expected = flaky.text_of(model)
    response = flaky.break_at(place.name, deed, lambda: flaky.load(model))

    flaky.check_load(response, place, deed)
    flaky.load(model)
    assert flaky.text_of(model) == expected, "after a reload"


def test_request_that_a_plugin_stops_is_not_blamed_and_may_be_sent_again(flaky: FlakyServer) -> None:
    for _ in range(2):
        response = flaky.break_at("logits processor.process", "end", lambda: flaky.chat(**PROCESS))

        assert response.json()["error"]["code"] == "plugin_failed"
    assert flaky.chat(**PROCESS).status_code == 200


def test_request_that_a_plugin_refuses_is_the_clients_mistake(flaky: FlakyServer) -> None:
    response = flaky.break_at("sampler.create", "refuse", lambda: flaky.chat(**STEP))

    assert response.status_code == 400
    assert (
        response.json()["error"]["param"] == "flaky_step" and "at most 3 words" in response.json()["error"]["message"]
    )


def test_failures_and_drafters_are_counted_by_name(flaky: FlakyServer) -> None:
    flaky.break_at("logits processor.process", "raise", lambda: flaky.chat(**PROCESS))
    flaky.load("drafted")  # step costs and acceptance rates measured before decide whether drafts are used
    details: httpx.Response = flaky.chat("drafted", max_tokens=40, ignore_eos=True)
    metrics = flaky.client.get("/metrics").text

    assert 'enginehouse_plugin_failures_total{kind="logits processor",plugin="flaky_kit"}' in metrics
    drafted = details.json()["enginehouse"]["drafters"]["flaky"]["drafted_tokens"]
    assert drafted > 0
    assert 'enginehouse_drafted_tokens_total{drafter="flaky",model="drafted"}' in metrics
