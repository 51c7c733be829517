"""The page in Chromium, on a scripted model for exact output and on the fake backend for marks, caches and a crash.

After every test: no error in the console, no report of the Content-Security-Policy, no failed request, and no request
to another origin.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import ServerProcess, started_server

NAMES = ("chromium", "chromium-browser", "google-chrome")
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with started_server("--config", configured(tmp_path_factory.mktemp("ui"))) as process:
        yield process


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


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


@pytest.fixture
def watched_pages(browser: Browser) -> Iterator[Callable[..., tuple[Page, Watched]]]:
    """Call it with the server's URL and options of the context; checks every page at the end."""
    opened: list[tuple[BrowserContext, Watched]] = []

    def make(url: str, **options: Any) -> tuple[Page, Watched]:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(LIMIT_MS)
        watched = Watched(context, url)
        opened.append((context, watched))
        return context.new_page(), watched

    yield make
    for context, watched in opened:
        context.close()
        assert watched.problems == []
        assert watched.dialogs == []


@pytest.fixture
def page(server: ServerProcess, watched_pages: Any) -> Page:
    page, _ = watched_pages(server.url)
    page.goto(f"{server.url}/", wait_until="networkidle")
    return page


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


def show(page: Page, view: str) -> None:
    page.evaluate("view => { location.hash = `#/${view}` }", view)
    expect(page.locator(f"main.view-{view}")).to_be_visible()
    page.wait_for_load_state("networkidle")


def violations(page: Page) -> list[Any]:
    """What axe finds. It measures with inline styles, which the policy of the page stops: those reports are its own."""
    page.context.new_cdp_session(page).send("Runtime.evaluate", {"expression": AXE})
    found = page.evaluate("axe.run({preload: false}).then(result => result.violations)")
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]


# -- chat -------------------------------------------------------------------------------------------


def test_first_answer_is_streamed_and_kept(page: Page) -> None:
    ask(page, "Hello")

    expect(finished(page)).to_contain_text("Hello there.")
    page.wait_for_timeout(500)  # chats are written a moment later
    page.reload()
    expect(last_answer(page)).to_contain_text("Hello there.")


def test_markdown_is_drawn(page: Page) -> None:
    ask(page, "markdown")

    answer = finished(page)
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("td").first).to_have_text("1")
    expect(answer.get_by_role("region", name="Code, python")).to_have_text("print(1)")


def test_hostile_output_stays_text(page: Page) -> None:
    """Neither a dialog nor a request to another origin: the fixture checks both."""
    ask(page, "attack")

    answer = finished(page)
    expect(answer).to_contain_text("<script>alert(1)</script>")
    expect(answer).to_contain_text("https://evil.invalid/pixel.png")
    assert answer.locator("script, img, iframe, style, form, svg, input, [onerror], [onload]").count() == 0
    assert answer.locator("md-view a").evaluate_all("links => links.map(link => [link.href, link.rel])") == [
        ["https://evil.invalid/c", "noopener noreferrer nofollow"],
        ["https://evil.invalid/d", "noopener noreferrer nofollow"],
    ]


def test_a_link_is_drawn_whose_address_comes_later(page: Page) -> None:
    ask(page, "defined")

    expect(finished(page).get_by_role("link", name="the end")).to_have_attribute("href", "https://site.invalid/end")


def test_an_answer_is_kept_while_it_streams(page: Page) -> None:
    ask(page, "slowly")
    expect(last_answer(page)).to_contain_text("word90", timeout=LIMIT_MS)  # 4.5 s
    page.reload()

    expect(last_answer(page)).to_contain_text("word20")
    expect(last_answer(page)).to_contain_text("the page was closed")


FIRST = {"id": "1", "parent": None, "role": "user", "content": "x"}
CHAT: dict[str, Any] = {"title": "t", "parameters": {}, "nodes": {"1": FIRST}, "leaf": "1"}


