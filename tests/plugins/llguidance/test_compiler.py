"""Compiling: kinds, cache, bounds, threads."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.composition import InOrder, Matching, Text, compose
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.structured import Grammar, GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_llguidance.decoder import LlguidanceDecoder
from enginehouse_llguidance.options import LlguidanceOptions
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

JSON_GBNF = r"""
# JSON without numbers
root   ::= object
value  ::= object | array | string | ("true" | "false" | "null")
object ::= "{" ( string ": " value ("," string ":" value){0,2} )? "}"
array  ::= "[" (value ("," value)*)? "]"
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" ["\\bfnrt] )* "\""
"""


def write(grammar: Grammar, tokenizer: FakeTokenizer, chance: random.Random) -> str | None:
    """A finished text of at most 80 tokens, written at random."""
    matcher, token_ids = grammar.start(), []
    bitmask = np.zeros((tokenizer.vocab_size + 31) // 32, np.int32)
    while len(token_ids) < 80:
        matcher.fill_bitmask(bitmask)
        ids = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist()
        going_on = [token_id for token_id in ids if token_id not in tokenizer.end_token_ids]
        if len(going_on) < len(ids) and (not going_on or chance.random() < 0.4):
            return b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids).decode()
        token_ids.append(chance.choice(going_on))
        matcher.accept(token_ids[-1])
    return None


def texts(compiler: GrammarCompiler, tokenizer: FakeTokenizer, kind: Any, text: str, count: int = 40) -> set[str]:
    grammar = compiler.compile(Constraint(kind=kind, text=text, param="field"))
    return {text for seed in range(count) if (text := write(grammar, tokenizer, random.Random(seed))) is not None}


def test_json_object_is_an_object(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    found = texts(compiler, tokenizer, "json_object", "", 150)

    assert len(found) > 3
    assert all(isinstance(json.loads(text), dict) for text in found)


def test_json_is_written_as_python_writes_it(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    schema = {
        "type": "array",
        "items": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"const": [1, 2]}}},
    }
    found = texts(compiler, tokenizer, "json_schema", json.dumps(schema))

    assert any(len(text) > 30 for text in found)
    assert all(text == json.dumps(json.loads(text)) for text in found)


def test_choice_gives_each_string_and_nothing_else(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    choices = ["the", "the mountain", 'quo"te', "a|b", ".*", "é\n", ""]

    assert texts(compiler, tokenizer, "choice", json.dumps(choices), 400) == set(choices)


def test_a_grammar_of_json(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    found = texts(compiler, tokenizer, "gbnf", JSON_GBNF, 150)

    assert len(found) > 5
    assert all(isinstance(json.loads(text), dict) for text in found)


def test_lark(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    found = texts(compiler, tokenizer, "lark", 'start: sum ["=" NUM]\nsum: NUM ("+" NUM)*\nNUM: /[0-9]{1,3}/')

    assert len(found) > 5
    assert all(re.fullmatch(r"\d{1,3}(\+\d{1,3})*(=\d{1,3})?", text) for text in found)


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("regex", "(", "missing ')'"),
        ("regex", "^(?:(?!a{1,3000}b)[ab]){1,3000}$", "what the expression asserts is too large"),
        ("regex", "(a)\\2", "there is no group 2"),
        ("regex", "a\\y", "this escape is not supported"),
        ("regex", "[^\\s\\S]", "no text satisfies"),
        ("regex", "(" * 100 + ")" * 100, "nested deeper"),
        ("regex", "a{1,1000000}", "repetitions"),
        ("choice", "[]", "at least one string"),
        ("choice", "[1]", "at least one string"),
        ("choice", json.dumps([str(n) for n in range(20_001)]), "20000"),
        ("lark", 'start: "a" %json {"type": "string"}', "%json"),
        ("lark", 'start: /a\n"/ %json {"type": "string"} "b"', "%json"),  # the quote is a part of the expression
        ("lark", "start: <|im_end|>", "<|im_end|>"),
        ("lark", "start: <[5]>", "<[5]>"),
        ("lark", "start[temperature=0.5]: /a+/", "temperature"),
        ("lark", "start: a\na[max_tokens=3]: /a+/", "max_tokens"),
        ("lark", "%import common.INT\nstart: INT", "%import"),
        ("lark", "start: nothing", "nothing"),
        ("lark", 'begin: "a"', "rule"),
        ("lark", "start: start", "no text satisfies"),
        ("gbnf", "root ::= nothing", "nothing"),
        ("gbnf", 'first ::= "a"', "root"),
        ("gbnf", "root ::= (", "grammar"),
        ("gbnf", "", "root"),
        ("gbnf", 'root ::= x\nx ::= "a" x', "endless"),
        ("lark", 'start: "a" start', "endless"),
        ("json_schema", '{"items": {"const": 1}, "type": "array", "minItems": 1000000000}', "endless"),
    ],
)
def test_what_is_malformed_or_unsupported_is_refused(
    compiler: GrammarCompiler, kind: Any, text: str, named: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(Constraint(kind=kind, text=text, param="structured_outputs.grammar"))

    assert named in refused.value.message
    assert refused.value.message.startswith("structured_outputs.grammar: ")
    assert refused.value.param == "structured_outputs.grammar"


def test_what_only_looks_like_a_directive_is_text(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    lark = 'start: "%json" /<[5]>/ "<|x|>" // %json\n# <[5]>'

    assert texts(compiler, tokenizer, "lark", lark) == {"%json<5><|x|>"}


def test_the_parts_of_a_composition_keep_their_own_names(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    part = Constraint(kind="json_schema", text='{"const": [1, 2]}', param="tools[0]")
    whole = compose(InOrder((Text("<call>"), Matching(part))), "tools")
    wrong = compose(InOrder((Text("x"), Matching(Constraint(kind="regex", text="(", param="tools[3]")))), "tools")

    assert texts(compiler, tokenizer, "composition", whole.text) == {"<call>[1, 2]"}
    with pytest.raises(InvalidRequest, match=r"^tools\[3\]: missing") as refused:
        compiler.compile(wrong)
    assert refused.value.param == "tools[3]"


def test_compiling_again_is_cheap_and_the_cache_is_bounded(tokenizer: FakeTokenizer) -> None:
    compiler = LlguidanceDecoder(LlguidanceOptions(max_cached=3)).bind(tokenizer)
    grammars = [compiler.compile(Constraint(kind="regex", text=f"a{n}")) for n in range(3)]

    assert compiler.compile(Constraint(kind="regex", text="a0", param="another")) is grammars[0]
    compiler.compile(Constraint(kind="regex", text="a3"))
    assert compiler.compile(Constraint(kind="regex", text="a0")) is grammars[0]
    assert compiler.compile(Constraint(kind="regex", text="a1")) is not grammars[1]  # the one used longest ago


def test_many_threads_compile_at_once(compiler: GrammarCompiler) -> None:
    def compile_one(number: int) -> bool:
        schema = {"type": "object", "properties": {f"p{number % 7}": {"type": "string", "maxLength": number % 5}}}
        return compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema))).start().is_finished()

    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(compile_one, range(200)))


def test_other_threads_run_while_a_large_schema_is_compiled(compiler: GrammarCompiler) -> None:
    schema = {"enum": [{"a": n, "b": [n]} for n in range(2000)]}
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    most = 0
    for _ in range(20):  # a busy machine may have no time for the other thread
        ticks.clear()
        compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
        most = max(most, len(ticks))
        if most > 10:
            break
    done.set()
    thread.join()

    assert most > 10
