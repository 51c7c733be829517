"""Backends that break, in the server and in the worker: named, and contained to their model and request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .harness import FlakyServer, Place, cells

CONFIG = """
[limits]
plugin_timeout_s = 3.0
[models.broken]
source = "."
backend = "flaky"
slots = 4
step_timeout_s = 1.0
[models.uncached]
source = "."
backend = "flaky"
slots = 4
prefix_cache = false
load = "lazy"
[models.own]
source = "."
backend = "flaky_engine"
[models.matched]
source = "fake"
load = "lazy"
"""
ALL = ("raise", "type", "exit", "slow", "end", "hang")
NO_RESULT = ("raise", "exit", "slow", "end", "hang")
RAISES = ("raise",)
FATAL = {"ended": "plugin_failed", "is_remembered": True}

PLACES = [
    Place(name="backend.forward", deeds=ALL, **FATAL),
    Place(name="backend.host of its logits", is_of_request=False, deeds=ALL, **FATAL),
    Place(
        name="backend.open_sequence",
        is_of_request=False,
        deeds=ALL,
        fields={"cache_prompt": False},
        quick=("raise", "end"),
        **FATAL,
    ),
    Place(name="backend.fork", deeds=ALL, outcome="goes on"),
    Place(name="backend.free_tokens", is_of_request=False, deeds=("raise", "type", "exit", "slow")),
    Place(name="backend.encode of its tokenizer", deeds=ALL, **FATAL),
]
OWN = {"model": "own"}
ENGINE = [
    Place(name="backend.submit", fields=OWN, owner="flaky_engine", deeds=("raise", "type", "exit", "slow", "hang")),
    Place(name="backend.its stream", fields=OWN, owner="flaky_engine", deeds=("raise", "type", "exit", "slow", "hang")),
]
LOADS = [
    Place(name="backend.probe", quick=RAISES),
    Place(name="backend.match", quick=RAISES, outcome="goes on", fields={"model": "matched"}),
    Place(name="backend.estimate", quick=RAISES, outcome="goes on"),
    Place(name="backend.open", quick=RAISES),
]


@pytest.fixture(scope="module")
def flaky(start_flaky: Callable[[str], FlakyServer]) -> FlakyServer:
    return start_flaky(CONFIG)


@pytest.mark.parametrize(("place", "deed"), cells([*PLACES, *ENGINE]))
def test_backend_that_breaks(flaky: FlakyServer, place: Place, deed: str) -> None:
    flaky.check_cell(place, deed)


@pytest.mark.parametrize("deed", NO_RESULT[:2])
def test_backend_that_cannot_free_a_sequence(flaky: FlakyServer, deed: str) -> None:
    place = Place(name="backend.free_sequence", outcome="goes on")
    expected = flaky.text_of("uncached")
    response = flaky.break_at(place.name, deed, lambda: flaky.chat("uncached"))

    flaky.check_response(response, place, deed, expected)
    assert flaky.text_of("uncached") == expected


@pytest.mark.parametrize(("place", "deed"), cells(LOADS))
def test_backend_that_breaks_while_a_model_is_loaded(flaky: FlakyServer, place: Place, deed: str) -> None:
    model = str(place.fields.get("model", "broken"))
    response = flaky.break_at(place.name, deed, lambda: flaky.load(model))

    flaky.check_load(response, place, deed)
    assert flaky.load(model).status_code == 200
    assert flaky.text_of(model) == flaky.text