@pytest.mark.parametrize(
    "chat",
    [
        {**CHAT, "nodes": {"1": {**FIRST, "parent": "1"}}},
        {**CHAT, "nodes": {"1": {**FIRST, "images": ["/admin/models"]}}},
        {**CHAT, "nodes": {"1": {**FIRST, "content": None}}},
        {**CHAT, "parameters": None},
        {**CHAT, "leaf": "toString"},
    ],
    ids=["its own parent", "an address as image", "no text", "no parameters", "no leaf"],
)
def test_a_file_that_is_not_an_exported_chat_is_refused(page: Page, chat: dict[str, Any]) -> None:
    """A chat whose messages form a circle would stop the page at each start."""
    page.get_by_text("Chats (0)").click()
    file = {"name": "chat.json", "mimeType": "application/json", "buffer": json.dumps(chat).encode()}
    page.get_by_label("Import").set_input_files([file])
    expect(page.get_by_role("alert")).to_contain_text("not a chat that this page exported")

    good = {**file, "buffer": json.dumps(CHAT).encode()}
    page.get_by_label("Import").set_input_files([good])
    expect(page.locator(".message.user")).to_contain_text("x")


def test_a_line_of_a_million_characters_is_shown(page: Page) -> None:
    ask(page, "long line")

    expect(finished(page).locator("pre.plain")).to_contain_text("xxxx")


def test_stop_frees_the_slot(page: Page, server: ServerProcess) -> None:
    ask(page, "slowly")
    expect(last_answer(page)).to_contain_text("word3")
    page.get_by_role("button", name="Stop").click()

    expect(finished(page)).to_contain_text("stopped by you")
    show(page, "requests")
    expect(page.get_by_text("Nothing is running")).to_be_visible()


def test_thinking_is_folded(page: Page) -> None:
    ask(page, "think")

    answer = finished(page)
    expect(answer.get_by_text("Thought for")).to_be_visible()
    expect(answer.get_by_text("Two and two.")).to_be_hidden()
    answer.get_by_text("Thought for").click()
    expect(answer.get_by_text("Two and two.")).to_be_visible()


def test_a_call_is_a_form_whose_result_goes_back(page: Page) -> None:
    page.get_by_text("Tools", exact=True).click()
    page.get_by_role("button", name="Use the demo clock and calculator").click()
    ask(page, "weather")
    answer = finished(page)
    expect(answer.get_by_label("expression")).to_have_value("6 * 7")

    answer.get_by_role("button", name="Run in this browser").click()
    expect(answer.get_by_label("Result")).to_have_value("42")
    answer.get_by_role("button", name="Send the results").click()

    expect(last_answer(page)).to_contain_text("It is 42.")


def test_regenerate_and_edit_are_branches(page: Page) -> None:
    ask(page, "Hello")
    finished(page).get_by_role("button", name="Regenerate").click()
    expect(finished(page)).to_contain_text("2 of 2")

    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit; the old text stays as a branch").fill("think")
    page.locator(".editor").get_by_role("button", name="Send").click()
    expect(finished(page)).to_contain_text("Four.")

    page.locator(".message.user").get_by_role("button", name="Previous branch").click()
    expect(last_answer(page)).to_contain_text("Hello there.")


def test_schema_is_checked_as_it_is_typed(page: Page) -> None:
    page.get_by_text("JSON Schema", exact=True).click()
    field = page.get_by_label("The answer follows this schema")
    for text, said in (
        ('{"type": "object"', "Not JSON"),
        ('{"type": "text"}', 'the schema.type is "text"'),
        ('{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}', "A valid schema"),
    ):
        field.fill(text)
        expect(page.locator("#schema-state")).to_contain_text(said)
    ask(page, "x", model="fake")
    expect(finished(page)).to_contain_text("valid against the JSON Schema")


def test_parameters_come_from_the_schema_with_their_origin(page: Page) -> None:
    row = page.locator(".parameter", has=page.get_by_text("temperature", exact=True)).first
    expect(row.locator(".origin")).to_have_text("built-in")

    row.get_by_role("spinbutton").fill("0.3")
    row.get_by_role("spinbutton").press("Tab")
    expect(row.locator(".origin")).to_have_text("request")
    page.get_by_text("This request as code").click()
    expect(page.locator(".as-code pre")).to_contain_text('"temperature": 0.3')
    page.get_by_role("button", name="anthropic").click()
    expect(page.locator(".as-code pre")).to_contain_text("client.messages.create(")


