"""Without ``huggingface_hub`` an id of the hub is an error that says what to install, and all else works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from enginehouse.contract.errors import MissingDependency
from enginehouse_hub.hub import HuggingFaceHub

_WITHOUT = """
import sys
sys.modules["huggingface_hub"] = None  # as if it were not installed
from enginehouse.__main__ import main
main()
"""
INSTALL = "huggingface_hub is not installed; run: pip install 'enginehouse[hub]'"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _WITHOUT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", ["serve", "pull"])
def test_id_of_the_hub_says_what_to_install(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(command, "owner/model:Q4_K_M")

    assert done.returncode == 2
    assert INSTALL in done.stderr
    assert "Traceback" not in done.stderr


def test_download_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("enginehouse_hub.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(MissingDependency, match=re.escape(INSTALL)):
        HuggingFaceHub().download("owner/model", lambda share, text: None)


def test_other_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert "file or folder not found: './model.gguf'; named model sources" in run("serve", "./model.gguf").stderr
    assert "pull" in run("--help").stdout
