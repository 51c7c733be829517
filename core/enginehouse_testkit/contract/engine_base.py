"""Shared base of the engine contract tests: fixtures, and comparison of answers that allows for near-ties."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import pytest
from attrs import field, frozen

from enginehouse.contract.engine import Engine
from enginehouse_testkit.contract.engine_driver import Answer, EngineDriver
from enginehouse_testkit.contract.engine_form import form_of_engine
from enginehouse_testkit.contract.form import FormContract, form_of_rows
from enginehouse_testkit.contract.opening import ModelUnderTest
from enginehouse_testkit.inline_engine import InlineEngine

__all__ = ["EngineContractBase", "StumblingFields", "StumblingSampler"]


@frozen
class StumblingFields:
    """The request field of :class:`StumblingSampler`."""

    kit_stumbles: bool = field(default=False, metadata={"description": "Raise when the third token is drawn."})


class StumblingSampler:
    """A sampler that fails in the middle of an answer, to test that other requests are unaffected."""

    name = "kit_stumbles"
    api_version = 1
    request_fields: type[Any] = StumblingFields
    order = 45

    def create(self, fields: StumblingFields) -> Callable[[Any], Any] | None:
        """Return a step that raises at its third call."""
        if not fields.kit_stumbles:
            return None
        calls = iter(range(2))

        def step(candidates: Any) -> Any:
            if next(calls, None) is None:
                raise RuntimeError("stumbles on purpose")
            return candidates.token_ids >= 0

        return step


class EngineContractBase(FormContract):
    """Fixtures and settings; override the class attributes where an engine needs it.

    The fixture ``model`` is provided by the author (see :class:`enginehouse_testkit.contract.opening.ModelUnderTest`).
    A runner is tested with core's engine. An engine that no backend opens can provide ``make_engine`` instead.

    Attributes:
        exact: texts never depend on the rest of the batch. Otherwise the first token in which two texts differ must be
            at a near-tie.
        max_near_tie: the largest difference of two log-probabilities that counts as a near-tie.
        knows_token_ids: the engine reports ids; False for one that uses another server, which skips tests about ids.
        vocabulary_width: maximum number of alternatives (``num_logprobs``) that requests of the suite ask for.
        beginnings: four different prompts.
    """

    exact: ClassVar[bool | None] = None
    max_near_tie: ClassVar[float] = 0.25
    knows_token_ids: ClassVar[bool] = True
    vocabulary_width: ClassVar[int] = 20
    beginnings: ClassVar[tuple[str, ...]] = ("Once upon a time", "The capital of", "def add(", "1, 2, 3,")

    @pytest.fixture(scope="class")
    @classmethod
    def make_engine(cls, model: ModelUnderTest) -> Callable[[], Engine]:
        """Factory that opens an engine; a runner is wrapped in core's."""
        if model.backend.opens == "engine":
            return lambda: cast(Engine, model.open())
        return lambda: InlineEngine(model.open_runner(), {StumblingSampler.name: StumblingSampler()})

    @pytest.fixture(scope="class")
    @classmethod
    def driver_of_engine(cls, make_engine: Callable[[], Engine]) -> Iterator[EngineDriver]:
        """Drives the engine that the tests of a class share, on its own event loop."""
        with asyncio.Runner() as loop:

            async def opened() -> Engine:
                return make_engine()

            try:
                engine = loop.run(opened())
            except (Exception, SystemExit):  # noqa: BLE001 - the author's code; shown by test_form, once
                yield EngineDriver(None, loop, f"an exception while the model was opened:\n{traceback.format_exc()}")
                return
            yield EngineDriver(engine, loop)
            loop.run(engine.close())

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, driver_of_engine: EngineDriver) -> str:
        """Faults in the rows and lengths of the runner in core's engine, or in the declarations of another engine."""
        engine = driver_of_engine.engine
        if isinstance(engine, InlineEngine):
            return form_of_rows(engine.runner, cls.max_near_tie, exact=False)
        return form_of_engine(driver_of_engine)

    @pytest.fixture
    def engine(self, driver_of_engine: EngineDriver) -> Iterator[EngineDriver]:
        """The shared driver under a short name; what a test leaves running is cancelled after it."""
        yield driver_of_engine
        driver_of_engine.cancel_all()

    def needs(self, engine: EngineDriver, *names: str) -> None:
        """Skip the test if the engine refuses one of these parameters."""
        refused = engine.engine.info.engine.refused
        for name in names:
            if name in refused:
                pytest.skip(f"optional: the engine refuses {name}: {refused[name]}")

    def needs_ids(self) -> None:
        """Skip the test if the engine does not report token ids."""
        if not self.knows_token_ids:
            pytest.skip("optional: the engine reports no token ids (knows_token_ids)")

    def assert_same_text(self, found: Answer, expected: Answer) -> None:
        """Assert equal tokens up to a near-tie; both answers must be greedy, with two alternatives."""
        if not self.knows_token_ids:
            assert not self.exact or found.text() == expected.text()
            return
        pairs = zip(found.logprobs(), expected.logprobs(), strict=False)
        place = next((place for place, (one, other) in enumerate(pairs) if one.token_id != other.token_id), None)
        if place is None:
            assert found.token_ids() == expected.token_ids()
            assert found.text() == expected.text()
            return
        assert not self.exact, f"token {place} differs: {found.text()!r} against {expected.text()!r}"
        best, second = expected.logprobs()[place].top[:2]
        gap = best.logprob - second.logprob
        assert gap <= self.max_near_tie, f"token {place} differs, although the best one leads by {gap:.3f}"
