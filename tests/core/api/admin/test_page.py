"""docs/models.md: its configuration can be served, and its commands answer what it shows."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from enginehouse.serving.lifecycle import ModelState

from .conftest import Operated

PAGE = (Path(__file__).parents[4] / "docs" / "models.md").read_text(encoding="utf-8")
CONFIG = next(block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
# The models of the page are files; here they are the fake model, whose estimate is that of the page.
FAKE = 'backend = "fake"\nisolation = "thread"'
FAKES = re.sub(r'source = "\w+\.gguf"', f'source = "fake"\n{FAKE}', CONFIG)
FAKES += f'\n[server]\nmodels_dir = "models"\n\n[models."tiny*"]\n{FAKE}\n'


def commands() -> list[tuple[str, str]]:
    """Every curl command of the page with what it answers there."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        found += re.findall(r"^\$ (curl .*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    return found


def is_shown(shown: Any, answer: Any) -> bool:
    """Whether the page shows a part of the answer."""
    if isinstance(shown, dict) and isinstance(answer, dict):
        return all(name in answer and is_shown(value, answer[name]) for name, value in shown.items())
    return bool(shown == answer)


def test_commands_answer_what_the_page_shows(operate: Callable[..., Operated], tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "tiny-Q8_0.gguf").touch()
    server = operate(FAKES)
    checked = 0
    for command, output in commands():
        words = shlex.split(command)
        address = urlsplit("//" + next(word for word in words if word.startswith("localhost:8080")))
        if "-sN" in words:  # a stream; its events have a test of their own
            continue
        body = json.loads(words[words.index("-d") + 1]) if "-d" in words else None
        if body is not None and "download" in body:  # tests/plugins/hub/test_added_models.py
            continue
        method = "DELETE" if "DELETE" in words else "GET" if body is None else "POST"
        answer = server.client.request(method, address.path, json=body).json()

        shown = json.loads(output.replace(", ...", "").replace("/srv/models", str(folder)))
        assert is_shown(shown, answer), (command, answer)
        checked += 1
    assert checked == 8


def test_page_names_every_state() -> None:
    for state in get_args(ModelState):
        assert f"| `{state}` |" in PAGE
