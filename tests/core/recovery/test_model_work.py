"""Requests and questions of several callers over simulated workers that die of some of them, in simulated time."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import attrs
import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.contract.errors import EngineDead, RequestKillsWorker, WorkerDied
from enginehouse.contract.types import (
    ChoiceFinished,
    Constraint,
    EngineRequest,
    RequestFinished,
    Resume,
    Segment,
    StopParams,
    TextDelta,
)
from enginehouse.contract.usage import Usage
from enginehouse.plugins.call_notes import NotedCall
from enginehouse.recovery.generation import Generation, RecoverableRequest
from enginehouse.recovery.model_work import ModelWork
from enginehouse.recovery.recovery import Question
from enginehouse.recovery.work import _MAX_PAUSE_S
from enginehouse.settings.limits import LimitsSettings
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.request_queue import RequestQueue
from enginehouse.workers.request_table import WorkerStream, WorkObserver

_RESTART_S = 2.0
_STEP_S = 0.05


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Does not wait: time jumps instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen again"
        self.now_s += timeout
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop in which an hour takes no time."""

    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now_s


def simulate(scene: Coroutine[Any, Any, None]) -> None:
    """Run a scene in simulated time."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(scene)


class Worker(WorkerEngine):
    """Answers each request with its tokens, one each step; dies of texts that say so, and of every constraint."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._is_alive = True
        self._inside: dict[object, Callable[[EngineDead], None]] = {}
        self.died = asyncio.get_running_loop().create_future()
        self.is_killed_from_outside = False
        self.ended_by = self.ended_in = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        return self._is_alive

    async def submit(
        self, request: EngineRequest, *, resume: Resume | None = None, observer: WorkObserver | None = None
    ) -> WorkerStream:
        assert observer is not None
        loop = asyncio.get_running_loop()
        begun = [choice.token_ids for choice in resume.choices] if resume is not None else [()]
        stream: WorkerStream

        def forget() -> None:
            self._model.request_queue.leave(stream.request_id)
            loop.call_later(_STEP_S, self._left, stream, observer)

        stream = WorkerStream(request.request_id, loop, forget, observer)
        self._inside[stream] = stream.fail
        self._model.request_queue.enter(request.request_id, request.caller, request.priority)
        self._run(self._answer(stream, request, len(begun[0])))
        await stream.wait_accepted()
        return stream

    async def _answer(self, stream: WorkerStream, request: EngineRequest, num_tokens: int) -> None:
        text, length, constraint = request.segments[0].text, request.stopping.max_tokens or 0, request.constraint
        await asyncio.sleep(_STEP_S)
        stream.begin("text")
        if "kills at once" in text:
            self.die()
            return
        if stream._is_ended or not self._is_alive:
            return
        if constraint is not None:
            stream.begin("constraint")
            self.die()
            return
        stream.accept(1)
        stream.begin("request")
        while num_tokens < length and self._is_alive and not stream._is_ended:
            await asyncio.sleep(_STEP_S)
            if f"kills at {num_tokens}." in text:
                self.die()
                return
            if self._is_alive and not stream._is_ended:
                stream.push(TextDelta(0, "x", (num_tokens,)))
                num_tokens += 1
        if self._is_alive and not stream._is_ended:
            del self._inside[stream]
            self._model.request_queue.leave(request.request_id)
            stream.push(ChoiceFinished(0, "length", Usage(completion_tokens=num_tokens)))
            stream.push(RequestFinished(Usage(prompt_tokens=1, completion_tokens=num_tokens)))

    async def tokenize(  # type: ignore[override]
        self, segments: list[Segment], add_special: bool, observer: WorkObserver
    ) -> list[int]:
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

        def fail(error: EngineDead) -> None:
            if not answer.done():
                answer.set_exception(error)

        async def work() -> None:
            await asyncio.sleep(_STEP_S)
            observer.stage_began("text")
            await asyncio.sleep(_STEP_S)
            if "kills at once" in segments[0].text:
                self.die()
            elif self._is_alive:
                del self._inside[answer]
                observer.left()
                if not answer.done():
                    answer.set_result([1])

        self._inside[answer] = fail
        self._run(work())
        return await answer

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _left(self, stream: WorkerStream, observer: WorkObserver) -> None:
        if self._is_alive:
            self._inside.pop(stream, None)
            observer.left()

    def die(self, *, from_outside: bool = False) -> None:
        if not self._is_alive:
            return
        self._is_alive, self.is_killed_from_outside = False, from_outside
        self._model.lose()
        self.died.set_result(EngineDead("simulated"))
        inside, self._inside = self._inside, {}
        for fail in inside.values():
            fail(WorkerDied("simulated"))


