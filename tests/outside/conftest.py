"""A server with the real small model, and with one that always reasons before it answers."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attrs import frozen

from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import started_server

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One event loop for all of this folder: clients keep connections of the loop in which they were first used.

    They leave these to the garbage collector, which may find them during any later test.
    """
    for item in items:
        if not item.path.is_relative_to(FOLDER):
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
        if pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session", autouse=True)
def _garbage() -> Iterator[None]:
    """Collect connections while a test's filters of warnings hold."""
    yield
    gc.collect()


REASONED = ["<think>", "plan", " A", "</think>", "\n\n", "Answer", " 7"]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}]{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def call(name: str, **arguments: Any) -> list[str]:
    """The tokens of a call."""
    return ["<tool_call>\n", json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False), "\n</tool_call>"]


CALL = ["Look. ", *call("weather", city="Oslo")]
# A text of the prompt to the answer; the others are what LangChain's suite asks for.
REPLIES = {
    "magic_function(3)": call("magic_function", input=3),
    "magic_function_no_args()": call("magic_function_no_args"),
    "generate a Pirate greeting": call("greeting_generator", answer_style="Pirate"),
    "weather in San Francisco": call("get_weather", location="San Francisco, CA"),
    "你好啊集团": call("unicode_customer", customer_name="你好啊集团", description="A company"),
    "こんにちは株式会社": call("unicode_customer", customer_name="こんにちは株式会社", description="A company"),
    "sunny": ["It is sunny."],
}
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

    ``thinker`` reasons ("plan A") and answers ("Answer 7"); ``caller`` asks for the weather in Oslo, or calls what
    LangChain's suite asks for, and ends once it is told that it is sunny.
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
    write_script(caller_script, CALL, replies=REPLIES)
    caller_template.write_text(CALLER_TEMPLATE, encoding="utf-8")
    files = {"script": script, "template": template, "caller_script": caller_script, "caller_template": caller_template}
    paths = {name: json.dumps(str(path)) for name, path in files.items()}
    config.write_text(CONFIG.format(**paths), encoding="utf-8")
    with started_server("--config", config) as process:
        assert process.url is not None
        yield Served(process.url)
