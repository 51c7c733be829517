"""Workers in other virtual environments: real ones, with libraries that this one lacks, or that do not fit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx
import psutil
import pytest

import enginehouse.workers.client as client_module
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.types import EngineSettings
from enginehouse.settings.config import ModelSettings, PluginsSettings
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.launch import check_hello
from enginehouse.workers.messages import PROTOCOL, Hello, Load, own_hello
from enginehouse_testkit.waiting import wait_until

from .environments import installed_plugin, make_environment, packages_of_this_one
from .rig import Rig, fake, rig

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")

# The backend of somebody else, whose library is in one environment only. It holds 200 MB.
BORROWED = """
import enginehouse
from enginehouse.contract.errors import MissingDependency
from enginehouse_testkit.fake_runner import FakeBackend, FakeRunner

class Backend(FakeBackend):
    name = "borrowed"
    def open(self, source, options, progress):
        try:
            import borrowed_library
        except ModuleNotFoundError:
            raise MissingDependency("borrowed_library", "borrowed") from None
        runner = FakeRunner(options)
        runner.weights = borrowed_library.weights(200_000_000)
        return runner

@enginehouse.hookimpl
def register_backends(register):
    register(Backend())
"""
LIBRARY = "def weights(size):\n    return bytearray(b'x') * size\n"
MB = 1_000_000


@pytest.fixture
def plugin(tmp_path, monkeypatch) -> Path:
    """The folder of the plugin, which is installed here and may be installed elsewhere."""
    folder = installed_plugin(tmp_path / "plugin", "borrowed", BORROWED)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def library(tmp_path) -> Path:
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "borrowed_library.py").write_text(LIBRARY)
    return folder


def borrowed(python: Path) -> ModelSettings:
    return ModelSettings(source="fake", backend="borrowed", python=str(python), options={"step_delay_s": 0.005})


def test_two_models_in_two_environments_answer_at_once(plugin, library, tmp_path):
    """One port; each model's library is in its own environment, and neither is in the server's."""
    here = make_environment(tmp_path / "here", packages_of_this_one())
    there = make_environment(tmp_path / "there", [*packages_of_this_one(), plugin, library])
    with rig({"ours": fake(python=str(here)), "theirs": borrowed(there)}) as server:
        answers = [server.ask(model=model, max_tokens=150) for model in ("ours", "theirs", "ours", "theirs")]
        for answer in answers:
            answer.wait_chunks(3)
        texts = [answer.wait().text for answer in answers]
        interpreters = {
            child.cmdline()[0]
            for child in psutil.Process().children()
            if child.status() != psutil.STATUS_ZOMBIE and "enginehouse.workers" in child.cmdline()
        }

        assert all(answer.is_complete for answer in answers)
        assert len(set(texts)) == 1, "the same fake model, whichever environment it runs in"
        assert {str(here), str(there)} <= interpreters


def test_stream_in_another_environment_outlives_its_worker(plugin, library, tmp_path):
    python = make_environment(tmp_path / "there", [*packages_of_this_one(), plugin, library])
    with rig({"m": borrowed(python)}) as server:
        expected = server.ask().wait()
        answer = server.ask()
        answer.wait_chunks(4)
        server.kill()

        assert answer.wait().choices == expected.choices


def test_unloading_gives_all_memory_back(plugin, library, tmp_path):
    python = make_environment(tmp_path / "there", [*packages_of_this_one(), plugin, library])
    with rig({"m": borrowed(python)}) as server:
        (worker,) = server.workers()
        assert server.ask().wait().text
        loaded, own_before = worker.memory_info().rss, psutil.Process().memory_info().rss
        httpx.post(f"{server.url}/admin/models/m/unload", json={}, timeout=60).raise_for_status()
        wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the worker's end")
        own_after = psutil.Process().memory_info().rss

        assert loaded > 200 * MB
        assert not server.workers()
        assert own_after - own_before < 20 * MB
        assert server.ask().wait().text, "it is loaded again"


def reason_of_failure(server: Rig) -> str:
    wait_until(lambda: server.ask().wait().error["code"] != "model_not_ready", "the failure")
    answer = server.ask().wait()
    assert answer.status == 503
    return str(answer.error["message"])


def test_environment_without_enginehouse_is_named(tmp_path):
    python = make_environment(tmp_path / "bare", [])
    with rig({"fine": fake(isolation="thread"), "m": fake(python=str(python))}, ready=False) as server:
        reason = reason_of_failure(server)

        assert f"models.m.python: {python} did not become a worker" in reason
        assert "cannot import enginehouse (ModuleNotFoundError" in reason
        assert f"{python} -m pip install 'enginehouse==" in reason


def test_environment_with_another_version_is_named(tmp_path):
    other = tmp_path / "other"
    (other / "enginehouse-99.0.dist-info").mkdir(parents=True)
    (other / "enginehouse-99.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: enginehouse\nVersion: 99.0\n"
    )
    python = make_environment(tmp_path / "newer", [other, *packages_of_this_one()])
    with rig({"fine": fake(isolation="thread"), "m": fake(python=str(python))}, ready=False) as server:
        reason = reason_of_failure(server)

        assert "models.m.python: the environment" in reason
        assert "has enginehouse 99.0" in reason
        assert f"this server is enginehouse {own_hello().version}" in reason


def test_library_that_is_missing_there_is_named(plugin, tmp_path):
    python = make_environment(tmp_path / "there", [*packages_of_this_one(), plugin])
    with rig({"fine": fake(isolation="thread"), "m": borrowed(python)}, ready=False) as server:
        reason = reason_of_failure(server)

        assert "borrowed_library is not installed" in reason
        assert f"models.m.python: {python}" in reason


async def open_with(python: str) -> WorkerEngine:
    load = Load("fake", "fake", None, {}, "models.m", EngineSettings(), PluginsSettings())
    return await WorkerEngine.open(load, isolation="process", python=python, on_progress=lambda share, text: None)


async def test_program_that_says_nothing_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "_HELLO_S", 0.3)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    with pytest.raises(ModelLoadError, match=r"models\.m\.python: .*python sent nothing for 0.3 s"):
        await open_with(str(python))


async def test_interpreter_that_does_not_exist_is_named():
    with pytest.raises(ModelLoadError, match=r"models\.m\.python: the worker process could not be started"):
        await open_with("/no/such/python")


async def test_interpreter_that_ends_is_reported_with_its_version():
    """It can import everything, but it is told to do something else."""
    with pytest.raises(ModelLoadError, match=r"models\.m\.python: .* did not become a worker: .*code 1"):
        await open_with("/bin/false")


def test_other_protocol_of_the_same_version_is_refused():
    ours = own_hello()
    check_hello(ours, "models.m.python")
    with pytest.raises(ModelLoadError, match=rf"protocol {PROTOCOL + 1}\), but this server"):
        check_hello(Hello(PROTOCOL + 1, ours.version, ours.python, sys.prefix), "models.m.python")


@pytest.mark.slow
@pytest.mark.llamacpp
@pytest.mark.hf
@pytest.mark.timeout(600)
def test_two_backends_in_two_environments_answer_at_once(tmp_path):
    """llama.cpp in one, Hugging Face in the other: the same weights, one port, both streams at the same time."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("torch")
    models = {
        backend: ModelSettings(
            source="starter",
            backend=backend,
            context=512,
            python=str(make_environment(tmp_path / backend, packages_of_this_one())),
        )
        for backend in ("llamacpp", "hf")
    }
    with rig(models, ready=False) as server:
        server.wait_ready(500)
        fields = {"prompt": "The harbour lay quiet under the fog, and", "max_tokens": 8}
        answers = [server.ask(model=model, **fields) for model in models]
        for answer in answers:
            answer.wait_chunks(2)
        texts = [answer.wait().text for answer in answers]
        interpreters = {
            child.cmdline()[0]
            for child in psutil.Process().children()
            if child.status() != psutil.STATUS_ZOMBIE and "enginehouse.workers" in child.cmdline()
        }

        assert all(answer.is_complete for answer in answers)
        assert texts[0][:10] == texts[1][:10], "kernels differ, the model does not"
        assert {model.python for model in models.values()} <= interpreters
