"""A server with scripted models, and one whose engine has a prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import LimitsSettings, ModelSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

CALL = ["I look.", "\n", '<tool_call>\n{"name": "look", "arguments": {"at": "x', ' y"}}', "\n</tool_call>"]
THINKS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}]{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
# As the templates of Mistral: a system message only at the beginning, and roles in turn.
STRICT = (
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in turns | selectattr('role', 'in', ['user', 'assistant']) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
TEMPLATES = {"thinker": THINKS, "strict": STRICT}
SCRIPTS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": (["Hel", "lo", " wor", "ld"], {}),
    "thinker": (["<think>", "plan", " A", "</think>", "\n\n", "Answer", " 7"], {}),
    "caller": (CALL, {}),
    "two-calls": ([*CALL[2:], "\n", *CALL[2:]], {}),
    "broken": (["Hel", {"error": "boom"}], {}),
    "quiet": ([{"delay_s": 0.5}, "Hi"], {}),
    "endless": (["ab"], {"loop": True}),
    "strict": (["Yes."], {}),
}
KEYS = (
    KeySettings(name="alice", key="alice", scopes=("infer", "admin")),
    KeySettings(name="once", key="once", requests_per_minute=1),
    KeySettings(name="watcher", key="watcher", scopes=("metrics",)),
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSettings]:
    """Settings of the models."""
    folder = tmp_path_factory.mktemp("anthropic")
    for name, template in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(template, encoding="utf-8")
    scripted = {
        name: ModelSettings(
            source=write_script(folder / f"{name}.json", tokens, **options),
            backend="scripted",
            chat_template=str(folder / f"{name}.jinja") if name in TEMPLATES else None,
            context=64 if name == "endless" else None,
        )
        for name, (tokens, options) in SCRIPTS.items()
    }
    cached = ModelSettings(source=str(folder), backend="fake", isolation="thread", aliases=("claude-*",))
    return {**scripted, "cached": cached}


@pytest.fixture(scope="module")
def client(models: dict[str, ModelSettings]) -> Iterator[httpx.Client]:
    """A client of a server with these models, which pings often."""
    settings = Settings(
        auth=AuthSettings(keys=KEYS),
        limits=LimitsSettings(max_body_bytes=100_000),
        models=models,
        server=ServerSettings(ping_s=0.05),
    )
    with served(settings, headers={"x-api-key": "alice"}) as client:
        yield client
