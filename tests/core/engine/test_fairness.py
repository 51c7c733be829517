"""Whose turn it is in the engine's queue: callers share by tokens, however many requests each has waiting."""

from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.contract.errors import EnginehouseError, QueueTimeout
from enginehouse.contract.types import EngineRequest, EngineSettings, RequestFinished, StopParams
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.turns import FairShares
from enginehouse_testkit.fake_options import FakeOptions
from enginehouse_testkit.fake_runner import FakeRunner

PROMPT = [5, 6, 7, 8]


class Engine:
    """A step engine on the fake runner whose requests' ends are noted in order."""

    def __init__(self, slots: int = 1, **more) -> None:
        self.now = 0.0
        self.engine = StepEngine(
            FakeRunner(FakeOptions(slots=max(slots, 2), context=256)),
            EngineSettings(slots=slots, **more),
            {},
            clock=lambda: self.now,
            on_started=lambda owner: self.started.append(owner.request.request_id),
        )
        self.started: list[str] = []
        self.ends: list[str] = []
        self.errors: dict[str, EnginehouseError] = {}
        self.num_steps = 0

    def add(self, request_id: str, caller: str, *, tokens: int = 4, prompt=PROMPT, **fields) -> None:
        request = EngineRequest(
            request_id=request_id,
            caller=caller,
            stopping=StopParams(max_tokens=tokens, ignore_eos=True),
            **fields,
        )
        self.engine.add(request, list(prompt))

    def step(self) -> None:
        self.num_steps += 1
        for request_id, output in self.engine.step():
            if isinstance(output, RequestFinished):
                self.ends.append(request_id)
            elif isinstance(output, EnginehouseError):
                self.errors[request_id] = output

    def run(self) -> list[str]:
        while self.engine.has_work():
            self.step()
        return self.ends


def test_many_requests_of_one_do_not_delay_anothers_single_one() -> None:
    engine = Engine()
    for number in range(100):
        engine.add(f"a{number}", "alice")
    engine.step()
    engine.add("b", "bob")
    ends = engine.run()

    assert ends.index("b") <= 2
    assert [end for end in ends if end != "b"] == [f"a{number}" for number in range(100)]


def test_a_single_request_of_many_callers_is_served_in_turn() -> None:
    engine = Engine()
    for number in range(5):
        engine.add(f"a{number}", "alice")
    for caller in ("bob", "carol", "dave"):
        engine.add(caller, caller)
    ends = engine.run()

    assert ends[0] == "a0" and sorted(ends[1:4]) == ["bob", "carol", "dave"]


def test_callers_get_equal_shares_of_tokens_not_of_requests() -> None:
    engine = Engine()
    for number in range(12):
        engine.add(f"long{number}", "alice", tokens=40)
    for number in range(60):
        engine.add(f"short{number}", "bob", tokens=5)
    ends = engine.run()
    before_last_long = ends[: ends.index("long5") + 1]

    # 6 long answers are 240 tokens and their prompts; as many tokens in short ones.
    assert 30 <= sum(end.startswith("short") for end in before_last_long) <= 50


def test_a_pause_saves_nothing_up() -> None:
    engine = Engine()
    engine.add("b0", "bob")
    engine.run()
    for number in range(20):
        engine.add(f"a{number}", "alice")
    for _ in range(40):
        engine.step()  # alice has been served alone for long
    for number in range(10):
        engine.add(f"b{number + 1}", "bob")
    engine.ends.clear()
    ends = engine.run()
    first = ends[:10]

    assert 3 <= sum(end.startswith("b") for end in first) <= 7


def test_priority_comes_before_turns() -> None:
    engine = Engine()
    engine.add("a0", "alice")
    engine.step()
    for number in range(3):
        engine.add(f"b{number}", "bob", priority=1)
    for number in range(1, 4):
        engine.add(f"a{number}", "alice", priority=0)

    assert engine.run() == ["a0", "a1", "a2", "a3", "b0", "b1", "b2"]


def test_without_callers_the_order_is_that_of_arrival() -> None:
    engine = Engine(slots=2)
    for number in range(10):
        engine.add(f"r{number}", "", tokens=3 + number % 3)
    engine.run()

    assert engine.started == [f"r{number}" for number in range(10)]


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 4),
    loads=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=2, max_size=5),
    late=st.integers(0, 30),
)
def test_nobody_waits_for_more_than_their_turn(slots: int, loads: list[tuple[int, int]], late: int) -> None:
    """Property: a single request that comes late starts after at most two requests of each other caller."""
    engine = Engine(slots=slots)
    for caller, (num_requests, tokens) in enumerate(loads):
        for number in range(num_requests):
            engine.add(f"{caller}-{number}", f"caller-{caller}", tokens=tokens)
    for _ in range(late):
        if engine.engine.has_work():
            engine.step()
    num_started = len(engine.started)
    engine.add("late", "late", tokens=1)
    while "late" not in engine.started:
        engine.step()
    before = engine.started[num_started : engine.started.index("late")]
    # What a caller may be behind by is one request of the longest kind, and the slots that were filled together.
    most = max(4 + 2 * tokens for _, tokens in loads)
    least = min(4 + 2 * tokens for _, tokens in loads)
    for caller in range(len(loads)):
        num_before = sum(name.startswith(f"{caller}-") for name in before)
        assert num_before <= slots * (1 + most / least) + 1, (before, engine.started[:num_started])
    engine.run()
    assert len(engine.ends) == sum(count for count, _ in loads) + 1


def test_requests_that_wait_too_long_end_and_free_their_place() -> None:
    engine = Engine(slots=1)
    engine.add("running", "alice", tokens=50)
    engine.step()
    engine.add("impatient", "alice", queue_timeout_s=2.0)
    engine.add("patient", "alice")
    engine.now = 1.9
    engine.step()
    assert not engine.errors
    engine.now = 2.0
    engine.step()

    assert isinstance(engine.errors["impatient"], QueueTimeout) and "2 s" in engine.errors["impatient"].message
    assert engine.engine.stats().num_waiting == 1
    assert engine.run() == ["running", "patient"]


def test_a_request_that_has_started_does_not_time_out_in_the_queue() -> None:
    engine = Engine(slots=1)
    engine.add("a", "alice", tokens=20, queue_timeout_s=1.0)
    engine.step()
    engine.now = 100.0

    assert engine.run() == ["a"] and not engine.errors


def test_counts_of_callers_do_not_pile_up() -> None:
    shares = FairShares()
    for number in range(5000):
        shares.arrive(f"caller-{number}", ())
        shares.start(f"caller-{number}", 10)

    assert sum(shares.of(f"caller-{number}") > 0 for number in range(5000)) <= 1025
