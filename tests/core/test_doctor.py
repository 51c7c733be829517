"""``enginehouse doctor``: what it finds, what it advises, and when that is a problem."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from enginehouse.cli import main

_MODEL = '[models.m]\nsource = "."\nbackend = "fake"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test runs in an empty folder, without settings in the environment."""
    for name in [name for name in os.environ if name.startswith("ENGINEHOUSE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def examine(config: str = "") -> tuple[int, list[dict[str, Any]], list[str]]:
    """Exit code, findings and problems, with a model that runs everywhere; the same are in the table."""
    Path("enginehouse.toml").write_text(f"{config}\n{_MODEL}", encoding="utf-8")
    result = CliRunner().invoke(main, ["doctor", "--json"], catch_exceptions=False)
    report = json.loads(result.stdout)
    shown = CliRunner().invoke(main, ["doctor"], catch_exceptions=False)

    assert shown.exit_code == result.exit_code == (1 if report["problems"] else 0)
    for found in report["findings"]:
        assert found["state"] in ("ok", "advice", "problem")
        assert bool(found["advice"]) or found["state"] != "advice", found
        assert found["text"].splitlines()[0] in shown.output
    return result.exit_code, report["findings"], report["problems"]


def of(findings: list[dict[str, Any]], subject: str) -> dict[str, Any]:
    return next(found for found in findings if found["subject"] == subject)


def test_everything_is_looked_at() -> None:
    _, findings, _ = examine("[server]\nport = 0\n")

    subjects = {found["subject"] for found in findings}
    assert subjects >= {"compiler", "plugins", "memory", "port", "open files"}
    assert of(findings, "port")["state"] == "ok"
    assert "samplers" in of(findings, "plugins")["text"]


def test_settings_that_cannot_be_used_are_one_problem_among_others() -> None:
    code, findings, problems = examine("[server]\nprot = 1\n")

    assert code == 1 and "server.prot" in problems[0] and "did you mean" in problems[0]
    assert of(findings, "settings")["state"] == "problem"
    assert of(findings, "memory")


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, findings, _ = examine(f"[server]\nport = {other.getsockname()[1]}\n")

    found = of(findings, "port")
    assert (code, found["state"]) == (0, "advice") and "server.port" in found["advice"]


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code, findings, _ = examine()

    assert code == 0
    assert of(findings, "compiler")["state"] == "advice" and "build-essential" in of(findings, "compiler")["advice"]


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(bytes(60_000))
    models = "".join(f'[models.{name}]\nsource = "{name}"\nbackend = "fake"\n' for name in ("a", "b"))

    def state(budget: str) -> str:
        return str(of(examine(f"[limits]\nmemory_budget = {budget}\n{models}")[1], "memory")["state"])

    assert state("1") == "problem"
    assert state('"100GB"') == "ok"


def test_an_open_server_is_told_what_to_do() -> None:
    code, findings, _ = examine('[server]\nhost = "0.0.0.0"\nport = 0\ninsecure = true\ncors_origins = ["*"]\n')

    reach = [found for found in findings if found["subject"] == "reach"]
    assert code == 0 and len(reach) == 2 and all(found["state"] == "advice" for found in reach)


@pytest.mark.skipif(os.name == "nt", reason="modes of files are Unix")
@pytest.mark.parametrize(("mode", "state"), [(0o600, "ok"), (0o640, "ok"), (0o644, "advice"), (0o666, "problem")])
def test_modes_of_the_key_file(tmp_path: Path, mode: int, state: str) -> None:
    line = (
        CliRunner().invoke(main, ["keys", "hash", "alice", "--stdin"], input="a-key-of-more-than-20-characters").stdout
    )
    (tmp_path / "keys.txt").write_text(line, encoding="utf-8")
    (tmp_path / "keys.txt").chmod(mode)
    code, findings, problems = examine('[auth]\nkey_file = "keys.txt"\n')

    found = of(findings, "keys")
    assert found["state"] == state
    assert code == (1 if state == "problem" else 0) and bool(problems) == (state == "problem")
    if state != "ok":
        assert found["advice"].startswith("chmod 600")


def test_a_key_file_that_cannot_be_read(tmp_path: Path) -> None:
    code, findings, _ = examine('[auth]\nkey_file = "nothing.txt"\n')
    assert code == 1 and of(findings, "keys")["state"] == "problem"

    (tmp_path / "keys.txt").write_text("nonsense\n", encoding="utf-8")
    code, findings, _ = examine('[auth]\nkey_file = "keys.txt"\n')
    assert code == 1 and "line 1" in of(findings, "keys")["text"]
