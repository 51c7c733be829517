"""What the tests in a browser share: the models of the server, what is watched in a page, and steps of people."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Page, expect

from enginehouse_testkit.script import write_script

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
VIEWS = ("chat", "inspect", "compare", "models", "requests", "engine", "routing", "compression", "connect")
LIMIT_MS = 30_000

MARKDOWN = [
    "# A plan\n\n",
    "Some **bold** text.\n\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n",
    "```python\nprint(1)\n```\n",
]
HOSTILE = [
    "<script>alert(1)</script> <img src=x onerror=alert(2)>\n\n",
    "![a](https://evil.invalid/pixel.png) [b](javascript:alert(3)) [c](https://evil.invalid/c)\n\n",
    "<iframe src='https://evil.invalid'></iframe> <style>body { display: none }</style>\n\n",
    "<form action='https://evil.invalid'><input name=q></form> <svg onload=alert(4)> \u202egnp.exe\n\n",
    "<math><mtext><table><mglyph><style><img src=y onerror=alert(5)> \n\n[d]: https://evil.invalid/d\n\n[d] ",
]
REPLIES: dict[str, list[Any]] = {
    "markdown": MARKDOWN,
    "attack": HOSTILE,
    "long line": ["x" * 1_000_000],
    "defined": ["See [the end] of it.\n\n", "More.\n\n", "[the end]: https://site.invalid/end\n"],
    "slowly": [item for number in range(400) for item in (f"word{number} ", {"delay_s": 0.05})],
    "think": ["<think>", "Two and two. ", "</think>", "Four."],
    "weather": ['<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'],
    "42": ["It is 42."],
    "as json": ['{"city": "Par', 'is"}'],
    "break": ["It begins ", {"error": "a failure on purpose"}],
    "chapters": [text for part in range(50) for text in (f"## Part {part}\n\n", *["word "] * 98, "\n\n")],
    "split": [{"bytes": [240, 159]}, {"bytes": [153, 130]}, "!"],
}


def configured(folder: Path, **more: str) -> Path:
    words = write_script(folder / "words.json", ["Hello", " there."], replies=REPLIES)
    config = folder / "enginehouse.toml"
    faults = f"{{ abort_at_step = 12, latch = {json.dumps(str(folder / 'latch'))} }}"
    config.write_text(
        f"""
{more.get("head", "")}
[models.script]
source = {json.dumps(words)}
backend = "scripted"
aliases = ["helper"]
tool_parser = "hermes"
reasoning_parser = "think"
[models.fake]
source = "fake"
backend = "fake"
end_logit = -20
[models.mortal]
source = "fake"
backend = "fake"
end_logit = -20
step_delay_s = 0.05
faults = {faults}
[models.missing]
source = "no-such-file.gguf"
load = "lazy"
[router]
strategy = "difficulty"
models = ["script", "fake"]
""",
        encoding="utf-8",
    )
    return config


class Watched:
    """What went wrong in a page; ``expected`` are patterns of lines that a test causes on purpose."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.problems: list[str] = []
        self.dialogs: list[str] = []
        self.expected: list[str] = []
        self._origin = origin
        context.on("console", lambda message: message.type in ("error", "warning") and self._note(message.text))
        context.on("weberror", lambda error: self._note(str(error.error)))
        context.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        context.on("request", self._check_origin)

    def _note(self, text: str) -> None:
        if not any(re.search(pattern, text) for pattern in self.expected):
            self.problems.append(text)

    def _check_origin(self, request: Any) -> None:
        if not request.url.startswith((f"{self._origin}/", "data:", f"blob:{self._origin}")):
            self.problems.append(f"a request to {request.url}")


def ask(page: Page, text: str, model: str = "script") -> None:
    page.get_by_label("Model", exact=True).select_option(model)
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def last_answer(page: Page) -> Any:
    return page.locator(".message.assistant").last


def finished(page: Page) -> Any:
    """The last answer, once it has ended."""
    answer = last_answer(page)
    expect(answer.get_by_role("button", name="Regenerate")).to_be_visible(timeout=LIMIT_MS)
    return answer


KEPT = """async text => {
    const opening = indexedDB.open("enginehouse");
    await new Promise(resolve => { opening.onsuccess = resolve });
    for (;;) {
        const reading = opening.result.transaction("chats").objectStore("chats").getAll();
        await new Promise(resolve => { reading.onsuccess = resolve });
        const nodes = reading.result.flatMap(chat => Object.values(chat.nodes));
        if (nodes.some(node => node.content.includes(text))) break;
        await new Promise(resolve => setTimeout(resolve, 50));
    }
    opening.result.close();
}"""


def wait_until_kept(page: Page, text: str) -> None:
    """Wait until the browser has written a chat with this text: chats are written a moment after they changed."""
    page.evaluate(KEPT, text)


def show(page: Page, view: str) -> None:
    page.evaluate("view => { location.hash = `#/${view}` }", view)
    expect(page.locator(f"main.view-{view}")).to_be_visible()
    page.wait_for_load_state("networkidle")


def violations(page: Page) -> list[Any]:
    """What axe finds. It measures with inline styles, which the policy of the page stops: those reports are its own."""
    page.context.new_cdp_session(page).send("Runtime.evaluate", {"expression": AXE})
    found = page.evaluate("axe.run({preload: false}).then(result => result.violations)")
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]
