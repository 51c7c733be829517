"""Fixtures of the core tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from time import monotonic, sleep
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from enginehouse.contract.types import Message


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _render_plainly(
    template: str, messages: Sequence[Message], now: Callable[[], datetime] = datetime.now, **variables: Any
) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda text: now().strftime(text)}
    dicts = [
        {key: value for key in ("role", "content", "name") if (value := getattr(message, key)) is not None}
        for message in messages
    ]
    values = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
    return environment.from_string(template).render(messages=dicts, **values)


@pytest.fixture(scope="session")
def render_plainly() -> Callable[..., str]:
    """What Hugging Face's own rendering of a chat gives, in few lines: a plain environment with the same extensions.

    The function takes a template, messages and variables; it lets Jinja's exceptions through.
    """
    return _render_plainly


@pytest.fixture
def access_lines(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    """Waits until the access log has so many lines, at most 10 s; returns all: a line may be written after its answer.

    Call it while the log is captured.
    """

    def wait(count: int) -> list[str]:
        deadline = monotonic() + 60
        while True:
            lines = [record.getMessage() for record in caplog.records if record.name == "enginehouse.access"]
            if len(lines) >= count or monotonic() > deadline:
                return lines
            sleep(0.01)

    return wait
