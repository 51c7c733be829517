"""H09 to H13: several answers, biases, ranges, and log-probabilities."""

from __future__ import annotations

from typing import Any

from enginehouse.cli.target import Target
from enginehouse_conform.check import Check, require
from enginehouse_conform.reading import answered, content_of, offered, read_stream, refused

__all__ = ["CHECKS"]

_OPTIONAL = (
    "stop temperature top_p max_tokens tools tool_choice response_format logit_bias seed n stream user stream_options"
)
_OUT_OF_RANGE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("temperature -0.1", {"temperature": -0.1}, "temperature"),
    ("temperature 3", {"temperature": 3}, "temperature"),
    ("top_p 1.5", {"top_p": 1.5}, "top_p"),
    ("presence_penalty 3", {"presence_penalty": 3}, "presence_penalty"),
    ("top_logprobs 21", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("top_logprobs without logprobs", {"top_logprobs": 2}, ""),
    ("seed 2^70", {"seed": 2**70}, "seed"),
    ("n 100000", {"n": 100_000}, "n"),
)


def _several(target: Target) -> None:
    data = offered(target.chat(n=3, temperature=1), "n = 3")
    require([choice["index"] for choice in data["choices"]] == [0, 1, 2], f"{len(data['choices'])} choices for n = 3")
    one = answered(target.chat())["usage"]["prompt_tokens"]
    require(data["usage"]["prompt_tokens"] == one, f"prompt_tokens {data['usage']['prompt_tokens']} instead of {one}")
    made = data["usage"]["completion_tokens"]
    require(3 <= made <= 24, f"completion_tokens is {made} for 3 answers of at most 8")
    stream = read_stream(target.chat(n=2, temperature=1, stream=True))
    for index in (0, 1):
        require(len(stream.reasons(index)) == 1, f"choice {index} of a stream has {len(stream.reasons(index))} ends")
        roles = [choice for choice in stream.choices(index) if choice["delta"].get("role")]
        require(len(roles) == 1, f"choice {index} of a stream has {len(roles)} roles")


def _none(target: Target) -> None:
    for n in (0, -1):
        refused(target.chat(n=n), f"n {n}", "n")


def _bias(target: Target) -> None:
    for bias in ({"abc": 1}, {"5": "x"}, {"99999999": 1}):
        refused(target.chat(logit_bias=bias), f"logit_bias {bias}", "logit_bias")


def _nulls(target: Target) -> None:
    expected = content_of(answered(target.chat(max_tokens=4)))
    for name in _OPTIONAL.split():
        body = {**target.chat_body(max_tokens=4), name: None}
        if name == "max_tokens":
            body["stop"] = [content_of(answered(target.chat(max_tokens=2)))[-1:] or "e"]
        data = answered(target.post("/chat/completions", body), f"{name} null")
        if name not in ("temperature", "max_tokens"):
            require(content_of(data) == expected, f"{name} null changes the answer")


def _ranges(target: Target) -> None:
    for what, fields, param in _OUT_OF_RANGE:
        refused(target.chat(**fields), what, param or None)


def _unknown(target: Target) -> None:
    message = {"role": "user", "content": "hi", "colour": "red"}
    for what, fields in (
        ("an unknown field", {"colour": "red"}),
        ("an unknown field of a message", {"messages": [message]}),
        ("metadata, store, service_tier and user", {"metadata": {"a": "b"}, "store": False, "service_tier": "auto"}),
    ):
        answered(target.chat(user="somebody", **fields), what)


def _seeds(target: Target) -> None:
    drawn = [content_of(answered(target.chat(seed=seed, temperature=1.5, max_tokens=16))) for seed in (1, 1, 2, 3)]
    require(drawn[0] == drawn[1], f"one seed gave {drawn[0]!r} and {drawn[1]!r}")
    same_for_all = len(set(drawn)) == 1
    require(not same_for_all or not drawn[0], "every seed gives the same text at temperature 1.5")


def _check_entries(entries: list[dict[str, Any]], num_top: int) -> None:
    for entry in entries:
        missing = {"token", "logprob", "bytes", "top_logprobs"} - set(entry)
        require(not missing, f"an entry lacks {', '.join(sorted(missing))}")
        require(entry["logprob"] <= 1e-6, f"a log-probability is {entry['logprob']}")
        top = [one["logprob"] for one in entry["top_logprobs"]]
        require(len(top) == num_top, f"{len(top)} alternatives instead of {num_top}")
        require(top == sorted(top, reverse=True), "alternatives are not in descending order")


def _logprobs(target: Target) -> None:
    data = offered(target.chat(logprobs=True, top_logprobs=5, max_tokens=6), "logprobs")
    entries = data["choices"][0]["logprobs"]["content"]
    _check_entries(entries, 5)
    joined = b"".join(bytes(entry["bytes"] or entry["token"].encode()) for entry in entries).decode("utf-8", "replace")
    require(joined == content_of(data), f"the tokens join to {joined!r}, the content is {content_of(data)!r}")
    firsts = [entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries]
    require(all(firsts), "at temperature 0 the first alternative is not the chosen token")
    stream = read_stream(target.chat(logprobs=True, top_logprobs=5, max_tokens=6, stream=True))
    parts = [choice["logprobs"]["content"] for choice in stream.choices() if choice.get("logprobs")]
    tokens = [entry["token"] for part in parts for entry in part or ()]
    require(tokens == [entry["token"] for entry in entries], "a stream reports other tokens than a whole answer")


def _few_logprobs(target: Target) -> None:
    data = offered(target.chat(logprobs=True, top_logprobs=0), "top_logprobs = 0")
    _check_entries(data["choices"][0]["logprobs"]["content"], 0)
    without = answered(target.chat(logprobs=False))["choices"][0].get("logprobs")
    require(without is None, "logprobs false gives log-probabilities")


def _legacy_logprobs(target: Target) -> None:
    data = offered(target.complete(logprobs=3, max_tokens=5), "logprobs of text completions")
    told = data["choices"][0]["logprobs"]
    count = data["usage"]["completion_tokens"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        require(len(told[name]) == count, f"{name} has {len(told[name])} entries for {count} tokens")
    require("".join(told["tokens"]) == content_of(data), f"the tokens join to {''.join(told['tokens'])!r}")
    require(told["text_offset"] == sorted(told["text_offset"]), "text_offset goes back")
    require(all(3 <= len(top) <= 4 for top in told["top_logprobs"]), "top_logprobs has not 3 or 4 entries each")
    require(answered(target.complete())["choices"][0].get("logprobs") is None, "logprobs come unasked")


CHECKS = (
    Check("H09", "n answers have their indexes, roles and ends, and the prompt counts once.", _several),
    Check("H09", "n of 0 or less is refused by name.", _none),
    Check("H10", "logit_bias with a key that is not a token id, or a value that is not a number, is refused.", _bias),
    Check("H11", "Optional fields that are null are as if absent.", _nulls),
    Check("H11", "Values out of range are refused by name.", _ranges),
    Check("H11", "Unknown fields, metadata, store, service_tier and user are accepted.", _unknown),
    Check("H11", "A seed repeats its answer, and not every seed gives the same.", _seeds),
    Check("H12", "logprobs has one entry per token, alternatives in order, the same when streamed.", _logprobs),
    Check("H12", "top_logprobs 0 gives empty lists, logprobs false gives null.", _few_logprobs),
    Check("H13", "logprobs of text completions are lists of one length, with growing offsets.", _legacy_logprobs),
)
