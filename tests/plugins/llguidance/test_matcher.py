"""Matchers beyond the contract of decoders: what this library does at ends, with spaces and on threads."""

from __future__ import annotations

import json
import random
import string
import threading
import time
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.errors import GenerationFailed
from enginehouse.contract.structured import GrammarCompiler, Matcher
from enginehouse.contract.types import Constraint
from enginehouse_llguidance.decoder import LlguidanceDecoder
from enginehouse_llguidance.options import LlguidanceOptions
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

ANY = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}})


def start(compiler: GrammarCompiler, text: Any, kind: Any = "json_schema") -> Matcher:
    text = text if isinstance(text, str) else json.dumps(text)
    return compiler.compile(Constraint(kind=kind, text=text)).start()


def allowed(matcher: Matcher, tokenizer: FakeTokenizer) -> set[int]:
    bitmask = np.full((tokenizer.vocab_size + 31) // 32, -1, np.int32)
    matcher.fill_bitmask(bitmask)
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


def feed(matcher: Matcher, tokenizer: FakeTokenizer, text: str) -> None:
    for token_id in tokenizer.encode(text, special=False):
        matcher.accept(token_id)


def test_a_refused_token_names_the_plugin_and_no_schema(compiler: GrammarCompiler) -> None:
    matcher = start(compiler, {"const": "a secret of the schema"})
    with pytest.raises(GenerationFailed) as refused:
        matcher.accept(ord("x"))

    assert refused.value.plugin == "llguidance"
    assert "secret" not in refused.value.message
    with pytest.raises(GenerationFailed):
        matcher.fill_bitmask(np.zeros(10, np.int32))


def test_the_end_is_allowed_exactly_where_the_text_may_end(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    matcher = start(compiler, "a|ab", "regex")

    assert allowed(matcher, tokenizer) == {ord("a"), tokenizer.encode(" a", False)[0]} - {
        tokenizer.encode(" a", False)[0]
    }
    matcher.accept(ord("a"))
    assert allowed(matcher, tokenizer) == {ord("b"), *tokenizer.end_token_ids}
    assert not matcher.is_finished()
    matcher.accept(ord("b"))
    assert matcher.is_finished()
    assert allowed(matcher, tokenizer) == set(tokenizer.end_token_ids)
    assert list(matcher.forced_token_ids()) == []


def test_forced_tokens_are_how_the_tokenizer_writes_the_text(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer
) -> None:
    text = '{"the mountain": [null, "日本語"]}'
    matcher = start(compiler, {"const": json.loads(text)})
    forced = list(matcher.forced_token_ids())

    assert list(matcher.forced_token_ids()) == forced  # asking changes nothing
    written = b"".join(tokenizer.token_bytes[token_id] for token_id in forced).decode()
    assert text.startswith(written) and len(written) > len(text) - 4
    assert forced == tokenizer.encode(text, False)[: len(forced)]


def test_control_tokens_are_never_text(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    hidden = tokenizer.control_token_ids - tokenizer.end_token_ids
    for kind, text in (
        ("json_schema", "{}"),
        ("regex", r"[^x]*"),
        ("lark", 'start: ~"x"'),
        ("gbnf", "root ::= [^x]*"),
        ("lark", "start: /(?s:.)*/"),
    ):
        assert not allowed(start(compiler, text, kind), tokenizer) & hidden


class LargeTokenizer(FakeTokenizer):
    """A vocabulary for which a mask takes milliseconds."""

    def __init__(self) -> None:
        super().__init__(100_000)
        chance, alphabet = random.Random(0), string.ascii_lowercase + string.digits + " "
        words = ("".join(chance.choices(alphabet, k=chance.randint(1, 12))).encode() for _ in range(99_000))
        self.token_bytes = (*self.token_bytes[:1000], *words)
        self.control_token_ids = self.control_token_ids - set(range(1000, 100_000))


def test_other_threads_run_while_a_mask_is_filled() -> None:
    tokenizer = LargeTokenizer()
    compiler = LlguidanceDecoder(LlguidanceOptions()).bind(tokenizer)
    ticks, stop = [], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0002)

    bitmask = np.zeros(tokenizer.vocab_size // 32, np.int32)
    thread = threading.Thread(target=tick)
    thread.start()
    num_shared = 0  # masks during which the other thread ran twice: once it may at their end
    for number in range(300):
        matcher = start(compiler, f"[a-z0-9 ]*x[a-z ]{{{number + 3}}}", "regex")
        matcher.accept(ord("a"))
        began = time.perf_counter()
        matcher.fill_bitmask(bitmask)
        ended = time.perf_counter()
        num_shared += sum(began < moment < ended for moment in list(ticks)) > 1
        if num_shared == 3:  # soon, unless the machine is busy
            break
    stop.set()
    thread.join()

    assert num_shared == 3


class SpacingTokenizer(FakeTokenizer):
    """Puts a space in front of every text, as SentencePiece's dummy prefix does."""

    def encode(self, text: str, special: bool) -> list[int]:
        return super().encode(f" {text}", special)


def test_a_tokenizer_that_puts_a_space_in_front_forces_no_space() -> None:
    tokenizer = SpacingTokenizer()
    matcher = start(LlguidanceDecoder(LlguidanceOptions()).bind(tokenizer), {"const": "the mountain"})
    written = b"".join(tokenizer.token_bytes[token_id] for token_id in matcher.forced_token_ids())

    assert b'"the mountain"'.startswith(written) and len(written) > 8
