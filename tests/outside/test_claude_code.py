"""Claude Code without a terminal, against a scripted model: a shell command, an edit, an answer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import started_server

from .commands import run

pytestmark = pytest.mark.slow

CLAUDE = Path(__file__).parent / "node" / "node_modules" / ".bin" / "claude"
LIMIT_S = 100


@frozen
class Agent:
    """Claude Code in a folder of its own; ``claude`` returns what it reports of a turn."""

    url: str
    folder: Path

    def claude(self, prompt: str, *options: str, model: str = "agent") -> dict[str, Any]:
        """Run one turn."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder / "home"),
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        command = [str(CLAUDE), "-p", prompt, "--output-format", "json", "--allowedTools", "Bash,Edit,Read", *options]
        return json.loads(run(command, cwd=self.work, env=environment, limit_s=LIMIT_S).stdout)

    @property
    def work(self) -> Path:
        """The folder in which it works."""
        return self.folder / "work"


def call(name: str, **arguments: str) -> list[str]:
    return ["<tool_call>\n", json.dumps({"name": name, "arguments": arguments}), "\n</tool_call>"]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A server with a scripted model, and one with a prefix cache; both take its long prompts."""
    if not CLAUDE.exists():
        pytest.skip("Claude Code is not installed; run: npm install --prefix tests/outside/node")
    folder = tmp_path_factory.mktemp("claude-code")
    for name in ("work", "home"):
        (folder / name).mkdir()
    file = folder / "work" / "hello.txt"
    file.write_text("ORIGINAL LINE\n", encoding="utf-8")
    edit = call("Edit", file_path=str(file), old_string="ORIGINAL LINE", new_string="CHANGED LINE")
    replies = {"ORIGINAL LINE": ["I change it.", *edit], "has been updated": ["The line is changed."]}
    show = call("Bash", command="cat hello.txt", description="Show the file")
    script = write_script(folder / "agent.json", ["I look.", *show], replies=replies)
    config = folder / "enginehouse.toml"
    config.write_text(
        "[limits]\nmax_body_bytes = 10_000_000\n"
        f'[models.agent]\nsource = {json.dumps(script)}\nbackend = "scripted"\ncontext = 1_000_000\n'
        f'[models.cached]\nsource = {json.dumps(str(folder))}\nbackend = "fake"\ncontext = 200_000\nslots = 2\n',
        encoding="utf-8",
    )
    with started_server("--config", config) as process:
        assert process.url is not None
        yield Agent(process.url, folder)


def test_a_command_an_edit_and_an_answer(agent: Agent) -> None:
    report = agent.claude("Change the line in hello.txt")

    assert (report["result"], report["is_error"]) == ("The line is changed.", False)
    assert report["num_turns"] == 3 and report["permission_denials"] == []
    assert (agent.work / "hello.txt").read_text(encoding="utf-8") == "CHANGED LINE\n"


def test_the_second_turn_finds_its_prompt_in_the_cache(agent: Agent) -> None:
    first = agent.claude("Say something", model="cached")["usage"]
    second = agent.claude("And more", "--continue", model="cached")["usage"]

    computed = [usage["input_tokens"] + usage["cache_creation_input_tokens"] for usage in (first, second)]
    assert second["cache_read_input_tokens"] > computed[0] > 100 * computed[1]