def test_an_error_in_the_middle_is_said_beside_the_text(page: Page) -> None:
    ask(page, "break")

    answer = finished(page)
    expect(answer).to_contain_text("It begins")
    expect(answer.get_by_role("alert")).to_be_visible()
    expect(answer.get_by_role("button", name="Try again")).to_be_visible()


def test_characters_split_over_tokens_are_whole(page: Page) -> None:
    ask(page, "split")

    expect(finished(page)).to_contain_text("🙂!")


def test_an_answer_goes_on_after_its_worker_died(page: Page) -> None:
    page.get_by_label("max_tokens", exact=True).fill("40")
    ask(page, "Hello", model="mortal")

    answer = finished(page)
    expect(answer).to_contain_text("40 tokens")
    expect(answer).to_contain_text("worker was restarted")
    show(page, "models")
    expect(page.locator("tr", has_text="mortal").locator("td.num").last).to_have_text("1")


def test_a_large_image_is_refused_before_it_is_sent(page: Page) -> None:
    page.get_by_label("Message", exact=True).evaluate(
        """field => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(20e6)], "large.png", { type: "image/png" }));
            field.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
        }"""
    )

    expect(page.get_by_role("alert")).to_contain_text(re.compile("takes no images|20.0 MB"))


# -- the other views --------------------------------------------------------------------------------


def test_inspect_shows_tokens_prompt_and_reasons(page: Page) -> None:
    page.get_by_label("max_tokens", exact=True).fill("12")
    ask(page, "Hello", model="fake")
    finished(page).get_by_role("link", name="Inspect").click()

    expect(page.locator("#tokens .token")).to_have_count(12)
    page.locator("#tokens .token").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".panel h3")).to_contain_text("Token 2")
    expect(page.locator(".panel tbody tr")).not_to_have_count(0)
    expect(page.locator(".prompt")).to_contain_text("Hello")
    expect(page.get_by_role("heading", name="Times")).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("max_tokens")).get_by_text("request")).to_be_visible()

    page.get_by_role("button", name="Go on with this").first.click()
    expect(finished(page)).to_contain_text("2 of 2")


def test_models_are_unloaded_and_loaded(page: Page) -> None:
    show(page, "models")
    expect(page.get_by_role("alert")).to_contain_text("no-such-file.gguf")
    row = page.locator("tr", has_text="helper")
    row.get_by_role("button", name="Unload").click()
    expect(row).to_contain_text("unloaded")
    row.get_by_role("button", name="Load").click()
    expect(row).to_contain_text("ready")

    row.get_by_role("button", name="script", exact=True).click()
    page.get_by_text(re.compile("What it takes")).click()
    expect(page.get_by_role("row", name=re.compile("^temperature")).first).to_be_visible()


def test_a_model_that_the_settings_do_not_allow_is_refused_with_the_reason(
    server: ServerProcess, watched_pages: Any
) -> None:
    page, watched = watched_pages(server.url)
    watched.expected = ["the server responded with a status of 40"]
    page.goto(f"{server.url}/ui/console/#/models")
    page.get_by_text("Add a model").click()
    page.get_by_label("Source", exact=True).fill("owner/name")
    page.get_by_role("button", name="Add", exact=True).click()

    expect(page.get_by_role("alert").filter(has_text="allowed_sources")).to_be_visible()


def test_a_request_is_seen_and_cancelled(page: Page, server: ServerProcess, watched_pages: Any) -> None:
    other, _ = watched_pages(server.url)
    other.goto(f"{server.url}/")
    ask(other, "slowly")
    show(page, "requests")

    page.get_by_role("button", name=re.compile("^Cancel")).click()

    expect(page.get_by_text(re.compile("cancelled"))).to_be_visible()
    expect(other.locator(".message.assistant").get_by_role("alert")).to_be_visible()


