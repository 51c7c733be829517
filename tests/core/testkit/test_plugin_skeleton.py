"""``enginehouse plugins new``: every kind passes its contract suite, and names that are taken are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from enginehouse.cli.main import main
from enginehouse.plugins.kinds import KINDS
from enginehouse_testkit.plugin_skeleton import NEW_KINDS, write_plugin


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plugins", "new", *arguments])


def test_every_kind_passes_its_tests(tmp_path: Path) -> None:
    """One process for all of them; the tests are those that an author gets."""
    for kind in NEW_KINDS:
        write_plugin(f"new_{kind.replace('-', '_')}", tmp_path / kind, kind)
    paths = os.pathsep.join([*(str(tmp_path / kind) for kind in NEW_KINDS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", str(tmp_path), "-c", os.devnull, "--rootdir", str(tmp_path), "-q"]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:xdist"]

    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.noun)
def test_new_plugin_implements_the_hook_of_its_kind_only(folder: Path, kind) -> None:
    done = new("mine", "--only", kind.noun.replace(" ", "-"))
    module = (folder / "enginehouse-mine" / "enginehouse_mine" / "__init__.py").read_text(encoding="utf-8")

    assert done.exit_code == 0, done.output
    assert [other.hook for other in KINDS.values() if f"def {other.hook}(" in module] == [kind.hook]
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.is_file()]
    assert not [text for text in texts if "inimal" in text or "KIND" in text]


def test_name_of_an_installed_plugin_is_refused(folder: Path) -> None:
    done = new("samplers", "--only", "sampler")

    assert done.exit_code == 2
    assert "samplers: the name is taken by the plugin of enginehouse, which is installed" in " ".join(
        done.output.split()
    )
    assert list(folder.iterdir()) == []


def test_name_of_an_installed_package_is_refused(folder: Path) -> None:
    done = new("testkit")

    assert done.exit_code == 2
    assert "enginehouse_testkit" in done.output
