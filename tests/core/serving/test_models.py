"""Models: sources, backend choice, loading in the background, states that tell the truth, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from enginehouse.contract.backend import Backend, Match, ModelSource, Probe
from enginehouse.contract.errors import (
    ConfigError,
    DownloadError,
    EngineDead,
    ModelLoadError,
    ModelNotFound,
    ModelNotReady,
)
from enginehouse.contract.types import EngineRequest, Segment, StopParams, TextDelta
from enginehouse.plugins import PluginRegistry, guard_of, guarded, plain
from enginehouse.serving import LoadedModel, ModelManager
from enginehouse.serving.opening import plan_model
from enginehouse.serving.restarts import RestartPolicy, Restarts
from enginehouse.serving.sources import choose_backend, download, find_source, missing_download, no_such_model
from enginehouse.settings.config import LimitsSettings, ModelSettings, ServerSettings, Settings
from enginehouse_testkit.fake_runner import FakeBackend
from enginehouse_testkit.waiting import until

FAST = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, max_failed_starts=3)
NO_PLUGINS = PluginRegistry(request_fields={}, plugins=())
_ids = itertools.count()


@frozen
class Shelf:
    """A hub of ids with a slash; it holds one model."""

    held: Path | None = None
    name: str = "shelf"
    api_version: int = 1

    def matches(self, text: str) -> bool:
        return "/" in text and not text.startswith("/")

    def find(self, text: str) -> Path | None:
        return self.held

    def is_complete(self, text: str) -> bool:
        return self.held is not None

    def advice(self, text: str) -> str:
        return f"ask for {text}"

    def download(self, text: str, progress: Any) -> None:
        progress(0.5, "bringing it")
        raise DownloadError("it is lent out")


def fake_model(isolation: str = "thread", **fields: Any) -> ModelSettings:
    options = {name: fields.pop(name) for name in list(fields) if name not in ("aliases", "context", "slots", "source")}
    fields.setdefault("source", "fake")
    return ModelSettings(backend="fake", isolation=isolation, options=options, **fields)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def open_models(
    models: dict[str, ModelSettings], wait_s: float = 10, on_progress: Any = None
) -> AsyncIterator[ModelManager]:
    settings = Settings(models=models, limits=LimitsSettings(max_queue=4))
    manager = ModelManager(settings, PluginRegistry.for_settings(settings), on_progress, FAST)
    try:
        await manager.start()
        await manager.wait_settled(wait_s)
        yield manager
    finally:
        await manager.close()


async def answer(model: LoadedModel, max_tokens: int | None = 5) -> str:
    request = EngineRequest(
        request_id=f"r{next(_ids)}",
        segments=(Segment("hello"),),
        stopping=StopParams(max_tokens=max_tokens, ignore_eos=True),
    )
    generation = await model.engine.submit(request)
    return "".join([e.text async for batch in generation for e in batch if isinstance(e, TextDelta)])


def worker_pid(model: LoadedModel) -> int:
    pid: int = model.engine.pid  # type: ignore[attr-defined]
    return pid


# -- names and states ------------------------------------------------------------------------------


async def test_model_is_found_by_name_and_alias_and_none_is_the_first():
    async with open_models({"a": fake_model(aliases=("gpt-4", "org/model:tag")), "b": fake_model()}) as manager:
        assert manager.get("a") is manager.get("gpt-4") is manager.get("org/model:tag") is manager.get(None)
        assert manager.get("b").name == "b"
        for unknown in ("c", "", "../../etc/passwd", "org/model", "fake"):
            with pytest.raises(ModelNotFound):
                manager.get(unknown)
            with pytest.raises(ModelNotFound):
                await manager.wait(unknown)
        assert await answer(manager.get("a"))


async def test_no_models_means_that_none_is_found():
    async with open_models({}) as manager:
        assert list(manager.statuses()) == []
        with pytest.raises(ModelNotFound):
            manager.get(None)


async def test_loading_model_is_not_ready_and_says_how_far_it_is():
    reports: list[tuple[str, float, str]] = []
    models = {"slow": fake_model(open_delay_s=3), "quick": fake_model()}
    models["pooler"] = ModelSettings(source="fake-pooler", backend="fake-pooler")
    async with open_models(models, 0, lambda *report: reports.append(report)) as manager:
        while manager.statuses()[1].state != "ready" or not manager.statuses()[0].progress:  # noqa: ASYNC110 - nothing tells of both
            await asyncio.sleep(0.02)
        slow, quick, _ = manager.statuses()
        with pytest.raises(ModelNotReady, match="'slow' is loading") as refused:
            manager.get("slow")
        with pytest.raises(ModelNotReady):
            await manager.wait("slow")
        await manager.wait_settled(15)
        ready = manager.statuses()[0]

    assert (slow.state, quick.state, ready.state) == ("loading", "ready", "ready")
    assert 0 < slow.progress < 1
    assert slow.progress_text == "imagining weights"
    assert slow.info is None
    assert refused.value.retry_after_s >= 1
    assert ready.progress == 1
    assert ready.info is not None
    assert ready.info.vocab_size > 0
    assert (ready.backend, ready.reason) == ("fake", "named in the settings")
    assert abs(ready.created - time.time()) < 60
    ends = {(name, text) for name, _, text in reports if text.startswith("ready")}
    assert ends == {("slow", "ready"), ("quick", "ready"), ("pooler", "ready for embed")}


async def test_model_that_cannot_load_fails_with_the_reason_and_the_others_serve():
    models = {
        "refused": fake_model(faults={"refuse_to_open": "damaged file"}),
        "missing": ModelSettings(source="./nowhere.gguf"),
        "no-backend": ModelSettings(source="fake", backend="nonsense"),
        "good": fake_model(),
    }
    async with open_models(models) as manager:
        errors = {status.name: status.error for status in manager.statuses() if status.state == "failed"}
        with pytest.raises(ModelLoadError, match="'refused' could not be loaded: damaged file"):
            manager.get("refused")

        assert await answer(manager.get("good"))
    assert errors["refused"] == "damaged file"
    assert "file or folder not found: './nowhere.gguf'" in errors["missing"]
    assert "unknown backend 'nonsense'" in errors["no-backend"]
    assert set(errors) == {"refused", "missing", "no-backend"}


async def test_model_source_that_raises_fails_its_own_model_only():
    def find() -> ModelSource | None:
        raise OSError("a bug of the plugin")

    settings = Settings(models={"bad": ModelSettings(source="broken"), "good": fake_model()})
    registry = evolve(PluginRegistry.for_settings(settings), model_sources={"broken": find})
    manager = ModelManager(settings, registry)
    await manager.start()
    await manager.wait_settled(5)
    bad, good = manager.statuses()
    await manager.close()

    said = "The model source 'broken' of the plugin 'tests.core.serving.test_models' failed in its function."
    assert (bad.state, bad.error) == ("failed", said)
    assert good.state == "ready"


async def test_wrong_option_is_a_configuration_error_of_start():
    with pytest.raises(ConfigError, match=r"models\.m\.step_delay:.*'step_delay_s'"):
        async with open_models({"m": fake_model(step_delay=1)}):
            pass


async def test_python_of_another_environment_contradicts_a_thread():
    with pytest.raises(ConfigError, match=r"models\.m\.python"):
        async with open_models({"m": evolve(fake_model(), python="/usr/bin/python3")}):
            pass


async def test_generic_settings_reach_the_runner_and_the_scheduler():
    async with open_models({"m": fake_model(context=77, slots=3)}) as manager:
        model = manager.get("m")

        assert model.info.max_context == 77
        assert (await model.engine.stats()).max_sequences == 3


async def test_backend_that_is_an_engine_lives_in_this_process(tmp_path):
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"tokens": [{"text": "Hel"}, {"text": "lo"}]}))
    async with open_models({"m": ModelSettings(source=str(script), backend="scripted")}) as manager:
        assert await answer(manager.get("m"), None) == "Hello"


async def test_model_without_a_backend_is_opened_by_the_one_that_suits():
    settings = Settings(models={"m": ModelSettings(source="fake", isolation="thread")})
    manager = ModelManager(settings, PluginRegistry.load(settings.plugins, builtin=["fake"]))
    await manager.start()
    (status,) = manager.statuses()
    await manager.close()

    assert (status.backend, status.reason) == ("fake", "the built-in fake model")


# -- deaths ----------------------------------------------------------------------------------------


async def test_killed_worker_ends_the_stream_and_the_next_request_is_served():
    async with open_models({"m": fake_model("process", step_delay_s=0.005)}) as manager:
        model = manager.get("m")
        stream = asyncio.create_task(answer(model, None))
        await asyncio.sleep(0.1)
        os.kill(worker_pid(model), signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(EngineDead, match="SIGKILL"):
                await stream
        await asyncio.sleep(0)
        (status,) = manager.statuses()
        with pytest.raises(ModelNotReady, match="restarting"):
            manager.get("m")
        text = await answer(await manager.wait("m"))
        (after,) = manager.statuses()

        assert text
        assert status.state == "restarting"
        assert "SIGKILL" in str(status.error)
        assert status.info is not None
        assert (after.state, after.num_restarts, after.error) == ("ready", 1, None)
        assert after.created == status.created


async def test_model_that_comes_up_is_never_given_up_however_often_it_dies():
    async with open_models({"m": fake_model(faults={"abort_at_step": 1}, isolation="process")}) as manager:
        for _ in range(4):
            with pytest.raises(EngineDead, match="SIGABRT"):
                await answer(await manager.wait("m"))
        (status,) = manager.statuses()

        assert status.num_restarts >= 3
        assert (await manager.wait("m")).info.backend == "fake"


@pytest.fixture
def breaking_python(tmp_path: Path) -> Path:
    """An interpreter that fails to start from its second start on."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ -e {tmp_path}/used ] && exit 3\ntouch {tmp_path}/used\nexec "$REAL_PYTHON" "$@"\n')
    python.chmod(0o755)
    return python


