"""Early exit through core: settings, refusals, failing policies, and what answers, headers and figures tell of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import httpx
import numpy as np
import pytest

from enginehouse.contract.backend import ForwardOutput, Span
from enginehouse.contract.errors import ConfigError, ModelLoadError
from enginehouse.contract.exit_policy import ExitContext, ExitView, LayerAccess
from enginehouse.contract.types import (
    Constraint,
    EngineRequest,
    EngineSettings,
    RequestFinished,
    Resume,
    ResumedChoice,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse.plugins import Guard, PluginRegistry
from enginehouse.serving.opening import plan_model
from enginehouse.settings.config import ModelSettings, PluginsSettings, ServerSettings, Settings, load_settings
from enginehouse.settings.features import DrafterSettings, ExitPolicySettings
from enginehouse.workers.messages import ExitPolicyLoad
from enginehouse.workers.parts import GuardedExitPolicy, use_exit_policy
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner
from enginehouse_testkit.served import served

from .harness import LiteralDecoder

PROMPT = [ord(character) for character in "what comes next?"]
MARGIN = ExitPolicySettings(name="margin", options={"threshold": 0.3, "every": 1})


class EveryOther:
    """Tokens leave behind layer 2 and run through all eight in turn."""

    name = "every-other"
    api_version = 1
    layers = (2,)

    @attrs.frozen(kw_only=True)
    class Options:
        broken: str | None = None

    options = Options

    def __init__(self, broken: str | None = None) -> None:
        self.broken = broken
        self.num_asked = 0

    def bind(self, context: ExitContext, options: Options) -> EveryOther:
        if options.broken == "bind":
            raise ModelLoadError("the model is not to its taste")
        policy = EveryOther(options.broken)
        if options.broken == "layers":
            policy.layers = (2, 8)
        return policy

    def leaves(self, view: ExitView) -> Any:
        self.num_asked += 1
        if self.broken == "raises" and self.num_asked > 2:
            raise ZeroDivisionError
        if self.broken == "shape" and self.num_asked > 2:
            return np.array([True, True, True])
        if self.broken == "kind" and self.num_asked > 2:
            return np.array([0.5])
        return np.array([self.num_asked % 2 == 1])


def answer(
    policy: Any, resume: Resume | None = None, device_sampling: bool = False, **request: Any
) -> tuple[list[TextDelta], RequestFinished]:
    runner = FakeRunner(FakeOptions(num_layers=8, device_sampling=device_sampling))
    runner.use_exit_policy(policy)
    engine = StepEngine(runner, EngineSettings(), {}, [LiteralDecoder(forces=True)])
    stopping = StopParams(max_tokens=20, ignore_eos=True)
    asked = {
        "sampling": SamplingParams(temperature=0, num_logprobs=0),
        "stopping": stopping,
        "token_details": True,
        **request,
    }
    engine.add(EngineRequest(request_id="r", **asked), PROMPT, resume)
    events = [event for _ in iter(engine.has_work, False) for _, event in engine.step()]
    engine.close()
    assert isinstance(events[-1], RequestFinished)
    return [event for event in events if isinstance(event, TextDelta)], events[-1]


def layers_of(deltas: list[TextDelta]) -> list[int | None]:
    """The layers of each token that has any."""
    details = [entry.details for delta in deltas for entry in delta.logprobs or ()]
    return [one.exit_layer for one in details if one is not None and one.exit_layer is not None]


@pytest.mark.parametrize("device_sampling", [False, True])
def test_each_token_tells_how_many_layers_it_ran_through(device_sampling: bool) -> None:
    """The first one belongs to the prompt, which is never left early; also of tokens that are read one step late."""
    deltas, finished = answer(EveryOther(), device_sampling=device_sampling)

    assert layers_of(deltas) == [8, *[2, 8] * 9, 2]
    assert (finished.usage.early_exit_tokens, finished.usage.skipped_layers) == (10, 60)


def test_without_a_policy_nothing_is_told() -> None:
    deltas, finished = answer(None)

    assert layers_of(deltas) == []
    assert (finished.usage.early_exit_tokens, finished.usage.skipped_layers) == (0, 0)


def test_tokens_and_layers_stay_together_where_text_is_held_back() -> None:
    """A stop string that may be beginning holds tokens back, not their layers."""
    plain = [token_id for delta in answer(EveryOther())[0] for token_id in delta.token_ids]
    stop = StopParams(max_tokens=20, ignore_eos=True, stop=(" no such end",))
    deltas, _ = answer(EveryOther(), stopping=stop)

    assert [token_id for delta in deltas for token_id in delta.token_ids] == plain
    assert layers_of(deltas) == [8, *[2, 8] * 9, 2]
    assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in deltas)


def test_tokens_that_were_told_before_are_not_told_again() -> None:
    """A request that is taken up again goes on with what is new."""
    plain = [token_id for delta in answer(None)[0] for token_id in delta.token_ids]
    resume = Resume(choices=(ResumedChoice(choice=0, token_ids=tuple(plain[:5])),))
    deltas, finished = answer(EveryOther(), resume)

    assert sum(len(delta.token_ids) for delta in deltas) == len(layers_of(deltas))
    assert finished.usage.early_exit_tokens == layers_of(deltas).count(2) > 0


class SpansKept(FakeRunner):
    """Keeps the spans that it was given."""

    def __init__(self, options: FakeOptions) -> None:
        super().__init__(options)
        self.spans: list[Span] = []

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        self.spans += spans
        return super().forward(spans)


def test_a_text_that_is_computed_again_runs_through_all_layers_token_by_token_too() -> None:
    """Only the token whose logits are wanted may leave, as it did before."""
    plain = [token_id for delta in answer(None)[0] for token_id in delta.token_ids]
    resume = Resume(choices=(ResumedChoice(choice=0, token_ids=tuple(plain[:5])),))
    runner = SpansKept(FakeOptions(num_layers=8, max_batch_tokens=1))
    engine = StepEngine(runner, EngineSettings(), {})
    stopping = StopParams(max_tokens=6, ignore_eos=True)
    engine.add(EngineRequest(request_id="r", sampling=SamplingParams(temperature=0), stopping=stopping), PROMPT, resume)
    while engine.has_work():
        engine.step()
    engine.close()

    assert [span.outputs for span in runner.spans] == ["none"] * (len(runner.spans) - 1) + ["last"]
    assert [span.may_exit for span in runner.spans] == [False] * (len(runner.spans) - 1) + [True]


def test_forced_tokens_ran_through_no_layers_of_their_own() -> None:
    constraint, plain = Constraint(kind="regex", text="forced text"), SamplingParams(temperature=0)
    policy = EveryOther()
    _, finished = answer(policy, constraint=constraint, sampling=plain)

    assert finished.usage.forced_tokens > 0
    assert policy.num_asked <= finished.usage.completion_tokens - finished.usage.forced_tokens
    assert finished.usage.early_exit_tokens == (policy.num_asked + 1) // 2


@pytest.mark.parametrize("broken", ["raises", "shape", "kind"])
def test_a_policy_that_fails_is_switched_off(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    """The answer goes on through all layers, and the log names the policy once."""
    with caplog.at_level(logging.WARNING):
        deltas, finished = answer(GuardedExitPolicy(Guard("house", "exit policy", "moody"), EveryOther(broken)))

    assert layers_of(deltas) == [8, 2, 8, 8, *[8] * 16]
    assert finished.usage.completion_tokens == 20
    failed, switched_off = [record.getMessage() for record in caplog.records]
    assert failed.startswith("the exit policy 'moody' of the plugin 'house'")
    assert switched_off == "the exit policy 'moody' of the plugin 'house' is off until the model is loaded again"


def registry_with(policy: Any) -> PluginRegistry:
    registry = PluginRegistry.load(PluginsSettings(), builtin=["fake"])
    return attrs.evolve(registry, exit_policies=MappingProxyType({**registry.exit_policies, policy.name: policy}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"broken": "bind"}, "the exit policy 'every-other': the model is not to its taste"),
        ({"broken": "layers"}, r"the exit policy 'every-other': it requests the layers \[8\]"),
        ({"brocken": "bind"}, "models.m.exit_policy.brocken: unknown setting"),
    ],
)
def test_a_policy_that_does_not_suit_fails_the_load(options: dict[str, Any], message: str) -> None:
    load = ExitPolicyLoad(name="every-other", options=options, options_path="models.m.exit_policy")
    with pytest.raises((ModelLoadError, ConfigError), match=message):
        use_exit_policy(registry_with(EveryOther()), load, FakeRunner(FakeOptions(num_layers=8)), "fake")


def test_runners_without_access_to_layers_are_refused() -> None:
    """By kind, and where this model has none."""
    load = ExitPolicyLoad(name="every-other", options={}, options_path="models.m.exit_policy")
    registry = registry_with(EveryOther())

    class Closed:
        """A runner that shows nothing."""

    assert not isinstance(Closed(), LayerAccess)
    with pytest.raises(
        ModelLoadError, match=r"^models.m.exit_policy: the backend 'closed' has no access to the layers"
    ):
        use_exit_policy(registry, load, Closed(), "closed")  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="set num_layers"):
        FakeRunner(FakeOptions()).use_exit_policy(EveryOther())


Plan = Callable[..., Any]


@pytest.fixture
def plan() -> Plan:
    registry = PluginRegistry.load(PluginsSettings(), builtin=["fake"])

    def make(policy: ExitPolicySettings | None, **fields: Any) -> Any:
        settings = ModelSettings(**{"source": "fake", "backend": "fake", "exit_policy": policy, **fields})
        return plan_model("m", settings, registry)

    return make


def test_models_with_early_exit_draft_nothing_by_themselves(plan: Plan) -> None:
    """All layers would verify what fewer have written."""
    assert [drafter.name for drafter in plan(None).drafters] == ["prediction"]
    planned = plan(MARGIN)

    assert planned.drafters == ()
    assert planned.exit_policy == ExitPolicyLoad(
        name="margin", options={"threshold": 0.3, "every": 1}, options_path="models.m.exit_policy"
    )


def test_wrong_settings_are_refused_before_the_model_is_loaded(plan: Plan) -> None:
    with pytest.raises(ConfigError, match=r"unknown exit policy 'margn'.*margin"):
        plan(ExitPolicySettings(name="margn"))
    with pytest.raises(ConfigError, match=r"models\.m\.exit_policy\.treshold: unknown setting"):
        plan(ExitPolicySettings(name="margin", options={"treshold": 0.5}))
    with pytest.raises(ConfigError, match="early exit and drafters exclude each other"):
        plan(MARGIN, drafters=(DrafterSettings(name="prompt-lookup"),))
    with pytest.raises(ConfigError, match="forwards requests"):
        plan(MARGIN, source="http://127.0.0.1:1/v1", backend="remote")


def test_a_policy_is_a_name_or_a_table(tmp_path: Any) -> None:
    file = tmp_path / "enginehouse.toml"

    def read(value: str) -> ExitPolicySettings | None:
        file.write_text(f'[models.m]\nsource = "fake"\nexit_policy = {value}\n')
        return load_settings(file, {}).models["m"].exit_policy

    assert read('"margin"') == ExitPolicySettings(name="margin")
    assert read('{ name = "entropy", threshold = 0.2 }') == ExitPolicySettings(
        name="entropy", options={"threshold": 0.2}
    )
    for wrong in ("3", "{ threshold = 0.2 }", '["margin"]'):
        with pytest.raises(ConfigError, match=r"models\.m\.exit_policy: must be the name of an exit policy"):
            read(wrong)


def chat(profile: Any, policy: ExitPolicySettings | None) -> tuple[httpx.Response, httpx.Response, str]:
    """A whole answer, a stream, and the figures afterwards."""
    model = ModelSettings(
        source="fake", backend="fake", isolation="thread", exit_policy=policy, options={"num_layers": 8}
    )
    settings = Settings(models={"m": model}, server=ServerSettings(port=0, profile=profile))
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30, "temperature": 0}
    with served(settings) as client:
        headers = {"X-Enginehouse-Details": "true"}
        whole = client.post("/v1/chat/completions", json=body, headers=headers)
        stream = client.post("/v1/chat/completions", json={**body, "stream": True}, headers=headers)
        return whole, stream, client.get("/metrics").text


def test_answers_headers_and_figures_tell_of_it() -> None:
    whole, stream, figures = chat("octomil", MARGIN)
    saved = whole.json()["enginehouse"]["optimizations"]

    assert saved["early_exit_tokens"] > 0
    assert saved["early_exit_tokens"] <= saved["skipped_layers"] <= 4 * saved["early_exit_tokens"]
    assert whole.headers["x-octomil-early-exit-tokens"] == str(saved["early_exit_tokens"])
    assert f'"early_exit_tokens":{saved["early_exit_tokens"]}' in stream.text
    *_, last, _ = stream.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["headers"] == {
        "x-octomil-early-exit-tokens": str(saved["early_exit_tokens"])
    }
    assert f'enginehouse_early_exit_tokens_total{{model="m"}} {2.0 * saved["early_exit_tokens"]}' in figures
    assert f'enginehouse_skipped_layers_total{{model="m"}} {2.0 * saved["skipped_layers"]}' in figures


def test_without_a_policy_no_header_is_sent() -> None:
    whole, stream, figures = chat("octomil", None)

    assert '"headers"' not in stream.text
    assert "x-octomil-early-exit-tokens" not in whole.headers
    assert whole.json()["enginehouse"]["optimizations"]["early_exit_tokens"] == 0
    assert "early_exit_tokens_total" not in figures
