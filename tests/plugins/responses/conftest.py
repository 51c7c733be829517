"""A server with scripted models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

from .harness import CALL, PATCH, Client, call_text, in_pieces

THINKING = (
    "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}]{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
SCRIPTS = {
    "say": ["Hello", " world", "!"],
    "call": in_pieces(CALL),
    "calls": in_pieces(f"Wait.\n{CALL}\n{CALL}"),
    "think": ["<think>", "plan", " A", "</think>", "\n\n", "Answer", " 7"],
    "think-call": ["<think>", "plan", "</think>", *in_pieces(CALL, 7)],
    "patch": in_pieces(call_text("apply_patch", input=PATCH), 2),
    "namespaced": in_pieces(call_text("mcp__files__read", path="a")),
    "nothing": [],
    "breaks": ["Hel", "lo", {"error": "boom"}],
    "slow": [f"w{number} " if number % 2 else {"delay_s": 0.02} for number in range(200)],
}
REASONING = ("think", "think-call")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSettings]:
    """The settings of all scripted models."""
    folder = tmp_path_factory.mktemp("responses")
    template = folder / "thinking.jinja"
    template.write_text(THINKING, encoding="utf-8")
    found = {}
    for name, tokens in SCRIPTS.items():
        source = write_script(folder / f"{name}.json", tokens)
        own = {"chat_template": template} if name in REASONING else {}
        found[name] = ModelSettings(source=source, backend="scripted", **own)
    small = write_script(folder / "small.json", ["ok"])
    found["small"] = ModelSettings(source=small, backend="scripted", context=400)
    warm = write_script(folder / "warm.json", ["ok"])
    found["warm"] = ModelSettings(source=warm, backend="scripted", defaults={"temperature": 0.7})
    fast = write_script(folder / "fast.json", SCRIPTS["think-call"], tokens_per_step=5)
    found["fast"] = ModelSettings(source=fast, backend="scripted", chat_template=template)
    return found


@pytest.fixture(scope="session")
def client(models: dict[str, ModelSettings]) -> Iterator[Client]:
    """A server without a store."""
    with served(Settings(models=models, plugins=PluginsSettings(allow=("parsers", "responses")))) as http:
        yield Client(http)
