"""The format ``harmony`` and OpenAI's own reader of it, ``openai-harmony``, say the same about an answer.

Runs where that package is installed and ``TIKTOKEN_ENCODINGS_BASE`` names a folder with ``o200k_base.tiktoken``, which
it would otherwise download.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from typing import Any

import pytest

from enginehouse.contract.parsers import ChatFormat
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse_parsers.harmony import HarmonyReasoningParser

from .answers import FORMATS, TOOLS, told

pytestmark = pytest.mark.slow

ANALYSIS = ("<|channel|>analysis<|message|>{}<|end|>",)
SAID = ("<|channel|>commentary<|message|>{}<|end|>",)
FINAL = ("<|channel|>final<|message|>{}<|return|>",)
CALLS = (
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.{}<|message|>{}<|call|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
    " to=functions.{}<|channel|>commentary<|message|>{}<|call|>",
    " to=functions.{}<|channel|>commentary json<|message|>{}<|call|>",  # as the template writes it
)
TEXTS = (
    "",
    "Hm.",
    "We need the lamp.\n\nSo: call it.",
    "a < b <|x|> 漢 🧑🏽‍🚀",
    '{"on": true}',
    "to=be or not",
    "analysis",
)
ARGUMENTS = (("set_lamp", '{"on": true, "level": 3}'), ("say", '{"text": "it\'s 漢"}'), ("now", "{}"))


def answers() -> list[str]:
    """Answers of one to four messages, in all ways to write their headers."""
    chance = random.Random(7)
    found = []
    for kinds in itertools.product(("", "a", "aa"), ("", "s"), ("f", "c")):
        for number in range(10):
            messages = []
            for kind in "".join(kinds):
                if kind == "c":
                    messages.append(CALLS[number % len(CALLS)].format(*chance.choice(ARGUMENTS)))
                else:
                    form = {"a": ANALYSIS, "s": SAID, "f": FINAL}[kind][0]
                    messages.append(form.format(chance.choice(TEXTS)))
            found.append("<|start|>assistant".join(messages))
    return found


def by_referee(encoding: Any, role: Any, text: str) -> dict[str, Any]:
    tokens = encoding.encode(text, allowed_special="all")
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for message in encoding.parse_messages_from_completion_tokens(tokens, role):
        written = "".join(part.text for part in message.content)
        if message.recipient is not None and message.recipient.startswith("functions."):
            said["calls"].append((message.recipient.removeprefix("functions."), json.loads(written)))
        else:
            said["reasoning" if message.channel == "analysis" else "content"] += written
    return said


def test_answers_are_read_as_openai_reads_them() -> None:
    harmony = pytest.importorskip("openai_harmony")
    if not os.environ.get("TIKTOKEN_ENCODINGS_BASE"):
        pytest.skip("TIKTOKEN_ENCODINGS_BASE names no folder with o200k_base.tiktoken")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    reasoning = HarmonyReasoningParser().bind(ChatFormat(""))
    parsing = AnswerParsing(reasoning=reasoning, tool_format=FORMATS["harmony"], tools=TOOLS)

    different = {}
    for text in answers():
        ours = told(parsing, [text])
        ours["calls"] = [(name, json.loads(arguments)) for name, arguments in ours["calls"]]
        if (referee := by_referee(encoding, harmony.Role.ASSISTANT, text)) != ours:
            different[text] = (ours, referee)
    assert different == {}
