"""The drafter ``layers`` for a GGUF model: planned, refused, counted, and of no influence on what is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginehouse.contract.backend import ForwardOutput, Span
from enginehouse.contract.drafter import BoundDrafter, DraftContext
from enginehouse.contract.errors import ConfigError, EnginehouseError, ModelLoadError
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.memory import footprint_of
from enginehouse.serving.opening import plan_model
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse.settings.features import DrafterSettings
from enginehouse_llamacpp.runner import LlamaCppRunner
from enginehouse_speculate.layers import LayersDrafter, LayersOptions
from enginehouse_testkit.server_thread import server_thread

from .gguf import VALUES, toy_tensors, write_gguf

pytestmark = pytest.mark.llamacpp

EAGER = {"name": "layers", "num_layers": 28, "min_probability": 0.0, "max_tokens": 4}


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    return PluginRegistry.load(PluginsSettings(allow=("llamacpp", "speculate")))


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "toy.gguf", {**VALUES, "toy.embedding_length": 16}, toy_tensors())


def model(path: Path, *drafters: Any, **options: Any) -> ModelSettings:
    read = tuple(map(DrafterSettings.read, drafters))
    return ModelSettings(source=str(path), backend="llamacpp", context=1024, slots=3, drafters=read, options=options)


def test_half_of_the_layers_are_planned_with_the_models_own_settings(toy: Path, registry: PluginRegistry) -> None:
    drafter = {"name": "layers", "settings": {"threads": 1}}
    (plan,) = plan_model("m", model(toy, drafter, type_k="q8_0", threads=2), registry).drafters

    assert plan.second is not None
    source, backend, options = plan.second
    assert source.path == toy and backend.name == "llamacpp"
    assert options == {"context": 1024, "slots": 3, "type_k": "q8_0", "threads": 1, "num_layers": 2}


def test_memory_is_taken_for_the_model_and_for_its_layers(toy: Path, registry: PluginRegistry) -> None:
    alone, with_layers = (
        footprint_of(plan_model("m", model(toy, *drafters), registry)).num_bytes for drafters in ([], ["layers"])
    )

    assert alone < with_layers < 2 * alone


@pytest.mark.parametrize(
    ("drafter", "error", "message"),
    [
        ({"num_layers": 4}, ConfigError, r"models\.m\.drafters\[0\]\.num_layers: .* 4 layers, .* 1 to 3 .* not 4"),
        ({"num_layers": 0}, ConfigError, r"models\.m\.drafters\[0\]\.num_layers"),
        ({"source": "other.gguf"}, ConfigError, r"drafters\[0\]\.source: 'layers' drafts with layers of the model"),
        ({"backend": "llamacpp"}, ConfigError, r"drafters\[0\]\.backend: 'layers' drafts with layers of the model"),
        ({"settings": {"thread": 1}}, ConfigError, r"drafters\[0\]\.settings.*thread"),
    ],
)
def test_settings_that_cannot_act_are_refused(
    toy: Path, registry: PluginRegistry, drafter: dict[str, Any], error: type[EnginehouseError], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_model("m", model(toy, {"name": "layers", **drafter}), registry)


def test_a_model_that_cannot_be_cut_is_refused(tmp_path: Path, registry: PluginRegistry) -> None:
    path = write_gguf(tmp_path / "m.gguf", {**VALUES, "toy.nextn_predict_layers": 1}, toy_tensors())

    with pytest.raises(
        ModelLoadError, match=r"the drafter 'layers': the first layers of m\.gguf cannot be used as a model"
    ):
        plan_model("m", model(path, "layers"), registry)


def test_settings_of_a_second_model_need_one(toy: Path, registry: PluginRegistry) -> None:
    with pytest.raises(ConfigError, match=r"drafters\[0\]\.settings: .* set 'source' to that model"):
        plan_model("m", model(toy, {"name": "prompt-lookup", "settings": {"threads": 1}}), registry)


# -- at every step -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def linked(smollm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 in a folder of its own, beside which its layers may lie."""
    path = tmp_path_factory.mktemp("layers") / "smol.gguf"
    path.symlink_to(smollm_path)
    return path


PROMPTS = (
    "Count from one to thirty in words: one, two, three,",
    "The lighthouse keeper climbed the stairs every evening and",
    "def fibonacci(n):\n",
)


