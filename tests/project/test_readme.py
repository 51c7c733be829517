"""The README's commands: what can be run is run, the rest is compared with what it must agree with."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginehouse_testkit.server import started_server

from .repository import ROOT, pyproject, tox_environments, tox_ini

DOCUMENTED_URL = "http://127.0.0.1:8080"


def blocks(language: str) -> list[str]:
    """The README's fenced code blocks of one language, in order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    return [block for found, block in fenced if found == language]


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture
def scripted_url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "answer.json").write_text('{"tokens": [{"text": "The capital of France is"}, {"text": " Paris."}]}')
    (tmp_path / "enginehouse.toml").write_text("[models.starter]\nsource = 'answer.json'\nbackend = 'scripted'\n")
    with started_server("--config", tmp_path / "enginehouse.toml") as server:
        yield server.url or ""


def check_curl_example(url: str) -> None:
    """Run the curl block as it stands, and compare the answer with the block below it."""
    (command,) = [block for block in blocks("bash") if block.startswith("curl ")]
    shown = json.loads(blocks("json")[0])
    result = shell(command.replace(DOCUMENTED_URL, url))

    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    shown.pop("...")
    shown["id"] = answer["id"]
    assert covers(answer, shown), f"{answer} does not hold {shown}"


def covers(whole: Any, part: Any) -> bool:
    """Whether everything in ``part`` is in ``whole``."""
    if isinstance(part, dict):
        return all(key in whole and covers(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(covers, whole, part))
    return bool(whole == part)


def test_curl_example(scripted_url: str) -> None:
    check_curl_example(scripted_url)


@pytest.mark.llamacpp
def test_curl_example_on_the_starter_model() -> None:
    """Without arguments, as the first command of the README ends."""
    with started_server() as server:
        check_curl_example(server.url or "")


def test_first_command_installs_known_extras_and_serves() -> None:
    first = blocks("bash")[0].strip()

    extras = re.fullmatch(r"pip install '\.\[([a-z,]+)\]' && enginehouse serve", first)
    assert extras
    assert set(extras[1].split(",")) <= set(pyproject()["project"]["optional-dependencies"])


def test_code_starts_by_line_20() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()

    assert next(number for number, line in enumerate(lines, 1) if line.startswith("```")) <= 20


def test_compiler_check_says_what_to_install(tmp_path: Path) -> None:
    (command,) = [block for block in blocks("bash") if block.startswith("c++ ")]

    without = subprocess.run(
        [shutil.which("bash") or "bash", "-c", command],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert without.returncode == 0
    assert "no C++ compiler" in without.stdout


def test_test_command_is_what_continuous_integration_runs() -> None:
    """Its environments are the default ones, in two groups."""
    (command,) = [block.strip() for block in blocks("bash") if block.strip().endswith("tox")]
    script = (ROOT / ".ci" / "run").read_text()
    groups = re.findall(r"^tox .*-m (\w+)", script, flags=re.MULTILINE)
    labels = {
        name.strip(): envs
        for name, _, envs in (line.partition("=") for line in tox_ini()["tox"]["labels"].splitlines())
    }
    run = [name.strip() for group in groups for name in labels[group].split(",")]

    assert command == "pip install tox && tox"
    assert sorted(run) == sorted(name.strip() for name in tox_ini()["tox"]["env_list"].split(","))


def test_environments_named_in_the_documents_exist() -> None:
    default = {name.strip() for name in tox_ini()["tox"]["env_list"].split(",")}

    backends = {"llamacpp", "remote", "runners"}
    assert default == {"lint", "types", "core", "third-party", "package"} | backends
    assert default <= tox_environments()
    for name in default:
        assert f"`{name}`" in (ROOT / "README.md").read_text()
        assert f"`{name}`" in (ROOT / "CONTRIBUTING.md").read_text()


def test_tree_names_every_folder() -> None:
    (tree,) = [block for block in blocks("") if "core/" in block]
    shown = {line.split("/")[0] for line in tree.splitlines() if not line.startswith(" ")}
    packages = {line.split("/")[0].strip() for line in tree.splitlines() if line.startswith(" ")}

    assert shown == {"core", "plugins", "contrib", "tests", "examples", "docs", "changelog.d", ".ci"}
    assert all((ROOT / name).is_dir() for name in shown)
    assert packages == {path.parent.name for path in (ROOT / "core" / "enginehouse").glob("*/__init__.py")}


def test_every_page_is_listed() -> None:
    text = (ROOT / "README.md").read_text()

    for page in set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "index.md"}:  # the site's copy of the README
        assert f"](docs/{page.name})" in text, f"README.md does not link to docs/{page.name}"
