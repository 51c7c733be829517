"""States of a model's worker: the table of transitions, and the events that are published for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

import pytest

from enginehouse.serving.leases import Uses, Waiters
from enginehouse.serving.lifecycle import TRANSITIONS, Drain, Event, Lifecycle, ModelEvent, ModelState

EDGES = [(state, event, following) for state, row in TRANSITIONS.items() for event, following in row.items()]


class Watched:
    """A lifecycle and what it has published."""

    def __init__(self, state: ModelState = "unloaded") -> None:
        self.events: list[ModelEvent] = []
        self.lifecycle = Lifecycle("m", 7, self.events.append, state)

    def play(self, events: Sequence[Event]) -> list[str]:
        """Send events; returns the kinds of the published ones."""
        del self.events[:]
        for event in events:
            self.lifecycle.move(event)
        return [event.kind for event in self.events]


def shortest_way_to(state: ModelState) -> list[Event]:
    """Events that lead from unloaded to a state."""
    ways: dict[ModelState, list[Event]] = {"unloaded": []}
    queue: deque[ModelState] = deque(ways)
    while state not in ways:
        last = queue.popleft()
        for event, following in TRANSITIONS[last].items():
            if following not in ways:
                ways[following] = [*ways[last], event]
                queue.append(following)
    return ways[state]


def test_table_has_every_state_and_every_event():
    assert set(TRANSITIONS) == set(get_args(ModelState))
    assert {following for _, _, following in EDGES} == set(get_args(ModelState))
    assert {event for _, event, _ in EDGES} == set(get_args(Event))


@pytest.mark.parametrize("state", TRANSITIONS)
def test_every_state_can_fail_be_closed_and_be_reached_again(state):
    assert TRANSITIONS[state]["failed"] == "failed"
    assert TRANSITIONS[state]["closed"] == "unloaded"

    watched = Watched()
    watched.play(shortest_way_to(state))
    assert watched.lifecycle.state == state


@pytest.mark.parametrize(("state", "event", "following"), EDGES)
def test_each_transition_is_taken_and_published_if_the_state_changes(state, event, following):
    watched = Watched(state)
    watched.lifecycle.error, watched.lifecycle.progress = "before", 0.5
    watched.lifecycle.move(event, "why")

    assert watched.lifecycle.state == following
    is_told = state != following and event not in ("drain", "closed")
    assert [(told.model, told.instance, told.text) for told in watched.events] == [("m", 7, "why")] * is_told
    keeps = event in ("drain", "stayed")
    assert watched.lifecycle.error == ("before" if keeps else "why")
    assert watched.lifecycle.progress == (0.5 if keeps else float(following == "ready"))


@pytest.mark.parametrize("state", TRANSITIONS)
def test_no_other_event_is_possible(state):
    for event in set(get_args(Event)) - set(TRANSITIONS[state]):
        watched = Watched(state)
        with pytest.raises(KeyError):
            watched.lifecycle.move(event)

        assert (watched.lifecycle.state, watched.events) == (state, [])


@pytest.mark.parametrize(
    ("events", "kinds"),
    [
        (["load", "opened", "drain", "ended"], ["loading", "ready", "unloaded"]),
        (["load", "opened", "died", "opened"], ["loading", "ready", "restarting", "restarted"]),
        (["load", "died", "died", "failed", "load"], ["loading", "restarting", "failed", "loading"]),
        (["load", "opened", "drain", "stayed"], ["loading", "ready", "ready"]),
        (["load", "opened", "closed"], ["loading", "ready"]),
    ],
)
def test_listeners_hear_of_changes_only(events, kinds):
    assert Watched().play(cast(list[Event], events)) == kinds


async def test_worker_that_restarts_while_it_is_drained_is_drained_further():
    watched = Watched("ready")
    uses: Uses[str] = Uses(on_change=watched.lifecycle.touch)

    async def end_worker() -> None:
        watched.lifecycle.move("ended")

    drain: Drain[str] = Drain(
        lifecycle=watched.lifecycle, uses=uses, waiters=Waiters(), end_worker=end_worker, on_end=lambda: None
    )
    lease = uses.add("model")
    unloading = drain.begin(60.0)
    assert watched.lifecycle.state == "draining"
    watched.lifecycle.move("died", "killed")
    watched.lifecycle.move("opened")
    lease.release()

    assert await unloading
    assert watched.lifecycle.state == "unloaded"
    assert [event.kind for event in watched.events] == ["restarting", "restarted", "unloaded"]


def test_documented_table_is_the_code_s():
    text = (Path(__file__).parents[3] / "docs" / "recovery.md").read_text(encoding="utf-8")
    table = text.partition("| model state | event | next state | when |")[2].partition("\n\n")[0]
    documented: dict[str, dict[str, str]] = {}
    state = ""
    for row in table.splitlines()[2:]:
        name, event, following, when = (cell.strip() for cell in row.strip("|").split("|"))
        assert when
        state = name or state
        documented.setdefault(state, {})[event] = following

    assert documented == TRANSITIONS