@define(eq=False)
class Model:
    """A served and loaded model in one; starts the next worker at once, which takes a while."""

    name: str = "m"
    engine: Worker = field(init=False)
    request_queue: RequestQueue = field(factory=lambda: RequestQueue(1, LimitsSettings(max_queue=100)))
    num_deaths: int = 0
    learns_after_s: float = 0.0  # until then it offers the dead worker
    _ready: asyncio.Event = field(factory=asyncio.Event)

    def start(self) -> None:
        self.engine = Worker(self)
        self._ready.set()

    def lose(self) -> None:
        self.num_deaths += 1
        loop = asyncio.get_running_loop()
        if self.learns_after_s:
            loop.call_later(self.learns_after_s, self._ready.clear)
        else:
            self._ready.clear()
        loop.call_later(self.learns_after_s + _RESTART_S, self.start)

    async def restarted(self) -> Model:
        await self._ready.wait()
        return self


@define(eq=False)
class Client:
    """One caller's request or question, and what became of it."""

    caller: str
    text: str
    length: int | None  # None is a question
    leaves_s: float | None = None
    constraint: Constraint | None = None
    outcome: str = ""
    token_ids: list[int] = field(factory=list)

    async def ask(self, number: int, model: Model, place: ModelWork) -> None:
        try:
            async with asyncio.timeout(self.leaves_s):
                await self._ask(number, model, place)
            self.outcome = "answered"
        except RequestKillsWorker:
            self.outcome = "refused"
        except TimeoutError:
            self.outcome = "left"

    async def _ask(self, number: int, model: Model, place: ModelWork) -> None:
        segments = (Segment(self.text),)
        request = EngineRequest(request_id=str(number), segments=segments, caller=self.caller)
        if self.length is None:
            question = Question(place, request, 3600.0, (self.text,))
            place.add(model, question)  # type: ignore[arg-type]
            await question.answer(Worker.tokenize, segments, False)
            return
        stopping = StopParams(max_tokens=self.length)
        request = attrs.evolve(request, stopping=stopping, constraint=self.constraint)
        recoverable = RecoverableRequest(request, place, 3600.0, (self.text,))
        place.add(model, recoverable)  # type: ignore[arg-type]
        generation = Generation(await recoverable.submit(), recoverable)
        async with contextlib.aclosing(aiter(generation)) as batches:
            async for batch in batches:
                for event in batch:
                    self.token_ids += event.token_ids if isinstance(event, TextDelta) else ()

    @property
    def kills(self) -> bool:
        return "kills" in self.text


