"""Markdown that streams: after each piece, the page shows what it would show had the text come at once."""

from __future__ import annotations

import random
from typing import Any

from playwright.sync_api import Page

from .harness import HOSTILE

TEXTS = [
    "# A plan\n\nSome **bold** text.\n\n- one\n\n- two\n\n    deeper\n\n1. first\n2. second\n\nThe end.\n",
    "```python\nprint(1)\n\n\n```\n\n~~~\nopen\n\n# no heading\n\n",
    "- a\n\n  ```\n  code\n\n  ```\n\n- b\n\n-\n\nText.\n\n- [ ] to do\n- [x] done\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n| <b> | ![x](y) |\n\nAfter.\n\na | b\n-|-\n",
    "A line\n===\n\nA line\n---\n\n---\n\n***\n\ntext\n#\n\ntext\n#x\n",
    "> quoted\nlazy\n\n> - in a list\n>\n>   > deeper\n\n>\n\nout\n",
    "See [one], [Two Words] and [three][1].\n\nMore.\n\n[one]: https://a.invalid\n[two\nwords]: /x 'y'\n[1]: <b c>\n",
    'A [x] first.\n\n[x]: /u "a title\n\nwith an empty line" \n\nText.\n\n[y]: /v\n"another\n\nend"\n\n[y] [x]\n',
    '[x]: /u "a heading?\n-\n\nText\n\n"\n\n[x]\n',
    "<div>\n\n*a*\n\n</div>\n\n<!-- a comment\n\nstill -->\n\n<?php\n\n?>\n\n<pre>\n\n</pre>\n\nEnd.\n",
    "<script>alert(1)\n\n</script>\n\n<!DOCTYPE x\n\n>\n\n<![CDATA[ \n\n ]]>\n\nEnd.\n",
    "    indented\n\n    code\n\nno code\n\n\ttab\n\n \u00a0\n\nnew\r\n\r\nline\rold\r\n\r\n- x\r\n\r\ny\r\n",
    "- a\n- b\n\n* c\n+ d\n\n10. ten\n11) eleven\n\n\n\n1. one\n\n\n   two\n",
    "A ~~b~~ `c` ``d ` e`` \\* &amp; &lt;b&gt; <https://a.invalid> www.a.invalid a@b.invalid **x*y**z* __a\n\n_b_\n",
    "".join(HOSTILE),
]
# "~" is a line break here, and "¦" a bar.
FRAGMENTS = """
a|b c|#|# h~|~|~~|~~~|- |- x~|* y~|1. one~|2) t~|   |    |```|```py~|`|> |> q~|¦|¦ a ¦ b ¦~|¦---¦---¦~|---~|===~|**b**
[|]|[x]|[x]: |[x]: /u "|[z]: w~(|"|(|)|[x][y]|![i](u)|<|<div>|</div>|<!--|-->|<script>|</script>|&amp;|foo~bar~|text.~~
"""
PIECES = [
    piece.replace("~", "\n").replace("¦", "|") for line in FRAGMENTS.strip().splitlines() for piece in line.split("|")
]

SHOWN_AS_IF_WHOLE = """async texts => {
    const one = document.createElement("md-view");
    const problems = [];
    document.body.append(one);
    for (const text of texts) {
        for (let end = 0; end <= text.length; end++) {
            one.text = text.slice(0, end);
            const whole = document.createElement("md-view");
            whole.text = text.slice(0, end);
            if (one.innerHTML !== whole.innerHTML) {
                problems.push([text.slice(0, end), one.innerHTML, whole.innerHTML]);
                break;
            }
        }
        if (one.querySelector("script, img, iframe, style, form, svg, input, math, [onerror]")) problems.push(text);
        if ([...one.querySelectorAll("a")].some(link => !/^(https?|mailto):/.test(link.href))) problems.push(text);
    }
    one.remove();
    return problems;
}"""


def test_a_text_is_drawn_after_each_character_as_if_it_came_at_once(page: Page) -> None:
    drawn = random.Random(19)
    mixed = ["".join(drawn.choices(PIECES, k=20)) for _ in range(60)]

    assert page.evaluate(SHOWN_AS_IF_WHOLE, [*TEXTS, *mixed]) == []


def _draw(page: Page, *texts: str) -> Any:
    """Draw one text after the other; return which of the elements of the first are still shown."""
    return page.evaluate(
        """texts => {
            const view = document.createElement("md-view");
            document.body.append(view);
            view.text = texts[0];
            const first = [...view.querySelectorAll("p, pre, button, li, td")];
            for (const text of texts.slice(1)) view.text = text;
            const kept = first.map(element => [element.nodeName, element.isConnected]);
            view.remove();
            return kept;
        }""",
        list(texts),
    )


def test_what_is_drawn_stays_while_the_text_goes_on(page: Page) -> None:
    """So a selection, the focus on a button, and the position of a code block that was scrolled stay."""
    text = "Text.\n\n```py\na\n```\n\n- one\n- two\n\n| a |\n|---|\n| 1 |\n"

    kept = _draw(
        page, text, text + "| 2 |\n", text + "| 2 |\n\nMore [x].\n\n", text + "| 2 |\n\nMore [x].\n\n[x]: /u\n"
    )
    assert kept == [[name, True] for name in ("P", "BUTTON", "PRE", "LI", "LI", "TD")]
    assert _draw(page, "```py\na", "```py\na\nb", "```py\na\nb\n```\n\nText.") == [["BUTTON", True], ["PRE", True]]
    assert _draw(page, "One", "Another") == [["P", True]]


def test_a_text_that_is_too_long_for_markdown_grows_as_it_is(page: Page) -> None:
    long = "x" * 200_001

    assert page.evaluate(
        """([short, long]) => {
            const view = document.createElement("md-view");
            const texts = [short, long, long + "# y", "# z"].map(text => (view.text = text, view.innerHTML.length));
            return [texts[1] < texts[2], view.querySelector("h3").textContent];
        }""",
        ["# x", long],
    ) == [True, "z"]


def test_a_text_that_was_too_long_for_markdown_is_drawn_whole_when_it_is_shorter(page: Page) -> None:
    beginning = "# x\n\ny\n\n"

    assert page.evaluate(
        """([beginning, long]) => {
            const view = document.createElement("md-view");
            for (const text of [beginning + "z", beginning + long, beginning + "# z"]) view.text = text;
            return [...view.children].map(child => child.textContent.trim());
        }""",
        [beginning, "x" * 200_001],
    ) == ["x", "y", "z"]
