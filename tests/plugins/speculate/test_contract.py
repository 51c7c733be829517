"""The drafters keep the contract; what each is good for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import Span
from enginehouse.contract.drafter import DraftContext, Drafter, DraftTask, LayerDrafter
from enginehouse.contract.errors import ConfigError, ModelLoadError
from enginehouse.contract.types import EngineRequest, EngineSettings, RequestFinished, SamplingParams, StopParams
from enginehouse.engine.loop import StepEngine
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings, structure_options
from enginehouse_speculate.draft_model import DraftModelDrafter, DraftModelOptions
from enginehouse_speculate.head import HeadDrafter
from enginehouse_speculate.layers import LayersDrafter, LayersOptions
from enginehouse_speculate.prediction import PredictionDrafter
from enginehouse_speculate.prompt_lookup import PromptLookupDrafter
from enginehouse_testkit.drafter_contract import DrafterContract
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

PROMPT = [ord(character) for character in "what comes next?"]


class TestPromptLookup(DrafterContract):
    @pytest.fixture(scope="class")
    @classmethod
    def drafter(cls) -> Drafter:
        return PromptLookupDrafter()


class TestPrediction(DrafterContract):
    @pytest.fixture(scope="class")
    @classmethod
    def drafter(cls) -> Drafter:
        return PredictionDrafter()


class TestDraftModel(DrafterContract):
    uses_second_model = True
    drafter_options = {"min_probability": 0.0, "max_tokens": 4}

    @pytest.fixture(scope="class")
    @classmethod
    def drafter(cls) -> Drafter:
        return DraftModelDrafter()


class TestLayers(DrafterContract):
    drafter_options = {"min_probability": 0.0, "num_layers": 3}

    @pytest.fixture(scope="class")
    @classmethod
    def drafter(cls) -> Drafter:
        return LayersDrafter()


class TestLayersApart(DrafterContract):
    """A backend opens the first layers as a model of their own."""

    uses_second_model = True
    drafter_options = {"min_probability": 0.0, "max_tokens": 4}

    @pytest.fixture(scope="class")
    @classmethod
    def drafter(cls) -> Drafter:
        return LayersDrafter()


class TestHead(DrafterContract):
    drafter_options = {"min_probability": 0.0, "max_tokens": 4}

    @pytest.fixture(scope="class")
    @classmethod
    def drafter(cls) -> Drafter:
        return HeadDrafter()


def test_the_plugin_registers_its_drafters() -> None:
    registry = PluginRegistry.load(PluginsSettings())

    assert list(registry.drafters) == ["prediction", "prompt-lookup", "draft-model", "layers", "head"]


def answer(
    drafter: Drafter | None, options: Any = None, prediction: tuple[int, ...] = ()
) -> tuple[list[int], RequestFinished]:
    """The tokens of a greedy answer, and its figures."""
    runner = FakeRunner(FakeOptions(num_layers=8))
    drafters = {}
    if drafter is not None:
        context = DraftContext(runner, 8, lambda: FakeRunner(FakeOptions()))
        drafters["it"] = drafter.bind(context, structure_options(drafter.options, options or {}, "drafter"))
    engine = StepEngine(runner, EngineSettings(), {}, drafters=drafters)
    request = EngineRequest(
        request_id="r",
        sampling=SamplingParams(temperature=0),
        stopping=StopParams(max_tokens=80, ignore_eos=True),
        prediction_token_ids=prediction,
    )
    engine.add(request, PROMPT)
    token_ids: list[int] = []
    while engine.has_work():
        for _, event in engine.step():
            if isinstance(event, RequestFinished):
                return token_ids, event
            token_ids += getattr(event, "token_ids", ())
    raise AssertionError("no end")


def test_a_prediction_that_is_nearly_right_saves_most_steps() -> None:
    plain, _ = answer(None)
    edited = [97 if index % 20 == 10 else token_id for index, token_id in enumerate(plain)]
    token_ids, finished = answer(PredictionDrafter(), prediction=tuple(edited))

    assert token_ids == plain
    assert finished.usage.accepted_draft_tokens > 60


def test_a_draft_model_that_knows_better_is_right() -> None:
    plain, _ = answer(None)
    token_ids, finished = answer(DraftModelDrafter(), {"min_probability": 0.0})

    assert token_ids == plain
    assert finished.usage.accepted_draft_tokens == finished.usage.drafted_tokens > 0


def test_most_layers_are_right_more_often_than_few() -> None:
    text = np.array([*PROMPT, *answer(None)[0]], np.int32)

    def num_right(num_layers: int) -> int:
        runner = FakeRunner(FakeOptions(num_layers=8))
        options = LayersOptions(num_layers=num_layers, min_probability=0.0)
        bound = LayersDrafter().bind(DraftContext(runner, 1), options)
        session, sequence, right = bound.open(text, ()), runner.open_sequence(), 0
        for length in range(1, len(text)):
            (draft,) = bound.propose([DraftTask(session, text[:length], sequence, 1)])
            assert draft is not None
            right += draft.token_ids[0] == text[length]
            runner.forward([Span(sequence, length - 1, text[length - 1 : length])])
        return right

    assert num_right(2) < num_right(5) < num_right(7)


@pytest.mark.parametrize(("num_layers", "half"), [(2, 1), (7, 4), (30, 15)])
def test_half_of_the_layers_draft_unless_the_settings_say_another_number(num_layers: int, half: int) -> None:
    drafter = LayersDrafter()

    assert isinstance(drafter, LayerDrafter)
    assert drafter.choose_layers(LayersOptions(), num_layers) == half
    assert drafter.choose_layers(LayersOptions(num_layers=num_layers - 1), num_layers) == num_layers - 1


def test_a_draft_model_needs_the_same_vocabulary() -> None:
    context = DraftContext(FakeRunner(), 8, lambda: FakeRunner(FakeOptions(vocab_size=512)))

    with pytest.raises(ModelLoadError, match="another vocabulary"):
        DraftModelDrafter().bind(context, DraftModelOptions())


def test_a_draft_model_needs_a_source() -> None:
    with pytest.raises(ModelLoadError, match="source"):
        DraftModelDrafter().bind(DraftContext(FakeRunner(), 8), DraftModelOptions())


@pytest.mark.parametrize(
    ("options", "layers", "message"),
    [
        (FakeOptions(), None, "can run some of"),
        (FakeOptions(num_layers=4), 9, "not 9"),
        (FakeOptions(num_layers=4, window=8), 2, "take single tokens back"),
    ],
)
def test_layers_need_a_model_that_can_be_left(options: FakeOptions, layers: int | None, message: str) -> None:
    drafter = LayersDrafter()
    settings = structure_options(drafter.options, {"num_layers": layers} if layers else {}, "drafter")

    with pytest.raises(ModelLoadError, match=message):
        drafter.bind(DraftContext(FakeRunner(options), 8), settings)


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"drafter\.min_probability"):
        structure_options(DraftModelOptions, {"min_probability": 2.0}, "drafter")


def test_a_full_second_model_drafts_nothing() -> None:
    small = FakeRunner(FakeOptions(max_sequences=1))
    bound = DraftModelDrafter().bind(DraftContext(FakeRunner(), 8, lambda: small), DraftModelOptions())

    assert bound.open(np.array(PROMPT, np.int32), ()) is not None
    assert bound.open(np.array(PROMPT, np.int32), ()) is None
