"""E01 to E13: embeddings in OpenAI's form, and rerank in Jina's."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any

from enginehouse.cli.target import Answer, Target
from enginehouse_conform.check import Check, CheckFailed, NotOffered, require
from enginehouse_conform.reading import answered, offered, refused

__all__ = ["CHECKS"]

_TEXTS = (
    "The sea is calm today.",
    "A cat sleeps on the warm roof.",
    "Water boils at one hundred degrees.",
    "Das Meer ist heute ruhig.",
)
_ODD = ("\U0001f600 emoji", "שלום עולם", "line\nbreak\ttab", " ", "\u200b", "a" * 300, "日本語のテキスト")
_SAME = 1e-3
"""Largest difference of two numbers that count as equal: batches round differently."""
_TOO_MANY_WORDS = 40_000

_Vector = Sequence[float]


def _embed(target: Target, given: Any, **fields: Any) -> Answer:
    return target.post("/embeddings", {"model": target.model, "input": given, **fields})


def _vectors(target: Target, given: Any, what: str = "a text", **fields: Any) -> list[_Vector]:
    return [item["embedding"] for item in answered(_embed(target, given, **fields), what)["data"]]


def _is_same(first: _Vector, second: _Vector) -> bool:
    pairs = zip(first, second, strict=True)
    return len(first) == len(second) and all(abs(one - other) <= _SAME for one, other in pairs)


def _form(target: Target) -> None:
    data = answered(_embed(target, _TEXTS[0]))
    require(data["object"] == "list" and isinstance(data["model"], str), "the list has no object or model")
    require(len(data["data"]) == 1, f"one text has {len(data['data'])} vectors")
    item = data["data"][0]
    require(item["object"] == "embedding" and item["index"] == 0, f"an item is {item['object']!r} {item['index']}")
    vector = item["embedding"]
    require(len(vector) > 1 and all(type(one) in (float, int) for one in vector), "a vector is not a list of numbers")
    require(all(map(math.isfinite, vector)), "a vector holds numbers that are not finite")
    usage = data["usage"]
    require(usage["prompt_tokens"] == usage["total_tokens"] > 0, f"usage is {usage}")


def _length(target: Target) -> None:
    for text, vector in zip(_TEXTS, _vectors(target, list(_TEXTS)), strict=True):
        length = math.sqrt(math.fsum(one * one for one in vector))
        require(abs(length - 1) < 1e-2, f"the vector of {text!r} has the length {length:.4f}")


def _order(target: Target) -> None:
    together = answered(_embed(target, list(_TEXTS)), "several texts")["data"]
    indexes = [item["index"] for item in together]
    require(indexes == list(range(len(_TEXTS))), f"the indexes of four texts are {indexes}")
    backwards = _vectors(target, list(reversed(_TEXTS)), "the same texts backwards")
    for item, text, other in zip(together, _TEXTS, reversed(backwards), strict=True):
        (alone,) = _vectors(target, text)
        require(_is_same(item["embedding"], alone), f"{text!r} has another vector alone than with others")
        require(_is_same(other, alone), f"{text!r} has another vector in another order")


def _neighbours(target: Target) -> None:
    (alone,) = _vectors(target, _TEXTS[0])
    beside = _vectors(target, [_TEXTS[0], "word " * 100], "a short text beside a long one")
    require(_is_same(beside[0], alone), "a short text has another vector beside a long one")


def _repeated(target: Target) -> None:
    one = answered(_embed(target, _TEXTS[0]))
    three = answered(_embed(target, [_TEXTS[0]] * 3), "a text three times")
    first, *others = (item["embedding"] for item in three["data"])
    require(all(_is_same(first, other) for other in others), "equal texts have different vectors")
    counts = one["usage"]["prompt_tokens"], three["usage"]["prompt_tokens"]
    require(counts[1] == 3 * counts[0], f"a text has {counts[0]} tokens, and three times {counts[1]}")


def _base64(target: Target) -> None:
    (numbers,) = _vectors(target, _TEXTS[1])
    (coded,) = _vectors(target, _TEXTS[1], "encoding_format base64", encoding_format="base64")
    if not isinstance(coded, str):
        raise CheckFailed(f"encoding_format 'base64' gives {type(coded).__name__}")
    raw = base64.b64decode(coded)
    require(len(raw) == 4 * len(numbers), f"{len(numbers)} numbers are {len(raw)} bytes in base64")
    require(_is_same(numbers, struct.unpack(f"<{len(numbers)}f", raw)), "base64 holds another vector than the list")
    refused(_embed(target, _TEXTS[1], encoding_format="hex"), "encoding_format 'hex'")


def _token_ids(target: Target) -> None:
    single = offered(_embed(target, [5, 6, 7]), "a list of token ids")["data"]
    several = offered(_embed(target, [[5, 6, 7], [8, 9]]), "lists of token ids")["data"]
    require((len(single), len(several)) == (1, 2), f"{len(single)} and {len(several)} vectors of one and two lists")
    require(_is_same(single[0]["embedding"], several[0]["embedding"]), "the same ids have another vector in a list")


def _empty(target: Target) -> None:
    wrong: tuple[Any, ...] = ("", [], [""], ["a", ""], [[]], 5, {"a": 1}, [{"a": 1}], [["a"]], [-1])
    for given in wrong:
        refused(_embed(target, given), f"the input {given!r}", "input")
    refused(target.post("/embeddings", {"model": target.model}), "a body without an input", "input")


def _long(target: Target) -> None:
    answer = _embed(target, ["short", "word " * _TOO_MANY_WORDS])
    require(answer.status != 200, "a text that is too long for the model is shortened without a word")
    refused(answer, "a text that is too long", "input")
    param = str(answer.json()["error"]["param"])
    require("1" in param, f"the error names {param!r}, not the index of the text")


def _dimensions(target: Target) -> None:
    (whole,) = _vectors(target, _TEXTS[0])
    size = len(whole) // 2
    answer = _embed(target, _TEXTS[0], dimensions=size)
    if answer.status != 200:
        refused(answer, f"dimensions {size}", "dimensions")
        raise NotOffered(f"dimensions are refused: {answer.shown()}", "refused")
    vector = answered(answer)["data"][0]["embedding"]
    require(len(vector) == size, f"dimensions {size} gives {len(vector)} numbers")
    require(abs(math.fsum(one * one for one in vector) - 1) < 1e-2, "shortened vectors are not normalised again")


def _odd(target: Target) -> None:
    for text in _ODD:
        (vector,) = _vectors(target, text, f"the text {text[:20]!r}")
        require(all(map(math.isfinite, vector)), f"the vector of {text[:20]!r} holds numbers that are not finite")
    many = _vectors(target, [f"number {number}" for number in range(256)], "256 texts")
    require(len(many) == 256, f"256 texts have {len(many)} vectors")


def _unknown_model(target: Target) -> None:
    answer = target.post("/embeddings", {"model": "no-such-model", "input": "a"})
    require(answer.status == 404, f"'no-such-model' was answered with {answer.shown()}")
    require(isinstance(answer.json().get("error"), dict), "an unknown model has no error object")


def _rerank(target: Target) -> None:
    body = {"model": target.model, "query": "the ocean", "documents": list(_TEXTS)}
    data = offered(target.post("/rerank", body), "/rerank")
    results = data["results"]
    scores = [result["relevance_score"] for result in results]
    require(sorted(result["index"] for result in results) == [0, 1, 2, 3], "the indexes are not those of the documents")
    require(scores == sorted(scores, reverse=True), f"the results are not sorted: {scores}")
    best = answered(target.post("/rerank", {**body, "top_n": 2}), "top_n 2")["results"]
    require([one["index"] for one in best] == [one["index"] for one in results[:2]], "top_n gives other documents")
    require(len(answered(target.post("/rerank", {**body, "top_n": 99}))["results"]) == 4, "top_n 99 is not all of them")
    refused(target.post("/rerank", {**body, "documents": []}), "documents []")
    refused(target.post("/rerank", {**body, "documents": [1, 2]}), "documents [1, 2]")


CHECKS = (
    Check("E01", "A text has one vector of finite numbers, and its tokens are counted.", _form),
    Check("E02", "Vectors have the length 1.", _length),
    Check("E03", "Vectors come in the order of the texts, and are the same in every order and alone.", _order),
    Check("E04", "A vector does not depend on the texts beside it.", _neighbours),
    Check("E05", "Equal texts have equal vectors and count each.", _repeated),
    Check("E06", "base64 holds the same float32, and other formats are refused.", _base64),
    Check("E07", "Token ids are accepted in both forms.", _token_ids),
    Check("E08", "Empty and malformed inputs are refused by name.", _empty),
    Check("E09", "A text that is too long is refused with its index.", _long),
    Check("E10", "dimensions holds, or is refused by name.", _dimensions),
    Check("E11", "Texts of all scripts and many texts at once have vectors.", _odd),
    Check("E12", "An unknown model is a 404 with an error object.", _unknown_model),
    Check("E13", "/rerank sorts documents, and top_n keeps the best.", _rerank),
)
