"""``enginehouse pull`` as users run it, and servers whose models are on the hub."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants

from enginehouse.settings.config import ModelSettings, ServerSettings, Settings
from enginehouse_hub.hub import HuggingFaceHub
from enginehouse_testkit.server import started_server
from enginehouse_testkit.server_thread import server_thread
from enginehouse_testkit.stand_in_hub import Repository, StandIn, commit_of, digest_of
from enginehouse_testkit.waiting import wait_until

from .conftest import GGUF, SAFETENSORS, WEIGHTS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: StandIn) -> Path:
    """An empty current folder; commands ask the hub that runs here."""
    for name in [name for name in os.environ if name.startswith("ENGINEHOUSE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    return empty


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "enginehouse", *arguments]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


# -- enginehouse pull ------------------------------------------------------------------------------


def test_pull_says_what_it_fetches_and_how_to_serve_it() -> None:
    done = run("pull", "owner/packed:F16")

    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "2 files, 1.3 MB",
        "fetching F16/m-F16-00001-of-00002.gguf (1 of 2)",
        "fetching F16/m-F16-00002-of-00002.gguf (2 of 2)",
    ]
    assert "owner/packed:F16: fetched 1.3 MB" in done.stdout
    assert f"commit  {commit_of('main')}" in done.stdout
    assert "enginehouse serve owner/packed:F16" in done.stdout


def test_pull_of_what_is_here_says_so() -> None:
    run("pull", "owner/packed:Q4_K_M")
    again = run("pull", "owner/packed:Q4_K_M")
    offline = run("pull", "owner/packed:Q4_K_M", HF_HUB_OFFLINE="1")

    assert "everything was here\n" in again.stdout
    assert "everything was here (HF_HUB_OFFLINE forbids asking the hub for changes)" in offline.stdout


def test_pull_shows_a_bar_in_a_terminal(hub: StandIn) -> None:
    hub.hold = "model.safetensors"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command("pull", "owner/plain"), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert hub.held.wait(60)
    shown = ""
    while "1.5/3.0 MB" not in shown:
        shown += os.read(ours, 65536).decode()
    hub.released.set()
    while f"commit  {commit_of('main')}" not in shown:
        shown += os.read(ours, 65536).decode()
    os.close(ours)

    assert process.wait(60) == 0
    assert "model.safetensors" in shown
    assert "━" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_pull_goes_on_where_it_was(hub: StandIn, downloads: Path, number: signal.Signals) -> None:
    hub.hold = "model.safetensors"
    incomplete = downloads / "models--owner--plain/blobs" / f"{digest_of('model.safetensors', WEIGHTS)}.incomplete"
    with subprocess.Popen(command("pull", "owner/plain"), stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: incomplete.exists() and incomplete.stat().st_size == len(WEIGHTS) // 2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    hub.released.set()
    hub.hold = None
    hub.asked.clear()
    again = run("pull", "owner/plain")

    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert "The same command continues from here." in errors or number == signal.SIGKILL
    assert again.returncode == 0
    assert "6 files, 3.0 MB, 1.5 MB of it is here" in again.stderr
    assert hub.contents_asked() == [("model.safetensors", len(WEIGHTS) // 2)]
    path = HuggingFaceHub().find("owner/plain")
    assert path is not None
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_dry_run_lists_files_with_their_sizes() -> None:
    done = run("pull", "owner/plain", "--dry-run", "--code")

    assert "    3.0 MB  model.safetensors" in done.stdout
    assert "modeling_own.py" in done.stdout
    assert "    3.0 MB  in 7 files" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["owner/gated"], 1, "is gated: accept its terms at"),
        (["owner/packed"], 1, "name one, as in owner/packed:Q4_K_M"),
        (["not-an-id"], 2, "is not a model id; write OWNER/NAME"),
        ([], 2, "Missing argument"),
    ],
)
def test_pull_refuses_in_one_line(arguments: list[str], code: int, message: str) -> None:
    done = run("pull", *arguments)

    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_token_of_the_environment_opens_a_gated_model() -> None:
    assert run("pull", "owner/gated", HF_TOKEN="hf_right").returncode == 0
    assert "hf_other" not in run("pull", "owner/gated", HF_TOKEN="hf_other").stderr


# -- servers ---------------------------------------------------------------------------------------


def test_serve_says_which_command_downloads_the_model(hub: StandIn) -> None:
    done = run("serve", "owner/packed:Q4_K_M", "--port", "0")

    assert done.returncode == 2
    assert "run: enginehouse pull owner/packed:Q4_K_M (or start the server with --pull)" in done.stderr
    assert hub.asked == []


def settings(*sources: str, pull: bool = True) -> Settings:
    models = {source: ModelSettings(source=source, backend="fake", isolation="thread") for source in sources}
    return Settings(models=models, server=ServerSettings(pull=pull))


def chat(client: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    return client.post("/v1/chat/completions", json=body)


def test_server_downloads_at_its_start_and_shows_how_far_it_is(hub: StandIn) -> None:
    hub.hold = "m-Q4_K_M.gguf"
    name = "owner/packed:Q4_K_M"
    with server_thread(settings(name)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert hub.held.wait(60)
        wait_until(lambda: client.get("/health").json()["models"][name]["progress"] > 0)
        waiting, refused = client.get("/health"), chat(client, name)
        hub.released.set()
        wait_until(lambda: client.get("/health").status_code == 200)
        answered = chat(client, name)

    assert (waiting.status_code, waiting.json()["status"]) == (503, "loading")
    assert waiting.json()["models"][name]["progress"] < 1
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert answered.status_code == 200


def test_server_without_pull_downloads_nothing_whatever_is_asked(hub: StandIn, downloads: Path, folder: Path) -> None:
    without = settings("owner/plain", str(folder), pull=False)
    with server_thread(without) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        wait_until(lambda: client.get("/health").json()["status"] == "degraded")
        answers = [chat(client, name) for name in ("owner/plain", "owner/packed:Q8_0")]

    assert [answer.status_code for answer in answers] == [503, 404]
    assert "enginehouse pull owner/plain" in answers[0].json()["error"]["message"]
    assert hub.asked == []
    assert not downloads.exists()


def test_failed_download_fails_its_model_only(hub: StandIn) -> None:
    both = settings("owner/gated", "owner/plain")
    with server_thread(both) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        wait_until(lambda: client.get("/health").json()["status"] == "degraded")
        failed, served = chat(client, "owner/gated"), chat(client, "owner/plain")

    assert failed.status_code == 503
    assert "is gated" in failed.json()["error"]["message"]
    assert served.status_code == 200


def test_server_ends_while_it_downloads(hub: StandIn) -> None:
    hub.hold = "model.safetensors"
    began = time.monotonic()
    with server_thread(settings("owner/plain")):
        assert hub.held.wait(60)

    assert time.monotonic() - began < 60


def test_what_is_here_is_served_without_asking_the_hub(hub: StandIn) -> None:
    run("pull", "owner/plain")
    hub.asked.clear()
    with server_thread(settings("owner/plain")) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        wait_until(lambda: client.get("/health").status_code == 200)

    assert hub.asked == []


def test_contents_of_the_fixtures_are_what_the_tests_say() -> None:
    assert len(GGUF["F16/m-F16-00001-of-00002.gguf"] + GGUF["F16/m-F16-00002-of-00002.gguf"]) == 1_300_000
    assert len(SAFETENSORS["model.safetensors"]) == 3_000_000


@pytest.mark.llamacpp
def test_real_model_is_pulled_and_served_by_one_command(hub: StandIn, downloads: Path) -> None:
    """From an empty cache to an answer: the packaged model, as a repository of the hub."""
    from enginehouse_starter.source import find_starter_model

    found = find_starter_model()
    assert found is not None
    assert found.path is not None
    hub.repositories["owner/smol"] = Repository({"main": {"smol-Q4_1.gguf": found.path.read_bytes()}})
    hub.cut_after, hub.num_cuts = {"smol-Q4_1.gguf": 40_000_000}, 1
    body = {"temperature": 0, "messages": [{"role": "user", "content": "Name the capital of France."}]}
    with started_server("owner/smol:Q4_1", "--pull", "--backend", "llamacpp") as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
        assert "choices" in answer, answer

    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["model"] == "owner/smol:Q4_1"
    assert hub.contents_asked() == [("smol-Q4_1.gguf", 0), ("smol-Q4_1.gguf", 40_000_000)]
