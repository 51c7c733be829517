"""The other views: what they show, and what their buttons do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from enginehouse_testkit.server import ServerProcess

from .harness import ask, finished, show


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
