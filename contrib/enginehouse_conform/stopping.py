"""H06 to H08: stop strings and limits."""

from __future__ import annotations

import json

from enginehouse.cli.target import Target
from enginehouse_conform.check import Check, CheckFailed, NotOffered, require
from enginehouse_conform.reading import answered, content_of, forced, forced_text, read_stream, refused

__all__ = ["CHECKS"]

_COLOURS = "red green blue violet orange"
_MOUNTAIN = "mountaineering equipment"
_CONTROL = ("<|im_end|>", "<|im_start|>", "<end_of_turn>", "<|eot_id|>", "</s>", "<|end|>")


def _stops(target: Target, text: str, stop: str | list[str], expected: str) -> None:
    whole = forced_text(target, text, stop=stop)
    require(content_of(whole) == expected, f"stop {json.dumps(stop)}: {content_of(whole)!r} instead of {expected!r}")
    reason = whole["choices"][0]["finish_reason"]
    require(reason == "stop", f"stop {json.dumps(stop)}: the finish reason is {reason!r}")
    streamed = read_stream(target.chat(stream=True, **forced(text), stop=stop)).text()
    require(streamed == expected, f"stop {json.dumps(stop)}, streamed: {streamed!r} instead of {expected!r}")


def _over_tokens(target: Target) -> None:
    for stop in (["green blu"], "green blu"):
        _stops(target, _COLOURS, stop, '"red ')


def _inside_token(target: Target) -> None:
    _stops(target, _MOUNTAIN, ["neering"], '"mountai')
    _stops(target, _MOUNTAIN, ["quip"], '"mountaineering e')


def _limits(target: Target) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = {**target.chat_body(), name: 7}
        if name != "max_tokens":
            del body["max_tokens"]
        data = answered(target.post("/chat/completions", body), name)
        count, reason = data["usage"]["completion_tokens"], data["choices"][0]["finish_reason"]
        require(count <= 7, f"{name} 7 made {count} tokens")
        require(reason == "length" or count < 7, f"{name} 7: {count} tokens end with {reason!r}")


def _bad_limits(target: Target) -> None:
    for name, value in (("max_tokens", -5), ("max_completion_tokens", "7"), ("max_completion_tokens", 1.5)):
        body = {key: given for key, given in target.chat_body().items() if key != "max_tokens"}
        refused(target.post("/chat/completions", {**body, name: value}), f"{name} {value!r}", name)


def _own_end(target: Target) -> None:
    data = forced_text(target, "done")
    reason = data["choices"][0]["finish_reason"]
    require(reason == "stop", f"an answer that ended by itself has the finish reason {reason!r}")
    content = content_of(data)
    shown = next((text for text in _CONTROL if text in content), None)
    if shown is not None:
        raise CheckFailed(f"the answer shows the control text {shown!r}")
    require(json.loads(content) == "done", f"the answer is {content!r}")


def _stop_in_text(target: Target) -> None:
    text = content_of(answered(target.complete(max_tokens=24)))
    if len(text) < 12:
        raise NotOffered("the model says too little to stop it")
    stop = text[len(text) // 2 :][:4]
    stopped = content_of(answered(target.complete(max_tokens=24, stop=[stop])))
    expected = text[: text.index(stop)]
    require(stopped == expected, f"stop {stop!r}: {stopped!r} instead of {expected!r}")


CHECKS = (
    Check("H06", "A stop string over several tokens ends the answer, and none of it shows.", _over_tokens),
    Check("H06", "Text completions stop at a stop string as well.", _stop_in_text),
    Check("H07", "The part of a token that comes before a stop string is delivered.", _inside_token),
    Check("H08", "max_tokens and max_completion_tokens limit the answer, which then ends with 'length'.", _limits),
    Check("H08", "A limit that is negative, a string or a fraction is refused by name.", _bad_limits),
    Check("H08", "An answer that ends by itself ends with 'stop' and shows no control text.", _own_end),
)