clients = st.lists(
    st.builds(
        Client,
        caller=st.sampled_from(["alice", "bob", "eve"]),
        text=st.sampled_from(
            ["a", "b", "c", "kills at once", "kills at 0.", "kills at 3.", "kills at 20.", "kills at once 2"]
        ),
        length=st.none() | st.integers(21, 40),
        leaves_s=st.none() | st.none() | st.floats(0.01, 10),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    clients=clients, pauses_s=st.lists(st.floats(0, 3), min_size=8, max_size=8), outside_s=st.none() | st.floats(0, 9)
)
def test_innocents_are_answered_whole_and_culprits_refused(clients, pauses_s, outside_s):
    async def scene() -> None:
        model = Model()
        model.start()
        place = ModelWork(model)  # type: ignore[arg-type]
        if outside_s is not None:
            asyncio.get_running_loop().call_later(outside_s, lambda: model.engine.die(from_outside=True))
        asked = []
        for number, (client, pause_s) in enumerate(zip(clients, pauses_s, strict=False)):
            asked.append(asyncio.create_task(client.ask(number, model, place)))
            await asyncio.sleep(pause_s)
        await asyncio.gather(*asked)
        await asyncio.sleep(60)  # what clients have left behind
        assert not place._works
        assert not len(model.request_queue)
        assert not place.has_quarantined

    for client in clients:
        client.outcome, client.token_ids = "", []
        if client.length is None and "kills at once" not in client.text:
            client.text = "a"  # nothing is computed of a question
    simulate(scene())
    for client in clients:
        if client.leaves_s is None:
            assert client.outcome == ("refused" if client.kills else "answered")
        if client.outcome == "answered" and client.length is not None:
            assert client.token_ids == list(range(client.length))


def test_hostile_caller_waits_longer_and_longer_and_no_other_does():
    """Twenty texts that kill: two deaths each, at last no more than two in a minute."""
    waits_s: list[float] = []

    async def neighbour(model: Model, place: ModelWork) -> None:
        for number in range(1000, 1400):
            began_s = asyncio.get_running_loop().time()
            client = Client("bob", "hello", None)
            await client.ask(number, model, place)
            assert client.outcome == "answered"
            waits_s.append(asyncio.get_running_loop().time() - began_s)
            await asyncio.sleep(1.0)

    async def scene() -> None:
        model = Model()
        model.start()
        place = ModelWork(model)  # type: ignore[arg-type]
        beside = asyncio.create_task(neighbour(model, place))
        took_s = []
        for number in range(10):
            began_s = asyncio.get_running_loop().time()
            client = Client("eve", f"kills at once {number}", None)
            await client.ask(number, model, place)
            assert client.outcome == "refused"
            took_s.append(asyncio.get_running_loop().time() - began_s)
        assert model.num_deaths == 20
        assert took_s[-1] >= _MAX_PAUSE_S
        await beside

    simulate(scene())
    assert max(waits_s) < 3 * _RESTART_S


def test_same_text_again_and_again_costs_two_workers():
    async def scene() -> None:
        model = Model()
        model.start()
        place = ModelWork(model)  # type: ignore[arg-type]
        hostile = [Client("eve", "kills at once", None if number % 2 else number) for number in range(10)]
        await asyncio.gather(*(client.ask(number, model, place) for number, client in enumerate(hostile)))
        assert [client.outcome for client in hostile] == ["refused"] * 10
        assert model.num_deaths == 2

    simulate(scene())


def test_constraint_that_kills_costs_two_workers_whatever_the_prompt():
    async def scene() -> None:
        model = Model()
        model.start()
        place = ModelWork(model)  # type: ignore[arg-type]
        bomb = Constraint(kind="regex", text="(a|b)" * 1000)
        stream = Client("bob", "hello", 100)
        hostile = [Client("eve", f"prompt {number}", 5, constraint=bomb) for number in range(5)]
        await asyncio.gather(*(client.ask(number, model, place) for number, client in enumerate([stream, *hostile])))
        assert [client.outcome for client in hostile] == ["refused"] * 5
        assert stream.token_ids == list(range(100))
        assert model.num_deaths == 2

    simulate(scene())


@pytest.mark.parametrize(
    "ended_by", [None, NotedCall("p", "drafter", "d", "propose")], ids=["from outside", "by a plugin"]
)
def test_requests_that_only_waited_outlive_two_deaths(ended_by: NotedCall | None) -> None:
    async def scene() -> None:
        model = Model()
        model.start()
        place = ModelWork(model)  # type: ignore[arg-type]
        asked = [Client("alice", f"text {number}", 25) for number in range(3)]
        running = [asyncio.create_task(one.ask(number, model, place)) for number, one in enumerate(asked)]
        for _ in range(2):
            await asyncio.sleep(_STEP_S / 2)  # the worker begins them after a step
            worker = model.engine
            assert len(worker._inside) == 3
            worker.ended_by = ended_by
            worker.die(from_outside=ended_by is None)
            await asyncio.sleep(_RESTART_S)
        await asyncio.gather(*running)

        assert model.num_deaths == 2
        assert [one.outcome for one in asked] == ["answered"] * 3

    simulate(scene())


def test_nothing_enters_beside_quarantined_work():
    """Questions of others wait until its isolation run is over."""

    async def scene() -> None:
        model = Model()
        model.start()
        place = ModelWork(model)  # type: ignore[arg-type]
        quarantined = Client("bob", "hello", 100)
        streaming = asyncio.create_task(quarantined.ask(0, model, place))
        await asyncio.sleep(1.0)
        model.engine.die()
        await asyncio.sleep(_RESTART_S + 2 * _STEP_S)
        assert place.has_quarantined
        question = Client("alice", "hello", None)
        asking = asyncio.create_task(question.ask(1, model, place))
        while place.has_quarantined:
            assert len(model.engine._inside) == 1
            await asyncio.sleep(_STEP_S / 2)
        await asyncio.gather(asking, streaming)
        assert question.outcome == quarantined.outcome == "answered"

    simulate(scene())


def test_requests_keep_their_places_in_the_queue_until_they_end():
    """Also quarantined work that have had their turn alone and wait for those of the others."""

    async def scene() -> None:
        model = Model()
        model.start()
        place = ModelWork(model)  # type: ignore[arg-type]
        clients = [Client(caller, "hello", 200) for caller in ("alice", "bob", "eve")]
        streaming = [asyncio.create_task(client.ask(number, model, place)) for number, client in enumerate(clients)]
        await asyncio.sleep(1.0)
        model.engine.die()
        while not all(task.done() for task in streaming):
            await asyncio.sleep(_STEP_S / 2)
            inside = {stream.request_id for stream in model.engine._inside}
            unfinished = {str(number) for number, client in enumerate(clients) if len(client.token_ids) < 199}
            assert {number for number in unfinished - inside if number not in model.request_queue} == set()
        assert not len(model.request_queue) and not place.has_quarantined
        assert all(client.token_ids == list(range(200)) for client in clients)

    simulate(scene())


def test_answers_that_have_started_do_not_wait_for_the_pause_of_their_caller():
    """A server without keys has one caller: its streams go on as soon as there is a worker."""

    async def scene() -> None:
        model = Model()
        model.start()
        place = ModelWork(model)  # type: ignore[arg-type]
        for _ in range(6):
            place._offences.add("")
        await asyncio.sleep(_MAX_PAUSE_S)
        stream = Client("", "hello", 200)
        streaming = asyncio.create_task(stream.ask(0, model, place))
        await asyncio.sleep(1.0)
        hostile = Client("", "kills at once", None)
        await hostile.ask(1, model, place)
        began_s = asyncio.get_running_loop().time()
        await streaming
        assert asyncio.get_running_loop().time() - began_s < 200 * _STEP_S + 2 * _RESTART_S
        assert stream.token_ids == list(range(200))
        assert place._offences.pause_s("") > 0

    simulate(scene())


def test_a_model_that_still_offers_its_dead_worker_is_asked_again_after_a_while() -> None:
    """Without a pause the question would hold the event loop, and the model would never learn of the death."""

    async def scene() -> None:
        model = Model(learns_after_s=0.5)
        model.start()
        place = ModelWork(model)  # type: ignore[arg-type]
        asked = [Client("alice", "kills at 3.", 10), Client("bob", "hello", 10)]
        await asyncio.gather(*(one.ask(number, model, place) for number, one in enumerate(asked)))

        assert [one.outcome for one in asked] == ["refused", "answered"]

    simulate(scene())
