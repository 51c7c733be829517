"""A request that kills workers is refused, and nobody else is: neither who ran beside it nor who came later."""

from __future__ import annotations

import os

import pytest

from enginehouse_testkit.waiting import wait_until

from .rig import Rig, fake, rig

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")

POISON = "drink this ~"
AT = ord("~")


@pytest.fixture(scope="module")
def expected():
    with rig({"m": fake()}) as server:
        return [server.ask(f"guest {n}").wait().text for n in range(4)]


def state_of(server: Rig) -> tuple[str, int]:
    with server.client() as client:
        shown = client.get("/v1/models/m").json()
    return shown["state"], shown["num_restarts"]


@pytest.mark.parametrize("fault", ["abort_at_token", "hang_at_token"])
def test_poison_is_refused_and_its_neighbours_are_not(expected, fault, turn):
    with rig({"m": fake(step_timeout_s=1.0, faults={fault: AT})}) as server:
        guests = [server.ask(f"guest {n}") for n in range(2)]
        for guest in guests:
            guest.wait_chunks(3)
        poison = server.ask(POISON, stream=bool(turn % 2))
        late = [server.ask(f"guest {n}") for n in range(2, 4)]
        poison.wait()

        assert poison.error is not None
        assert poison.error["code"] == "request_kills_worker"
        assert "please do not send it again" in poison.error["message"]
        assert poison.status == (200 if turn % 2 else 422)
        assert [guest.wait().text for guest in [*guests, *late]] == expected
        assert all(guest.is_complete for guest in [*guests, *late])
        assert server.ask("guest 0").wait().text == expected[0]


def test_poison_alone_costs_two_workers():
    with rig({"m": fake(faults={"abort_at_token": AT})}) as server:
        pids = {worker.pid for worker in server.workers()}
        answer = server.ask(POISON, stream=False).wait()

        assert answer.status == 422
        assert answer.error is not None
        assert answer.error["type"] == "invalid_request_error"
        wait_until(lambda: state_of(server) == ("ready", 2), lambda: f"the third worker: {state_of(server)}")
        after = {worker.pid for worker in server.workers()}
        assert pids.isdisjoint(after)

        again = server.ask(POISON, stream=False, seed=3).wait()
        assert again.status == 422
        assert again.error is not None
        assert again.error["code"] == "request_kills_worker"
        assert {worker.pid for worker in server.workers()} == after, "nobody had to die to know that"


def test_two_poisons_at_once_are_both_found(expected):
    with rig({"m": fake(faults={"abort_at_token": AT})}) as server:
        guest = server.ask("guest 0")
        guest.wait_chunks(2)
        poisons = [server.ask(f"{POISON} {n}") for n in range(2)]
        codes = [(poison.wait().error or {}).get("code") for poison in poisons]

        assert codes == ["request_kills_worker"] * 2
        assert guest.wait().text == expected[0]


def test_accident_is_not_held_against_anybody(expected, tmp_path):
    """The worker aborts once; with the same requests it does not abort again."""
    with rig({"m": fake(faults={"abort_at_step": 9, "latch": str(tmp_path / "latch")})}) as server:
        guests = [server.ask(f"guest {n}") for n in range(4)]

        assert [guest.wait().text for guest in guests] == expected
        assert all(guest.is_complete for guest in guests)
