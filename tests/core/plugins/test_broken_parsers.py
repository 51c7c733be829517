"""Parsers of tool calls and reasoning that break: named; the text is shown, or the request fails by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .harness import FlakyServer, Place, cells

CONFIG = """
[limits]
plugin_timeout_s = 3.0
[plugins]
deny = ["llguidance"]
[models.broken]
source = "."
backend = "fake"
tool_parser = "flaky"
reasoning_parser = "flaky"
"""
MODEL = """
[models.{name}]
source = "."
backend = "fake"
isolation = "thread"
load = "lazy"
chat_template = {template!r}
"""
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
REQUIRED = {**TOOLS, "tool_choice": "required"}

DEEDS = ("raise", "type", "exit", "slow", "hang")

PLACES = [
    Place(name="tool parser.prepare", fields=TOOLS, deeds=DEEDS),
    Place(name="tool parser.constraint", fields=REQUIRED, deeds=DEEDS),
    Place(name="tool parser.open", fields=TOOLS, outcome="goes on", deeds=DEEDS),
    Place(
        name="tool parser.push",
        fields=TOOLS,
        outcome="goes on",
        slow_ms=50,
        deeds=DEEDS,
        quick=("raise", "type", "slow"),
    ),
    Place(name="tool parser.flush", fields=TOOLS, outcome="goes on", slow_ms=50, deeds=DEEDS),
    Place(name="reasoning parser.variables", deeds=DEEDS),
    Place(name="reasoning parser.is_open", deeds=DEEDS),
    Place(name="reasoning parser.open", deeds=DEEDS),
    Place(name="reasoning parser.push", slow_ms=50, deeds=DEEDS),
    Place(name="reasoning parser.flush", slow_ms=50, deeds=DEEDS),
]
LOADS = [
    Place(name=f"{kind} parser.{method}", outcome="goes on")
    for kind in ("tool", "reasoning")
    for method in ("match", "bind")
]


@pytest.fixture(scope="module")
def flaky(start_flaky: Callable[[str], FlakyServer], tmp_path_factory: pytest.TempPathFactory) -> FlakyServer:
    """The server; for each place and deed it has a model whose chat template no other model has."""
    folder, config = tmp_path_factory.mktemp("templates"), CONFIG
    for place in LOADS:
        for deed in place.deeds:
            template = folder / f"{_name(place, deed)}.jinja"
            template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}" + template.name)
            config += MODEL.format(name=_name(place, deed), template=str(template))
            if place.name.endswith("bind"):
                config += f'{place.name.removesuffix(".bind").replace(" ", "_")} = "flaky"\n'
    return start_flaky(config)


def _name(place: Place, deed: str) -> str:
    return f"{place.name} {deed}".replace(" ", "-").replace(".", "-")


@pytest.mark.parametrize(("place", "deed"), cells(PLACES))
def test_parser_that_breaks(flaky: FlakyServer, place: Place, deed: str) -> None:
    flaky.check_cell(place, deed)


@pytest.mark.parametrize("place", ["tool parser.push", "reasoning parser.push"])
def test_parser_that_breaks_in_a_stream(flaky: FlakyServer, place: str) -> None:
    response = flaky.break_at(place, "raise", lambda: flaky.chat(stream=True, **TOOLS))

    assert response.status_code == 200
    if place.startswith("reasoning"):
        assert "the plugin 'flaky_kit'" in response.text and "[DONE]" not in response.text
    else:
        assert "error" not in response.text and "[DONE]" in response.text
    assert "a secret" not in response.text


@pytest.mark.parametrize(("place", "deed"), cells(LOADS))
def test_parser_that_breaks_at_a_template(flaky: FlakyServer, place: Place, deed: str) -> None:
    """The model answers without it."""
    model = _name(place, deed)
    response = flaky.break_at(place.name, deed, lambda: flaky.chat(model))

    flaky.check_response(response, place, deed, flaky.text_of(model))