def test_engine_draws_slots_and_charts(page: Page) -> None:
    page.get_by_label("max_tokens", exact=True).fill("12")
    ask(page, "Hello", model="fake")
    finished(page)
    show(page, "engine")
    page.locator("#engine-model").select_option("fake")

    expect(page.get_by_text("0 of 8 in use")).to_be_visible()
    expect(page.locator("time-chart canvas").first).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Tokens per second: prompt"))).to_be_visible()


def test_compare_marks_the_first_difference(page: Page) -> None:
    show(page, "compare")
    page.get_by_label("Prompt", exact=True).fill("think")
    page.get_by_label("Model 2").select_option("helper")
    page.get_by_role("button", name="Compare").click()

    expect(page.get_by_text("All answers are the same.")).to_be_visible()
    page.get_by_label("Model 2").select_option("fake")
    page.locator(".column").nth(1).locator("summary").first.click()
    page.locator("#parameter-compare1-max_tokens").fill("5")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_text("The answers differ from character 1 on")).to_be_visible()


def test_dry_runs_give_reasons(page: Page) -> None:
    show(page, "routing")
    page.get_by_label("Prompt", exact=True).fill("Prove that there are infinitely many primes.")
    page.get_by_role("button", name="Show the route").click()
    expect(page.locator("section[aria-label=Result] h2")).to_have_text(re.compile("script|fake"))
    expect(page.get_by_text("What the router saw in the prompt")).to_be_visible()

    show(page, "compression")
    page.get_by_label("Method").select_option("lossless")
    page.get_by_label("Prompt", exact=True).fill("Twice    the same.\n\nTwice    the same.\n\nWhat is twice?")
    page.get_by_role("button", name="Show what would be cut").click()
    expect(page.get_by_role("heading", name=re.compile("tokens became"))).to_be_visible()


def test_connect_names_this_server(page: Page, server: ServerProcess) -> None:
    show(page, "connect")

    assert server.url is not None
    for name in ("curl", "Codex", "Claude Code", "opencode"):
        expect(page.get_by_role("region", name=name, exact=True)).to_contain_text(server.url)


def test_snippets_of_connect_work(page: Page, server: ServerProcess, tmp_path: Path) -> None:
    """Clients that are not installed are left out; tests/outside drives Codex and Claude Code by the same settings."""
    show(page, "connect")
    page.locator("#connect-model").select_option("script")
    texts = {one.get_attribute("aria-label"): one.inner_text() for one in page.locator(".recipe pre").all()}
    commands = {"curl": ["sh", "-c"]}
    for name, module in (
        ("OpenAI's Python client", "openai"),
        ("Anthropic's Python client", "anthropic"),
        ("LangChain", "langchain_openai"),
    ):
        if find_spec(module):
            commands[name] = [sys.executable, "-c"]
    for name, command in commands.items():
        done = subprocess.run([*command, texts[name]], capture_output=True, text=True, timeout=120, check=False)
        assert "Hello there." in done.stdout, (name, done.stderr)
    codex = tomllib.loads(texts["Codex"])
    assert (
        codex["model"] == "script"
        and codex["model_providers"][codex["model_provider"]]["base_url"] == f"{server.url}/v1"
    )
    assert json.loads(texts["opencode"])["provider"]["enginehouse"]["options"]["baseURL"] == f"{server.url}/v1"
    for name in ("Claude Code", "Ollama's clients"):
        (line, *_) = texts[name].splitlines()
        shown = subprocess.run(["sh", "-c", f"{line}; env"], capture_output=True, text=True, check=True).stdout
        assert f"={server.url}\n" in shown, name


# -- everybody can use it ---------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 320], ids=["wide", "narrow"])
def test_axe_finds_nothing_and_nothing_overflows(
    server: ServerProcess, watched_pages: Any, scheme: str, width: int
) -> None:
    """320 pixels are 1280 at a zoom of 400 %."""
    page, watched = watched_pages(server.url, color_scheme=scheme, viewport={"width": width, "height": 800})
    page.goto(f"{server.url}/", wait_until="networkidle")
    ask(page, "markdown")
    finished(page)
    for view in VIEWS:
        if view == "inspect":
            finished(page).get_by_role("link", name="Inspect").click()
            page.locator("#tokens .token").first.click()
        show(page, view)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        before = list(watched.problems)
        assert violations(page) == [], view
        page.wait_for_timeout(50)
        watched.problems = before


