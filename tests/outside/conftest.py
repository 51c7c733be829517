"""A server with the real small model, and with one that always reasons before it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from attrs import frozen

from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import started_server

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One event loop for all of this folder: clients keep connections of the loop in which they were first used."""
    for item in items:
        if item.path.is_relative_to(FOLDER) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


REASONED = ["<think>", "plan", " A", "</think>", "\n\n", "Answer", " 7"]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}]{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLER_TEMPLATE = (
    "{% for t in tools or [] %}{{ t }}{% endfor %}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    "{% if tools %}<tool_call>\n{'name': 1}</tool_call>{% endif %}"
)
CONFIG = """
[models.starter]
source = "starter"
context = 2048

[models.thinker]
source = {script}
backend = "scripted"
chat_template = {template}

[models.caller]
source = {caller_script}
backend = "scripted"
chat_template = {caller_template}
"""


@frozen
class Served:
    """A running server and the names of its models.

    ``thinker`` reasons ("plan A") and answers ("Answer 7"); ``caller`` asks for the weather in Oslo, and ends once it
    is told that it is sunny.
    """

    url: str
    starter: str = "starter"
    thinker: str = "thinker"
    caller: str = "caller"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("outside")
    script, template, config = folder / "thinker.json", folder / "thinker.jinja", folder / "enginehouse.toml"
    write_script(script, REASONED)
    template.write_text(TEMPLATE, encoding="utf-8")
    caller_script, caller_template = folder / "caller.json", folder / "caller.jinja"
    write_script(caller_script, ["Look. ", *CALL], replies={"sunny": ["It is sunny."]})
    caller_template.write_text(CALLER_TEMPLATE, encoding="utf-8")
    files = {"script": script, "template": template, "caller_script": caller_script, "caller_template": caller_template}
    paths = {name: json.dumps(str(path)) for name, path in files.items()}
    config.write_text(CONFIG.format(**paths), encoding="utf-8")
    with started_server("--config", config) as process:
        assert process.url is not None
        yield Served(process.url)