def written(
    runner: LlamaCppRunner, drafter: BoundDrafter | None, temperature: float
) -> tuple[list[list[int]], int, int]:
    """Answers to all prompts at once, and how many tokens were drafted and right. A pass costs a second: drafts pay."""
    seconds = 0.0
    forward = runner.forward

    def counted(spans: Sequence[Span]) -> ForwardOutput:
        nonlocal seconds
        seconds += 1.0
        return forward(spans)

    runner.forward = counted
    drafters = {"layers": drafter} if drafter is not None else {}
    engine = StepEngine(runner, EngineSettings(slots=3), {}, clock=lambda: seconds, drafters=drafters)
    for prompt in PROMPTS:
        request = EngineRequest(
            request_id=prompt,
            sampling=SamplingParams(temperature=temperature, seed=7),
            stopping=StopParams(max_tokens=24, ignore_eos=True),
        )
        engine.add(request, runner.tokenizer.encode(prompt, special=False))
    found: dict[str, list[int]] = {prompt: [] for prompt in PROMPTS}
    num_drafted = num_accepted = 0
    while engine.has_work():
        for prompt, event in engine.step():
            if isinstance(event, TextDelta):
                found[prompt] += event.token_ids
            elif isinstance(event, RequestFinished):
                num_drafted += event.usage.drafted_tokens
                num_accepted += event.usage.accepted_draft_tokens
    engine.close()
    return list(found.values()), num_drafted, num_accepted


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_drafts_at_every_step_change_nothing(
    linked: Path, open_runner: Callable[..., LlamaCppRunner], temperature: float
) -> None:
    """Right and wrong ones, in a batch."""
    options = {"cache_tokens": 1024, "context": 512, "threads": 1, "slots": 3}
    plain, none_drafted, _ = written(open_runner(linked, **options), None, temperature)
    runner = open_runner(linked, **options)
    context = DraftContext(runner, 3, lambda: open_runner(linked, num_layers=28, **options))
    drafter = LayersDrafter().bind(context, LayersOptions(min_probability=0.0, max_tokens=4))
    drafted, num_drafted, num_accepted = written(runner, drafter, temperature)

    assert drafted == plain
    assert none_drafted == 0
    assert num_drafted > num_accepted > 5


# -- on a running server -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(linked: Path) -> Iterator[httpx.Client]:
    models = {
        "plain": model(linked, cache_tokens=2048),
        "drafted": model(linked, EAGER, cache_tokens=2048),
        "unable": model(linked, {"name": "prompt-lookup", "source": str(linked)}, cache_tokens=2048),
    }
    settings = Settings(models=models, plugins=PluginsSettings(allow=("llamacpp", "speculate")))
    with server_thread(settings) as running, httpx.Client(base_url=running.url, timeout=120) as client:
        deadline = time.monotonic() + 120
        while any(card["state"] not in ("ready", "failed") for card in cards_of(client).values()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield client


def cards_of(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in client.get("/v1/models").json()["data"]}


def ask(client: httpx.Client, name: str, **fields: Any) -> tuple[list[str], dict[str, Any]]:
    """Texts of the choices, and what was saved."""
    messages = [{"role": "user", "content": "Count from one to thirty in words."}]
    body = {"model": name, "messages": messages, "max_tokens": 80, **fields}
    answer = client.post("/v1/chat/completions", json=body, headers={"X-Enginehouse-Details": "true"})
    assert answer.status_code == 200, answer.text
    data = answer.json()
    return [choice["message"]["content"] for choice in data["choices"]], data["enginehouse"]["optimizations"]


def test_drafts_are_counted_and_change_nothing(client: httpx.Client) -> None:
    """Greedy and sampled ones. That they do not pay is found out by trying."""
    num_drafted = num_accepted = 0
    for fields in ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 2}):
        plain, saved = ask(client, "plain", **fields)
        assert saved["drafted_tokens"] == 0
        drafted, saved = ask(client, "drafted", **fields)
        assert drafted == plain
        num_drafted += saved["drafted_tokens"]
        num_accepted += saved["accepted_draft_tokens"]

    assert num_drafted > 0
    assert 0 <= num_accepted <= num_drafted


def test_the_layers_lie_beside_the_model(client: httpx.Client, linked: Path) -> None:
    assert cards_of(client)["drafted"]["state"] == "ready"
    assert sorted(path.name for path in linked.parent.iterdir()) == ["smol.gguf", "smol.gguf.first-28-layers"]


def test_a_source_that_a_drafter_does_not_open_is_refused(client: httpx.Client) -> None:
    card = cards_of(client)["unable"]

    assert card["state"] == "failed"
    assert "'prompt-lookup' uses no second model" in str(card["error"])