async def test_model_that_does_not_come_up_again_fails_after_a_few_starts(breaking_python, monkeypatch):
    monkeypatch.setenv("REAL_PYTHON", sys.executable)
    async with open_models({"m": evolve(fake_model("process"), python=str(breaking_python))}) as manager:
        os.kill(worker_pid(manager.get("m")), signal.SIGKILL)
        async with asyncio.timeout(60):
            await until(lambda: manager.statuses()[0].state != "ready")
            with pytest.raises(ModelLoadError, match=r"given up after 3 failed starts.*code 3"):
                await manager.wait("m")

        assert manager.statuses()[0].state == "failed"


async def test_close_while_loading_does_not_wait_for_the_load():
    began = time.monotonic()
    async with open_models({"m": fake_model("process", open_delay_s=600.0)}, 0.1):
        pass

    assert time.monotonic() - began < 60


async def test_close_ends_streams():
    async with open_models({"m": fake_model(step_delay_s=0.005)}) as manager:
        stream = asyncio.create_task(answer(manager.get("m"), None))
        await asyncio.sleep(0.05)
    with pytest.raises(EngineDead, match="shutting down"):
        await stream


# -- restarts --------------------------------------------------------------------------------------


def test_restart_pauses_grow_to_a_limit_and_begin_anew_after_a_stable_time():
    restarts = Restarts(RestartPolicy(first_delay_s=0.5, factor=2, max_delay_s=3, stable_after_s=60))

    assert [restarts.died(ready_s=1) for _ in range(6)] == [0, 0.5, 1, 2, 3, 3]
    assert restarts.died(ready_s=60) == 0
    assert restarts.died(ready_s=59) == 0.5
    assert restarts.total == 8
    assert all(restarts.died(ready_s=1) is not None for _ in range(2000)), "no overflow, never given up"


