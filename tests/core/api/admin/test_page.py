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
FAKES = re.sub(r'source = "\w+\.gguf"', 'source = "fake"\nbackend = "fake"\nisolation = "thread"', CONFIG)


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


def test_commands_answer_what_the_page_shows(operate: Callable[..., Operated]) -> None:
    server = operate(FAKES)
    checked = 0
    for command, output in commands():
        words = shlex.split(command)
        address = urlsplit("//" + next(word for word in words if word.startswith("localhost:8080")))
        if "-sN" in words:  # a stream; its events have a test of their own
            continue
        body = json.loads(words[words.index("-d") + 1]) if "-d" in words else None
        answer = server.client.request("POST" if body is not None else "GET", address.path, json=body).json()

        assert is_shown(json.loads(output.replace(", ...", "")), answer), (command, answer)
        checked += 1
    assert checked == 6


def test_page_names_every_state() -> None:
    for state in get_args(ModelState):
        assert f"| `{state}` |" in PAGE