def test_the_first_minute_by_keyboard_alone(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "prompt":
            break
    page.keyboard.type("slowly")
    page.keyboard.press("Enter")
    expect(last_answer(page)).to_contain_text("word2")
    page.keyboard.press("Escape")
    expect(finished(page)).to_contain_text("stopped by you")
    for _ in range(40):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.textContent") == "Inspect":
            break
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Inspect")


def test_a_long_answer_streams_and_scrolls(page: Page) -> None:
    """The time between frames while tokens come, and while 5,000 tokens scroll; limits are loose for busy machines."""
    page.get_by_label("max_tokens", exact=True).fill("3000")
    ask(page, "Hello", model="fake")
    answer = last_answer(page)
    expect(answer.get_by_role("button", name="Regenerate")).to_be_visible(timeout=90_000)
    answer.get_by_role("link", name="Inspect").click()
    expect(page.locator("#tokens .token")).to_have_count(3000)
    times = page.evaluate(
        """async () => {
            const box = document.getElementById("tokens"), times = [];
            let last = performance.now();
            for (let step = 0; step < 60; step++) {
                box.scrollTop += 60;
                await new Promise(requestAnimationFrame);
                times.push(performance.now() - last);
                last = performance.now();
            }
            return times.sort((a, b) => a - b);
        }"""
    )
    assert times[len(times) // 2] < 50


# -- keys, connections, history ---------------------------------------------------------------------


def test_a_server_with_keys_asks_for_one(tmp_path: Path, watched_pages: Any) -> None:
    keys = '[[auth.keys]]\nname = "user"\nkey = "the-key"\nscopes = ["infer"]\n'
    with started_server("--config", configured(tmp_path, head=keys)) as server:
        page, watched = watched_pages(server.url)
        watched.expected = ["401", "403"]
        page.goto(f"{server.url}/")
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_text("The server does not know this key.")).to_be_visible()
        page.get_by_label("API key").fill("the-key")
        page.keyboard.press("Enter")
        ask(page, "Hello")

        expect(finished(page)).to_contain_text("Hello there.")
        expect(page.get_by_role("link", name="Models", exact=True)).to_have_count(0)
        assert page.evaluate("[localStorage.length, sessionStorage['enginehouse.key']]") == [0, "the-key"]
        assert "the-key" not in server.output


def test_a_server_that_is_gone_is_said(tmp_path: Path, watched_pages: Any) -> None:
    with started_server("--config", configured(tmp_path)) as server:
        page, watched = watched_pages(server.url)
        watched.expected = ["ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET"]
        page.goto(f"{server.url}/", wait_until="networkidle")
        expect(page.get_by_label("Message", exact=True)).to_be_visible()

    expect(page.get_by_text("The server cannot be reached.")).to_be_visible()
    expect(page.get_by_role("button", name="Try now")).to_be_visible()


def test_back_leads_to_the_view_before(page: Page) -> None:
    page.get_by_role("link", name="Models", exact=True).click()
    page.get_by_role("link", name="Connect", exact=True).click()
    page.go_back()

    expect(page.locator("h1")).to_have_text("Models")


def test_two_tabs_keep_their_chats(page: Page) -> None:
    ask(page, "Hello")
    finished(page)
    page.wait_for_timeout(500)
    second = page.context.new_page()
    second.goto(page.url)
    expect(second.get_by_label("Message", exact=True)).to_be_visible()
    ask(second, "think")
    expect(finished(second)).to_contain_text("Four.")
    second.wait_for_timeout(500)

    second.reload()
    expect(second.get_by_text("Chats (2)")).to_be_visible()
    expect(last_answer(page)).to_contain_text("Hello there.")