def test_deaths_of_work_cost_the_model_no_pause():
    """Whose work it was waits instead; see ``enginehouse.recovery``."""
    restarts = Restarts(RestartPolicy(first_delay_s=0.5, factor=2, max_delay_s=3, stable_after_s=60))

    assert [restarts.died(ready_s=1, is_of_work=True) for _ in range(6)] == [0] * 6
    assert [restarts.died(ready_s=1) for _ in range(3)] == [0, 0.5, 1], "those of an idle model do"
    assert restarts.died(ready_s=1, is_of_work=True) == 0
    assert restarts.total == 10


def test_restart_is_given_up_after_failed_starts_in_a_row():
    restarts = Restarts(RestartPolicy(max_failed_starts=3))

    assert [restarts.died(None) is None for _ in range(3)] == [False, False, True]
    restarts = Restarts(RestartPolicy(max_failed_starts=3))
    row = [None, None, 1.0, None, None, None]
    assert [restarts.died(ready_s) is None for ready_s in row] == [False] * 5 + [True]


# -- sources and choice ----------------------------------------------------------------------------


def test_source_is_an_offered_name_or_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "starter").mkdir()
    sources = {"starter": lambda: ModelSource("starter", tmp_path / "packaged.gguf"), "absent": lambda: None}
    offered = evolve(NO_PLUGINS, model_sources=sources)

    assert find_source("starter", offered).path == tmp_path / "packaged.gguf"
    assert find_source("./starter", offered) == ModelSource("./starter", tmp_path / "starter")
    assert find_source("http://upstream/v1", offered).path is None
    with pytest.raises(ModelLoadError, match=r"pip install 'enginehouse\[absent\]'"):
        find_source("absent", offered)


class BrokenShelf(Shelf):
    """A hub whose library is damaged."""

    def is_complete(self, text: str) -> bool:
        raise ImportError("damaged library")


