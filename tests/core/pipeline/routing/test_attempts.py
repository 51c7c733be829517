"""The loop that tries models: what is judged, what is taken when others fail, and what counts as a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import pytest
from attrs import define, field

from enginehouse.contract.errors import (
    AdapterNotFound,
    ContextLengthExceeded,
    EngineDead,
    EnginehouseError,
    GenerationFailed,
    InsufficientMemory,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    ModelNotReady,
    ModelUnloaded,
    Overloaded,
    QueueTimeout,
    UnsupportedParameter,
)
from enginehouse.contract.router import Acceptance, AnswerBeginning, Attempt, RoutingDecision
from enginehouse.contract.types import ChoiceFinished, Event, GenerateRequest, RequestFinished, TextDelta, TokenLogprob
from enginehouse.contract.usage import Usage
from enginehouse.pipeline.routing import Attempts, Plan, Routed
from enginehouse.pipeline.routing.circuit_breaker import CircuitBreaker
from enginehouse.recovery import Generation
from enginehouse.settings.optimisations import RouterSettings


@define
class Answer:
    """The stream of an engine: its batches, and the error that ends it."""

    batches: Sequence[Sequence[Event]] = ()
    error: EnginehouseError | None = None
    num_prompt_tokens: int = 3
    num_waiting_events: int = 0
    is_cancelled: bool = False

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        for batch in self.batches:
            yield batch
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        self.is_cancelled = True


def says(*texts: str, choice: int = 0) -> list[list[Event]]:
    """One token in each batch."""
    logprob = (TokenLogprob(0, b"x", -0.1),)
    return [[TextDelta(choice, text, (0,), logprob)] for text in texts]


ENDED: list[list[Event]] = [[ChoiceFinished(0, "stop"), RequestFinished(Usage(prompt_tokens=3, completion_tokens=1))]]


@define
class Running:
    """An accepted request."""

    generation: Generation


REQUEST = GenerateRequest(request_id="r", model=None)


@define
class Models:
    """What each model says, or how it refuses."""

    by_name: Mapping[str, Answer | EnginehouseError]
    asked: list[str] = field(factory=list)
    circuit_breaker: CircuitBreaker = field(
        factory=lambda: CircuitBreaker(RouterSettings(max_failures=1, pause_s=1000))
    )

    async def submit(self, request: GenerateRequest, model: str, may_drop: bool) -> Running:
        self.asked.append(f"{model} probed" if "num_logprobs" in request.sampling else model)
        found = self.by_name[model]
        if isinstance(found, EnginehouseError):
            raise found
        return Running(Generation(found))

    async def until_asked(self, num_times: int) -> None:
        async with asyncio.timeout(60):
            while len(self.asked) < num_times:  # noqa: ASYNC110 - what is waited for sets no event
                await asyncio.sleep(0)

    async def run(
        self, *attempts: Attempt, named: str | None = None, last_resorts: Sequence[str] = (), strategy: str = "cascade"
    ) -> Ended:
        route = RoutingDecision(attempts=attempts, reason="as told")
        plan = Plan(strategy=strategy, route=route, last_resorts=frozenset(last_resorts), named=named)
        running, routed = await Attempts(plan, REQUEST, self.submit, self.circuit_breaker).run()
        events = [event async for batch in running.generation for event in batch]
        return Ended("".join(event.text for event in events if isinstance(event, TextDelta)), routed)


@define
class Ended:
    text: str
    routed: Routed


def never(num_tokens: int = 2) -> Acceptance:
    return Acceptance(num_tokens, lambda probe: False)


# -- beginnings that are not good enough -----------------------------------------------------------


@pytest.mark.parametrize("error", [EngineDead("gone"), Overloaded("full")])
async def test_a_weak_answer_is_better_than_none(error: EnginehouseError) -> None:
    """The small model was not sure, and the big one cannot answer: the small one is asked again and taken."""
    models = Models({"small": Answer([*says("a", "b"), *ENDED]), "big": error})
    ended = await models.run(Attempt("small", never()), Attempt("big", never()))

    assert (ended.text, ended.routed.model) == ("ab", "small")
    assert models.asked == ["small probed", "big", "small"]
    assert [one.model for one in ended.routed.tried] == ["small", "big"]
    assert ended.routed.num_discarded_tokens == 2


async def test_the_last_one_is_waited_for_while_another_could_be_asked_again() -> None:
    """It accepts the request and dies before its first word; of several unsure ones the strongest is taken."""
    models = Models(
        {
            "small": Answer([*says("s"), *ENDED]),
            "middle": Answer([*says("m"), *ENDED]),
            "big": Answer(error=EngineDead("gone")),
        }
    )
    ended = await models.run(*(Attempt(name, never(1)) for name in ("small", "middle", "big")))

    assert (ended.text, ended.routed.model) == ("m", "middle")


async def test_what_no_model_could_do_better_is_raised_at_once() -> None:
    models = Models({"small": Answer(says("a", "b")), "big": InvalidRequest("seed: wrong", "seed")})
    with pytest.raises(InvalidRequest):
        await models.run(Attempt("small", never()), Attempt("big", never()))

    assert models.asked == ["small probed", "big"]


async def test_stand_ins_are_no_reason_to_throw_an_answer_away() -> None:
    models = Models({"small": Answer(says("s")), "big": Answer(says("b")), "spare": Answer(says("x"))})
    attempts = (Attempt("small", never(1)), Attempt("spare"), Attempt("big", never(1)))
    ended = await models.run(*attempts, last_resorts=["spare"])

    assert ended.text == "b"
    assert models.asked == ["small probed", "big"]


async def test_stand_ins_are_tried_where_a_model_fails() -> None:
    models = Models({"small": EngineDead("gone"), "big": EngineDead("gone"), "spare": Answer(says("x"))})
    attempts = (Attempt("small", never(1)), Attempt("big", never(1)), Attempt("spare"))

    assert (await models.run(*attempts, last_resorts=["spare"])).text == "x"


async def test_the_end_of_another_choice_does_not_end_the_probe() -> None:
    probes: list[AnswerBeginning] = []
    accept = Acceptance(3, lambda probe: bool(probes.append(probe)))
    others: list[list[Event]] = [*says("z", choice=1), [ChoiceFinished(1, "stop")]]
    small = Answer([*says("a"), *others, *says("b", "c", "d"), *ENDED])
    ended = await Models({"small": small, "big": Answer(says("!"))}).run(Attempt("small", accept), Attempt("big"))

    assert (probes[0].text, probes[0].is_whole, len(probes[0].logprobs)) == ("abc", False, 3)
    assert ended.routed.num_discarded_tokens == 4  # those of the other choice were computed, too
    assert small.is_cancelled


# -- what counts as a failure ----------------------------------------------------------------------


async def test_an_answer_of_the_last_one_closes_its_circuit() -> None:
    models = Models({"only": Answer([*says("a"), *ENDED])})
    models.circuit_breaker.failed("only")
    await models.run(Attempt("only"))

    assert not models.circuit_breaker.has_failed("only")
    assert models.circuit_breaker.first_token_s("only") is not None


@pytest.mark.parametrize("text", ["", "begun"])
async def test_the_last_one_fails_where_it_has_not_started(text: str) -> None:
    models = Models({"only": Answer(says(text) if text else (), GenerationFailed("boom"))})
    with pytest.raises(GenerationFailed):
        await models.run(Attempt("only"))

    assert models.circuit_breaker.has_failed("only") is not bool(text)


async def test_a_probe_that_breaks_off_is_a_failure() -> None:
    models = Models({"small": Answer(says("a"), EngineDead("gone")), "big": Answer(says("b"))})
    ended = await models.run(Attempt("small", never(5)), Attempt("big"))

    assert ended.text == "b"
    assert models.circuit_breaker.has_failed("small")


@pytest.mark.parametrize(
    ("error", "has_failed"),
    [
        (Overloaded("full"), False),
        (QueueTimeout("slow"), True),
        (InsufficientMemory("others stay"), True),
        (ModelNotReady("loading"), False),
        (ModelUnloaded("unloaded by its operator"), False),
        (ModelNotFound("main"), False),
        (ModelLoadError("damaged"), True),
        (EngineDead("gone"), True),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_only_what_the_model_is_to_blame_for_opens_its_circuit(error: EnginehouseError, has_failed: bool) -> None:
    """Each is passed over. What says so at once costs nothing; what made the request wait for nothing counts."""
    models = Models({"main": error, "spare": Answer(says("s"))})
    ended = await models.run(Attempt("main"), Attempt("spare"), strategy="fallback")

    assert ended.text == "s"
    assert models.circuit_breaker.has_failed("main") is has_failed


@pytest.mark.parametrize(
    "cannot",
    [UnsupportedParameter("tools: no", "tools"), ContextLengthExceeded(9, 8), AdapterNotFound("none", "adapters")],
)
async def test_stand_in_that_cannot_do_what_is_asked_is_passed_over(cannot: EnginehouseError) -> None:
    models = Models({"main": EngineDead("gone"), "spare": cannot, "other": Answer(says("o"))})
    ended = await models.run(*map(Attempt, ("main", "spare", "other")), named="main")

    assert ended.text == "o"
    assert [one.model for one in ended.routed.tried] == ["main", "spare"]


@pytest.mark.parametrize("named", ["main", None])
async def test_nobody_is_told_that_his_request_is_wrong_as_only_a_stand_in_cannot_serve_it(named: str | None) -> None:
    """The model that can is down or busy: trying again is the thing to do."""
    models = Models({"main": Overloaded("full"), "spare": ContextLengthExceeded(9, 8)})
    with pytest.raises(Overloaded):
        await models.run(Attempt("main"), Attempt("spare"), named=named)


async def test_what_the_named_model_cannot_do_is_refused() -> None:
    models = Models({"main": UnsupportedParameter("tools: no", "tools"), "spare": Answer(says("s"))})
    with pytest.raises(UnsupportedParameter):
        await models.run(Attempt("main"), Attempt("spare"), named="main")

    assert models.asked == ["main"]


# -- a model that is tried again -------------------------------------------------------------------


@define
class Hanging(Answer):
    """Answers when it is let."""

    may_begin: asyncio.Event = field(factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        await self.may_begin.wait()
        async for batch in super().__aiter__():
            yield batch


@pytest.fixture
def recovering() -> tuple[Models, Hanging]:
    """The main model has failed, and its pause is over; what it will say; another one stands in."""
    now = [0.0]
    main = Hanging([*says("m"), *ENDED])
    models = Models({"main": main, "spare": Answer([*says("s"), *ENDED])})
    models.circuit_breaker = CircuitBreaker(RouterSettings(max_failures=1, pause_s=10), lambda: now[0])
    models.circuit_breaker.failed("main")
    now[0] = 10.0
    return models, main


_CHAIN = (Attempt("main"), Attempt("spare"))


async def test_of_all_who_wait_one_tries_the_model_again(recovering: tuple[Models, Hanging]) -> None:
    """Their plans are all of the time before the first one's attempt."""
    models, main = recovering
    running = [asyncio.create_task(models.run(*_CHAIN, named="main")) for _ in range(5)]
    done, _ = await asyncio.wait(running[1:], timeout=60)

    assert [one.result().text for one in done] == ["s"] * 4
    assert models.asked.count("main") == 1
    main.may_begin.set()
    assert (await running[0]).text == "m"
    assert (await models.run(*_CHAIN, named="main")).text == "m"  # the circuit is closed


