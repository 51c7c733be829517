"""Everybody can use the page: axe, small screens, the keyboard; keys, a server that is gone, history, tabs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from enginehouse_testkit.server import ServerProcess, started_server

from .harness import VIEWS, ask, configured, finished, last_answer, show, violations, wait_until_kept


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
        fill(page, view)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        before = list(watched.problems)
        assert violations(page) == [], view
        with page.expect_console_message(lambda message: message.text == "axe is done"):
            page.evaluate("console.log('axe is done')")
        watched.problems = before


def fill(page: Page, view: str) -> None:
    """Have a view show a result, where it shows one on request."""
    if view not in ("compare", "routing", "compression"):
        return
    if view == "compression":
        page.get_by_label("Method").select_option("lossless")
    page.get_by_label("Prompt", exact=True).fill("Twice    the same.\n\nTwice    the same.\n\nWhat is twice?")
    page.get_by_role("button", name=re.compile("^(Compare|Show the route|Show what would be cut)$")).click()
    if view == "compare":
        expect(page.get_by_text("First token")).to_have_count(2)
        return
    expect(page.get_by_role("region", name="Result", exact=True)).to_be_visible()
    if view == "compression":
        page.get_by_text(re.compile("^Parts and their scores")).click()


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


def test_a_long_answer_streams_and_is_inspected(page: Page) -> None:
    """Five thousand tokens; blocks that are finished are not drawn again."""
    page.get_by_label("max_tokens", exact=True).fill("6000")
    ask(page, "chapters")
    expect(last_answer(page).locator("h4").first).to_be_visible()
    page.evaluate("window.beginning = document.querySelector('.message.assistant h4')")
    answer = finished(page)

    expect(answer).to_contain_text("5,000 tokens")
    expect(page.locator("#spoken")).to_have_text("Answer finished, 5050 words.")
    assert page.evaluate("beginning.isConnected && beginning.textContent") == "Part 0"
    answer.get_by_role("link", name="Inspect").click()
    expect(page.locator("#tokens .token")).to_have_count(5000)
    page.locator("#tokens .token").first.focus()
    page.keyboard.press("End")
    expect(page.locator(".panel h3")).to_contain_text("Token 5000")


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
        watched.expected = ["net::ERR_"]
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
    wait_until_kept(page, "Hello there.")
    second = page.context.new_page()
    second.goto(page.url)
    expect(second.get_by_label("Message", exact=True)).to_be_visible()
    ask(second, "think")
    expect(finished(second)).to_contain_text("Four.")
    wait_until_kept(second, "Four.")

    second.reload()
    expect(second.get_by_text("Chats (2)")).to_be_visible()
    expect(last_answer(page)).to_contain_text("Hello there.")