@pytest.mark.parametrize("pull", [True, False])
async def test_a_hub_that_fails_fails_the_models_that_need_it(pull: bool) -> None:
    models = {"far": ModelSettings(source="owner/model"), "near": fake_model()}
    settings = Settings(models=models, server=ServerSettings(pull=pull))
    registry = evolve(PluginRegistry.for_settings(settings), model_hubs={"shelf": BrokenShelf()})
    manager = ModelManager(settings, registry, None, FAST)
    try:
        await manager.start()
        await manager.wait_settled(10)
        states = {status.name: status.state for status in manager.statuses()}
    finally:
        await manager.close()

    assert states == {"far": "failed", "near": "ready"}


def test_missing_source_says_what_it_may_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    offered = evolve(NO_PLUGINS, model_sources={"starter": lambda: None}, model_hubs={"shelf": Shelf()})

    assert no_such_model("owner/model:Q4_K_M", offered).message.endswith("; ask for owner/model:Q4_K_M")
    for path in ("models/model.gguf", "/a/b.gguf", "stater"):
        assert "named model sources: starter" in no_such_model(path, offered).message


def test_id_of_a_hub_is_what_no_path_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "m.gguf").touch()
    hubs = evolve(NO_PLUGINS, model_hubs={"shelf": Shelf(tmp_path / "shelf")})

    assert find_source("here/m.gguf", hubs).path == tmp_path / "here" / "m.gguf"
    assert find_source("owner/model", hubs) == ModelSource("owner/model", tmp_path / "shelf")
    assert missing_download("owner/model", hubs) is None
    assert plain(missing_download("owner/model", evolve(hubs, model_hubs={"shelf": Shelf()}))) == Shelf()
    assert missing_download("here/other.gguf", evolve(hubs, model_hubs={"shelf": Shelf()})) is None


async def test_download_tells_how_far_it_is_and_how_it_ended():
    seen: list[tuple[float, str]] = []
    with pytest.raises(DownloadError, match="lent out"):
        await download(Shelf(), "owner/model", lambda *report: seen.append(report))
    await asyncio.sleep(0)

    assert seen == [(0.5, "bringing it")]


@frozen
class _Backend(FakeBackend):
    """A backend that says what it is told to say."""

    name: str
    score: float = 0.0
    missing: str = ""
    fails: bool = False

    def probe(self) -> Probe:
        return Probe(available=not self.missing, reason=self.missing)

    def match(self, source: ModelSource) -> Match:
        if self.fails:
            raise OSError("a bug")
        return Match(self.score, f"score {self.score}")


def _backends(*backends: _Backend) -> dict[str, Any]:
    """Return backends as the registry holds them."""
    return {one.name: guarded(one, Backend, guard_of(one, "backend")) for one in backends}


def test_best_available_backend_is_chosen_with_its_reason(tmp_path):
    source = ModelSource("m", tmp_path)
    backends = _backends(
        _Backend("better", 0.9, missing="not installed"), _Backend("broken", 1, fails=True), _Backend("z", 0.5)
    )

    assert choose_backend(source, None, backends).backend.name == "z"
    assert choose_backend(source, None, backends).reason == "score 0.5"
    assert choose_backend(source, None, backends, probe=False).backend.name == "better"
    assert choose_backend(source, None, _backends(_Backend("b", 0.5), _Backend("a", 0.5))).backend.name == "a"


def test_unsuitable_source_names_the_reason_of_each_backend(tmp_path):
    source = ModelSource("m", tmp_path)
    backends = _backends(_Backend("a", missing="not installed"), _Backend("b", fails=True), _Backend("c"))
    with pytest.raises(ModelLoadError, match=r"a: not installed; b: The backend 'b' .* failed in [a-z]+\.; c: score 0"):
        choose_backend(source, None, backends)
    with pytest.raises(ModelLoadError, match="no backend is installed"):
        choose_backend(source, None, {})


def test_wanted_backend_must_exist_and_be_able_to_run(tmp_path):
    source = ModelSource("m", tmp_path)
    backends = _backends(_Backend("a", missing="run: pip install x"), _Backend("b"))

    assert choose_backend(source, "b", backends).reason == "named in the settings"
    with pytest.raises(ModelLoadError, match="installed backends: a, b"):
        choose_backend(source, "c", backends)
    with pytest.raises(ModelLoadError, match="'a' cannot run here: run: pip install x"):
        choose_backend(source, "a", backends)
    assert choose_backend(source, "a", backends, probe=False).backend.name == "a"


def test_plan_takes_generic_settings_only_where_the_backend_knows_them(tmp_path):
    settings = Settings(models={"m": ModelSettings(source="fake", backend="fake", context=9, slots=2)})
    plan = plan_model("m", settings.models["m"], PluginRegistry.for_settings(settings))

    assert plan.options == {"context": 9, "slots": 2}
    assert plan.options_path == "models.m"
