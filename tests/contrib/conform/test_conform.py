"""The checks themselves: a good server passes all, a bad one fails, and no check hangs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from enginehouse.cli import main
from enginehouse.cli.target import Target, connect
from enginehouse.contract.errors import ConfigError
from enginehouse.settings.config import AuthSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_conform.catalogue import CHECKS
from enginehouse_conform.check import Result
from enginehouse_conform.report import summary, to_json, to_markdown
from enginehouse_conform.running import run_checks
from enginehouse_testkit.server_thread import server_thread

KEY, ORIGIN = "key-for-checks", "https://app.example"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Our server with the fake model behind the real engine."""
    source = str(tmp_path_factory.mktemp("fake"))
    model = ModelSettings(source=source, backend="fake", isolation="thread", context=2048)
    settings = Settings(
        server=ServerSettings(cors_origins=(ORIGIN,)),
        auth=AuthSettings(keys=(KEY,)),
        models={"fake": model},
        plugins=PluginsSettings(allow=("llguidance", "parsers")),
    )
    with server_thread(settings) as running:
        while httpx.get(f"{running.url}/health", timeout=60, trust_env=False).status_code != 200:
            time.sleep(0.02)
        yield running.url


class _Bad(BaseHTTPRequestHandler):
    """Says 200 to everything, ignores what it is asked, and frames its streams wrongly."""

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "bad"}]})

    reason = "stop"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if b'"stream": true' in body:
            self._write(
                b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}}]}\ndata: [DONE]\n\n', "text/event-stream"
            )
        else:
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 3}
            message = {"role": "assistant", "content": "hi"}
            self._send({"choices": [{"index": 0, "message": message, "finish_reason": self.reason}], "usage": usage})

    def _send(self, data: Any) -> None:
        self._write(json.dumps(data).encode(), "application/json")

    def _write(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Cut(_Bad):
    """Says that every answer was cut, which must not excuse that none has the form that was asked for."""

    reason = "length"


class _Silent(_Bad):
    """Accepts requests and never answers them."""

    def do_POST(self) -> None:
        time.sleep(60)


@pytest.fixture(params=[_Bad])
def bad(request: pytest.FixtureRequest) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), request.param)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.llguidance
def test_good_server_passes_every_check(good: str) -> None:
    target = connect(good, key=KEY, origin=ORIGIN)
    results = list(run_checks(target, CHECKS, timeout_s=60))

    not_passed = [
        (result.behaviour, result.sentence, result.detail) for result in results if result.outcome != "passed"
    ]
    assert not_passed == []
    assert len(results) == len(CHECKS)


def test_bad_server_fails_and_every_failure_says_why(bad: str) -> None:
    results = list(run_checks(connect(bad), CHECKS, timeout_s=10))

    failed = [result for result in results if result.outcome == "failed"]
    passed = {result.behaviour for result in results if result.outcome == "passed"}
    assert len(failed) > 40
    assert all(result.detail for result in failed)
    # What a server that says 200 to everything can show at most.
    assert passed <= {"H05", "H08", "H11", "H14", "H17", "H21", "H22", "H32", "H33", "H34"}
    details = {result.behaviour: result.detail for result in failed}
    assert "H28" in details
    assert "H15" in details
    assert "H19" in details


@pytest.mark.parametrize("bad", [_Cut], indirect=True)
def test_answers_that_were_cut_must_have_started_in_their_form(bad: str) -> None:
    checks = [check for check in CHECKS if check.behaviour == "H18" or "cannot be enforced" in check.sentence]
    results = list(run_checks(connect(bad), checks, timeout_s=10))

    assert {result.outcome for result in results} == {"failed"} and len(results) == 3
    assert all("was cut begins with 'hi'" in result.detail for result in results)


@pytest.mark.parametrize("bad", [_Silent], indirect=True)
def test_silent_server_cannot_hold_a_check_for_longer_than_its_time(bad: str) -> None:
    checks = [check for check in CHECKS if check.behaviour in ("H01", "H28")]
    began = time.monotonic()
    results = list(run_checks(connect(bad), checks, timeout_s=0.2))

    assert time.monotonic() - began < 30
    assert {result.outcome for result in results} == {"failed"}
    assert "not done after 0.2 s" in {result.detail for result in results}


def test_what_is_not_told_is_skipped_and_no_failure(good: str) -> None:
    checks = [check for check in CHECKS if check.behaviour in ("H30", "H31")]
    results = list(run_checks(connect(good, key=KEY), checks, timeout_s=20))

    outcomes = {(result.behaviour, result.outcome) for result in results}
    assert outcomes == {("H30", "passed"), ("H31", "passed"), ("H31", "skipped")}


def test_every_check_has_a_number_and_one_sentence() -> None:
    sentences = [check.sentence for check in CHECKS]

    assert len(set(sentences)) == len(sentences)
    assert all(sentence.endswith(".") and sentence.count(". ") == 0 for sentence in sentences)
    assert [check.behaviour for check in CHECKS] == sorted(check.behaviour for check in CHECKS)
    assert all(check.behaviour[0] == "H" and 1 <= int(check.behaviour[1:]) <= 36 for check in CHECKS)


def test_reports_hold_every_result() -> None:
    results = [Result("H01", "One.", "passed"), Result("H02", "Two.", "failed", "got `a|b`\n<x>", 1.5)]
    target_data = json.loads(to_json(_target(), results))
    table = to_markdown(results)

    assert target_data["counts"] == {"passed": 1, "failed": 1}
    assert [entry["behaviour"] for entry in target_data["results"]] == ["H01", "H02"]
    assert "| H01 | One. | passed |" in table
    assert r"| H02 | Two. | failed: got `a\|b` &lt;x> |" in table
    assert summary(results) == "1 passed, 1 failed, 0 refused, 0 skipped"


def _target() -> Any:
    return Target("http://localhost/v1", "m")


def test_command_writes_files_and_its_exit_code_tells(good: str, bad: str, tmp_path: Path) -> None:
    runner = CliRunner()
    files = ["--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")]
    passed = runner.invoke(main, ["conform", good, "--key", KEY, "--only", "H27", *files])
    failed = runner.invoke(main, ["conform", bad, "--only", "h28"])
    unknown = runner.invoke(main, ["conform", good, "--only", "H99"])
    unreachable = runner.invoke(main, ["conform", "http://127.0.0.1:9"])

    assert (passed.exit_code, failed.exit_code, unknown.exit_code, unreachable.exit_code) == (0, 1, 2, 2)
    assert "2 passed" in passed.output
    assert "failed" in failed.output
    assert "H99" in unknown.output
    assert json.loads((tmp_path / "r.json").read_text())["counts"] == {"passed": 2}
    assert (tmp_path / "r.md").read_text().count("| H27 |") == 2


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_command_says_before_its_checks_where_nothing_can_be_written(tmp_path: Path, option: str) -> None:
    done = CliRunner().invoke(main, ["conform", "http://127.0.0.1:9", option, str(tmp_path / "no" / "results")])

    assert done.exit_code == 2
    assert f"the folder {tmp_path / 'no'}" in " ".join(done.output.split())


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_text_that_is_no_address_is_said_to_be_none(url: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        connect(url)


def test_model_must_be_one_that_is_listed(good: str) -> None:
    with pytest.raises(ConfigError, match="serves no model 'other'; it serves fake"):
        connect(good, model="other", key=KEY)
    with pytest.raises(ConfigError, match="lists no models: 401"):
        connect(good)
