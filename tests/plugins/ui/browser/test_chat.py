"""Chat: answers as they stream, branches, tools, schemas, errors, and what is kept."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from enginehouse_testkit.server import ServerProcess, started_server

from .harness import ask, configured, finished, last_answer, show, wait_until_kept

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""A PNG file of one pixel."""


def test_first_answer_is_streamed_and_kept(page: Page) -> None:
    ask(page, "Hello")

    expect(finished(page)).to_contain_text("Hello there.")
    wait_until_kept(page, "Hello there.")
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
    wait_until_kept(page, "word20")
    page.reload()

    expect(last_answer(page)).to_contain_text("word20")
    expect(last_answer(page)).to_contain_text("the page was closed")


OLD_CHATS = """async () => {
    const opening = indexedDB.open("enginehouse", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("chats", {keyPath: "id"});
    await new Promise(resolve => { opening.onsuccess = resolve });
    const writing = opening.result.transaction("chats", "readwrite");
    for (let at = 0; at < 30; at++) {
        const nodes = {
            1: {id: "1", parent: null, role: "user", content: `Question ${at}`},
            2: {id: "2", parent: "1", role: "assistant", content: `Answer ${at}`, isRunning: true},
        };
        const chat = {id: `chat ${at}`, title: `Question ${at}`, created: at, changed: at, nodes, leaf: "2"};
        writing.objectStore("chats").put({...chat, model: "", system: "", tools: "", schema: "", parameters: {}});
    }
    await new Promise(resolve => { writing.oncomplete = resolve });
    opening.result.close();
}"""


def test_chats_of_an_older_version_are_listed_and_read_when_opened(server: ServerProcess, watched_pages: Any) -> None:
    page, watched = watched_pages(server.url)
    watched.expected = ["404"]  # the icon of a picture
    page.goto(f"{server.url}/ui/console/icon.svg")
    page.evaluate(OLD_CHATS)
    page.goto(f"{server.url}/")
    page.get_by_text("Chats (30)").click()
    expect(page.locator(".chats li button").first).to_have_text("Question 29")
    for number in (7, 8):
        page.get_by_role("button", name=f"Question {number}", exact=True).click()
        expect(last_answer(page)).to_contain_text(f"Answer {number}")
        expect(last_answer(page)).to_contain_text("the page was closed")
    page.get_by_role("button", name="Delete the chat Question 8").click()

    expect(page.get_by_text("Chats (29)")).to_be_visible()
    page.reload()
    expect(page.get_by_text("Chats (29)")).to_be_visible()


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


def test_a_chat_that_is_deleted_while_it_is_answered_ends_and_does_not_come_back(page: Page) -> None:
    ask(page, "slowly")
    expect(last_answer(page)).to_contain_text("word3")
    page.get_by_text("Chats (1)").click()
    page.get_by_role("button", name="Delete the chat slowly").click()

    ask(page, "Hello")  # its slot is free
    expect(finished(page)).to_contain_text("Hello there.")
    expect(page.get_by_text("Chats (1)")).to_be_visible()
    show(page, "requests")
    expect(page.get_by_text("Nothing is running")).to_be_visible()


def test_thinking_is_folded(page: Page) -> None:
    ask(page, "think")

    answer = finished(page)
    expect(answer.get_by_text("Two and two.")).to_be_hidden()
    answer.get_by_text("Thought", exact=False).click()
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


def test_an_image_is_sent_and_inspected(watched_pages: Any, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}{% for part in message.content %}"
        "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %} Answer:"
    )
    seer = f'[models.seer]\nsource = "fake"\nbackend = "fake"\nimage_tokens = 12\nchat_template = "{template}"\n'
    with started_server("--config", configured(tmp_path, head=seer)) as server:
        page, _ = watched_pages(server.url)
        page.goto(f"{server.url}/", wait_until="networkidle")
        page.get_by_label("Model", exact=True).select_option("seer")
        page.get_by_label("Image", exact=True).set_input_files(
            {"name": "dot.png", "mimeType": "image/png", "buffer": DOT}
        )
        expect(page.get_by_role("img", name="Image 1", exact=True)).to_be_visible()
        page.get_by_label("max_tokens", exact=True).fill("6")
        ask(page, "What is it?", model="seer")
        finished(page).get_by_role("link", name="Inspect").click()

        expect(page.get_by_role("region", name="The prompt as the model reads it")).to_contain_text(
            "[image, 12 tokens]"
        )


def test_a_large_image_is_refused_before_it_is_sent(page: Page) -> None:
    page.get_by_label("Message", exact=True).evaluate(
        """field => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(20e6)], "large.png", { type: "image/png" }));
            field.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
        }"""
    )

    expect(page.get_by_role("alert")).to_contain_text(re.compile("takes no images|20.0 MB"))
