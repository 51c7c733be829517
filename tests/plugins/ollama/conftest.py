"""A server with Ollama's API over scripted models."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

TEMPLATE = (
    "{% for t in tools or [] %}{{ t }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.name }}:{{ m.tool_call_id }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments | tojson }}){% endfor %}]{% endfor %}"
    "{% if tools %}<tool_call>\n{'name': 1}</tool_call>{% endif %}"
)
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
KEYS = (
    KeySettings(name="alice", key="alice", scopes=("infer", "admin")),
    KeySettings(name="bob", key="bob"),
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client with the scope ``admin``; ``bob`` is a key without it."""
    folder = tmp_path_factory.mktemp("ollama")
    templates = {"thinker": TEMPLATE + SWITCH}
    scripts = {
        "hello": {"tokens": ["Hel", "lo", " there"]},
        "thinker": {"tokens": ["<think>", "plan", " A", "</think>", "\n\n", "Answer", " 7"]},
        "caller": {"tokens": ["Look. ", *(CALL % "Oslo"), *(CALL % "Rome")]},
        "broken": {"tokens": ["a", {"error": "boom"}]},
    }
    models = {
        name: ModelSettings(
            source=write_script(folder / f"{name}.json", **script),
            backend="scripted",
            context=4096,
            chat_template=str(folder / f"{name}.jinja"),
            reasoning_parser="none" if name == "hello" else None,
            pin=name != "hello",
        )
        for name, script in scripts.items()
    }
    for name in models:
        (folder / f"{name}.jinja").write_text(templates.get(name, TEMPLATE), encoding="utf-8")
    settings = Settings(
        auth=AuthSettings(keys=KEYS), models=models, plugins=PluginsSettings(allow=("ollama", "parsers", "samplers"))
    )
    with served(settings, headers={"authorization": "Bearer alice"}) as client:
        yield client
