"""Preparers between the request and its prompt: what they are asked, what they may change, and how they fail."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, field, frozen

from enginehouse.contract.errors import ConfigError, ContextLengthExceeded, ModelNotReady, Overloaded, PluginError
from enginehouse.contract.preparer import ModelAccess, Preparation, Report
from enginehouse.contract.rows import fields_of
from enginehouse.contract.types import GenerateRequest
from enginehouse.pipeline.pipeline import Pipeline
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.plugins import PluginRegistry
from enginehouse.serving import ModelManager
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script


@frozen
class CutFields:
    cut: int = 0


@frozen
class Cutting:
    """Cuts off the end of a text, as asked by the field ``cut`` or until it fits; remembers the calls."""

    name = "cutting"
    api_version = 1
    request_fields = CutFields
    calls: list[tuple[str, int | None]] = field(factory=list)

    def bind(self, settings: Mapping[str, Any], objects: Mapping[str, Mapping[str, Any]]) -> Cutting:
        assert set(settings) == {"m", "other"} and objects["preparers"] == {"cutting": self}
        return self

    def may_prepare(self, request: GenerateRequest, model: str) -> bool:
        return True

    async def prepare_request(
        self, request: GenerateRequest, model: ModelAccess, num_excess: int | None
    ) -> Preparation | None:
        text = request.text or ""
        self.calls.append((text, num_excess))
        num_cut = num_excess or request.extensions.get("cutting", {}).get("cut", 0)
        if not num_cut or text.startswith("whole"):
            return None
        assert len(await model.tokenize(text)) == len(text)
        assert b"".join(await model.pieces(await model.tokenize(text))) == text.encode()
        report = Report(has_changed=True, details={"cut": num_cut})
        return Preparation(evolve(request, text=text[:-num_cut]), report)


@frozen
class Pausing(Cutting):
    """Does something else before it shortens a prompt."""

    meanwhile: list[Awaitable[None]] = field(factory=list)

    async def prepare_request(
        self, request: GenerateRequest, model: ModelAccess, num_excess: int | None
    ) -> Preparation | None:
        if num_excess:
            await self.meanwhile.pop()
        return await super().prepare_request(request, model, num_excess)


class Failing(Cutting):
    def may_prepare(self, request: GenerateRequest, model: str) -> bool:
        raise KeyError("no idea")

    async def prepare_request(
        self, request: GenerateRequest, model: ModelAccess, num_excess: int | None
    ) -> Preparation | None:
        if request.text == "ask":
            async with model.other("other"):
                pass
        raise KeyError("no idea")


@contextlib.asynccontextmanager
async def opened(
    folder: Path, preparer: Cutting, limits: LimitsSettings | None = None, **model: Any
) -> AsyncIterator[Pipeline]:
    """A pipeline with one preparer, to the model ``m`` with one token per byte and room for 100."""
    fields = {"source": write_script(folder / "script.json", ["Hel", "lo"]), "backend": "scripted", **model}
    models = {"m": ModelSettings(context=100, **fields), "other": ModelSettings(context=100, load="lazy", **fields)}
    settings = Settings(models=models, plugins=PluginsSettings(allow=()), limits=limits or LimitsSettings())
    registry = evolve(
        PluginRegistry.for_settings(settings),
        preparers={preparer.name: preparer},
        request_fields={one.name: one for one in fields_of(CutFields, preparer.name, "cuts", is_sampled=False)},
    )
    manager, renderer = ModelManager(settings, registry), Renderer(20, 10_000)
    pipeline = Pipeline(settings, registry, manager, renderer)
    await manager.start()
    await manager.wait_settled(20)
    try:
        yield pipeline
    finally:
        await manager.close()


def request(text: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", model="m", text=text, **fields)


async def test_request_is_changed_before_it_is_rendered_and_the_report_is_kept(tmp_path: Path) -> None:
    async with opened(tmp_path, Cutting()) as pipeline:
        plain = await pipeline.start(request("0123456789"))
        plain.generation.cancel()
        running = await pipeline.start(request("0123456789", extensions={"cutting": {"cut": 4}}))
        running.generation.cancel()

    assert plain.reports == {"cutting": None}
    assert (running.request.text, running.generation.num_prompt_tokens) == ("012345", 6)
    assert running.reports == {"cutting": Report(has_changed=True, details={"cut": 4})}
    assert running.parameters.sampling.extensions == {}  # its fields are for the server only


async def test_prompt_that_is_too_long_is_prepared_once_more_with_the_number_of_tokens_that_must_go(
    tmp_path: Path,
) -> None:
    preparer = Cutting()
    async with opened(tmp_path, preparer) as pipeline:
        running = await pipeline.start(request("x" * 150, stopping={"max_tokens": 20}))
        running.generation.cancel()
        with pytest.raises(ContextLengthExceeded) as refused:
            await pipeline.start(request("whole" + "x" * 150))

    assert preparer.calls[:2] == [("x" * 150, None), ("x" * 150, 70)]
    assert running.generation.num_prompt_tokens == 80  # room for the answer
    assert (refused.value.num_prompt_tokens, refused.value.param) == (155, "prompt")
    assert len(preparer.calls) == 4


async def test_request_keeps_its_place_in_the_queue_while_it_is_shortened(tmp_path: Path) -> None:
    """The worker has refused it, so it holds nothing of it."""
    preparer = Pausing()
    one = {"backend": "fake", "isolation": "thread", "slots": 1}
    async with opened(tmp_path, preparer, LimitsSettings(max_queue=0), **one) as pipeline:

        async def another() -> None:
            with pytest.raises(Overloaded):
                await pipeline.start(evolve(request("a"), request_id="another"))

        preparer.meanwhile.append(another())
        running = await pipeline.start(request("x" * 150, stopping={"max_tokens": 20}))
        running.generation.cancel()

    assert not preparer.meanwhile
    assert running.reports["cutting"] is not None


async def test_preparer_that_fails_refuses_the_request_and_is_named(tmp_path: Path) -> None:
    async with opened(tmp_path, Failing()) as pipeline:
        with pytest.raises(PluginError, match="The preparer 'cutting' of the plugin"):
            await pipeline.start(request("a"))
        with pytest.raises(ModelNotReady, match="'other' is not loaded"):
            await pipeline.start(request("ask"))
        with pytest.raises(PluginError, match="The preparer 'cutting' of the plugin"):
            await pipeline.plan(request("a"))


async def test_setting_of_a_preparer_that_is_not_loaded_stops_the_start(tmp_path: Path) -> None:
    """Also where another preparer reads the settings."""
    with pytest.raises(ConfigError, match=r"models\.m\.compressor: the plugin 'compress' is not loaded"):
        async with opened(tmp_path, Cutting(), compressor={"method": "bm25"}):
            pass


async def test_prepare_is_repeatable_and_starts_nothing(tmp_path: Path) -> None:
    """A prepared request is a value: the model does not know of it until it is started."""
    asked = request("0123456789", extensions={"cutting": {"cut": 4}}, sampling={"seed": 1})
    async with opened(tmp_path, Cutting()) as pipeline:
        running = await pipeline.start(request("a"))
        first, second = [await pipeline.prepare(asked, running.model) for _ in range(2)]
        stats = await running.model.engine.stats()
        running.generation.cancel()

    assert (first.asked, first.request.text, first.unsupported) == (asked, "012345", ())
    assert first.prompt.segments == second.prompt.segments
    assert first.parameters == second.parameters
    assert stats.num_running + stats.num_waiting <= 1
