"""Group H: a model file with a hostile chat template, behind the real command."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from enginehouse_testkit.server import started_server

from .client import HOSTILE, Server, check_client_error, write_gguf_with_template

pytestmark = pytest.mark.llamacpp


def ask(server: Server, content: str):
    return server.try_chat(messages=[{"role": "user", "content": content}], max_tokens=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def hostile(folder: Path) -> Iterator[Server]:
    path = write_gguf_with_template(folder / "hostile.gguf", HOSTILE)
    with started_server(path, cwd=folder) as process:
        server = Server.connect(process.url or "", "hostile")
        with server.client:
            yield server.wait_ready()
        assert "Traceback" not in process.output


@pytest.mark.parametrize("attack", ["walk", "run"])
def test_h23_a_template_reaches_no_internals(hostile: Server, folder: Path, attack: str) -> None:
    check_client_error(ask(hostile, attack))
    assert not list(folder.rglob("PWNED"))
    assert ask(hostile, "fine").status_code == 200


def test_h23_a_template_changes_nothing(hostile: Server) -> None:
    before = ask(hostile, "fine").json()["usage"]["prompt_tokens"]
    check_client_error(ask(hostile, "change"))
    assert ask(hostile, "fine").json()["usage"]["prompt_tokens"] == before


def test_h23_an_endless_template_ends_and_others_are_served_meanwhile(hostile: Server) -> None:
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        looping = pool.submit(ask, hostile, "loop")
        time.sleep(0.5)
        hostile.complete(max_tokens=2)  # what needs this template as well waits, so that others find a process
        assert not looping.done(), "the other request had to wait"
        error = check_client_error(looping.result())

    assert "template" in error["message"]
    assert time.perf_counter() - began < 60
    assert ask(hostile, "fine").status_code == 200


def test_h23_a_template_with_a_syntax_error_is_told_at_load(folder: Path) -> None:
    path = write_gguf_with_template(folder / "syntax.gguf", "{% for m in messages %}{{ m.content }}{% if %}")
    with pytest.raises(RuntimeError, match=r"(?s)chat template.*line 1"), started_server(path, cwd=folder):
        raise AssertionError("it serves")