async def test_test_whose_client_leaves_is_no_verdict(recovering: tuple[Models, Hanging]) -> None:
    models, main = recovering
    first = asyncio.create_task(models.run(*_CHAIN, named="main"))
    await models.until_asked(1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    main.may_begin.set()

    assert (await models.run(*_CHAIN, named="main")).text == "m"


async def test_test_that_nobody_reads_is_no_verdict_when_it_is_cancelled(recovering: tuple[Models, Hanging]) -> None:
    """Of the last model that is left only the acceptance is waited for."""
    models, _ = recovering
    plan = Plan(strategy="fallback", route=RoutingDecision(attempts=(Attempt("main"),), reason=""))
    running, _ = await Attempts(plan, REQUEST, models.submit, models.circuit_breaker).run()
    assert models.circuit_breaker.has_failed("main")
    running.generation.cancel()

    assert not models.circuit_breaker.has_failed("main")


async def test_test_that_meets_a_full_queue_is_no_verdict(recovering: tuple[Models, Hanging]) -> None:
    models, main = recovering
    models.by_name = {**models.by_name, "main": Overloaded("full")}
    assert (await models.run(*_CHAIN, named="main")).text == "s"
    models.by_name = {**models.by_name, "main": main}
    main.may_begin.set()

    assert (await models.run(*_CHAIN, named="main")).text == "m"


async def test_weak_answer_is_taken_while_another_request_tests_the_stronger_model(
    recovering: tuple[Models, Hanging],
) -> None:
    """When it began, the stronger model could be asked; nothing is thrown away as that is over."""
    models, main = recovering
    small = Hanging([*says("w"), *ENDED])
    models.by_name = {**models.by_name, "small": small}
    weak = asyncio.create_task(models.run(Attempt("small", never(1)), Attempt("main")))
    await models.until_asked(1)
    test = asyncio.create_task(models.run(*_CHAIN, named="main"))
    await models.until_asked(2)
    small.may_begin.set()
    ended = await asyncio.wait_for(weak, 60)
    main.may_begin.set()
    await test

    assert (ended.text, ended.routed.num_discarded_tokens) == ("w", 0)
    assert models.asked == ["small probed", "main"]


async def test_counts_that_an_engine_learns_at_the_end_are_seen() -> None:
    answer = Answer([*says("a"), *ENDED], num_prompt_tokens=0)
    models = Models({"main": answer, "spare": Answer()})
    plan = Plan(strategy="fallback", route=RoutingDecision(attempts=(Attempt("main"), Attempt("spare")), reason=""))
    running, _ = await Attempts(plan, REQUEST, models.submit, models.circuit_breaker).run()
    answer.num_prompt_tokens = 7

    assert running.generation.num_prompt_tokens == 7
