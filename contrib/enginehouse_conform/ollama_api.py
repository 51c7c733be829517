"""O01 to O13: Ollama's API."""

from __future__ import annotations

import json
from typing import Any

from enginehouse.cli.target import Answer, Target
from enginehouse_conform.check import Check, NotOffered, require
from enginehouse_conform.events import LAMP_SCHEMA, read_lines
from enginehouse_conform.reading import answered, offered

__all__ = ["CHECKS"]

_COUNTS = ("prompt_eval_count", "eval_count")
_DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
_ASK = [{"role": "user", "content": "Say something about the sea."}]
_LAMP = {"type": "function", "function": {"name": "set_lamp", "description": "A lamp.", "parameters": LAMP_SCHEMA}}


def _send(target: Target, method: str, path: str, data: Any = None) -> Answer:
    body = data if isinstance(data, bytes) or data is None else json.dumps(data).encode()
    return target.send(method, target.root.removesuffix("/v1") + path, body)


def _post(target: Target, path: str, **fields: Any) -> Answer:
    body = {"model": target.model, **fields}
    return _send(target, "POST", path, {name: value for name, value in body.items() if value is not ...})


def _chat(target: Target, **fields: Any) -> Answer:
    options = {"temperature": 0, "num_predict": 16, **fields.pop("options", {})}
    return _post(target, "/api/chat", **{"messages": _ASK, "stream": False, "options": options, **fields})


def _generate(target: Target, **fields: Any) -> Answer:
    options = {"temperature": 0, "num_predict": 8}
    return _post(target, "/api/generate", **{"prompt": "The sea", "stream": False, "options": options, **fields})


def _version(target: Target) -> None:
    root = _send(target, "GET", "/")
    require(root.status == 200 and b"Ollama is running" in root.body, f"/ was answered with {root.shown()}")
    version = answered(_send(target, "GET", "/api/version"))["version"]
    numbers = version.partition("-")[0].split(".")
    require(len(numbers) == 3 and all(number.isdigit() for number in numbers), f"the version is {version!r}")


def _models(target: Target) -> None:
    for path in ("/api/tags", "/api/ps"):
        for entry in answered(_send(target, "GET", path), path)["models"]:
            missing = {"name", "model", "size", "digest", "details"} - set(entry)
            require(not missing, f"an entry of {path} lacks {', '.join(sorted(missing))}")
    listed = answered(_send(target, "GET", "/api/tags"))["models"]
    names = {entry["name"].removesuffix(":latest") for entry in listed}
    require(target.model.removesuffix(":latest") in names, f"/api/tags does not list {target.model!r}")
    shown = answered(_post(target, "/api/show"), "/api/show")
    require("completion" in shown["capabilities"], f"capabilities are {shown['capabilities']}")
    architecture = shown["model_info"]["general.architecture"]
    length = shown["model_info"].get(f"{architecture}.context_length")
    require(isinstance(length, int) and length > 0, "model_info has no context_length of the architecture")


def _final(data: dict[str, Any]) -> None:
    require(data["done"] is True, "the last object is not done")
    require(data["done_reason"] in ("stop", "length"), f"done_reason is {data['done_reason']!r}")
    wrong = [name for name in (*_COUNTS, *_DURATIONS) if type(data.get(name)) is not int or data[name] < 0]
    require(not wrong, f"the last object has no integers for {', '.join(wrong)}")
    parts = data["prompt_eval_duration"] + data["eval_duration"]
    require(data["eval_count"] > 0 and data["prompt_eval_count"] > 0, "the last object counts no tokens")
    require(data["total_duration"] > 0, "total_duration is 0")
    require(parts <= 1.05 * data["total_duration"] + 1e6, "prompt and answer took longer than the request")
    require(data["total_duration"] < 1e9 * 3600, "total_duration is not in nanoseconds")


def _whole(target: Target) -> None:
    data = answered(_chat(target))
    _final(data)
    require({"model", "created_at"} <= set(data), "a response lacks model or created_at")
    require(data["message"]["role"] == "assistant", f"a message has the role {data['message']['role']!r}")
    require(isinstance(data["message"]["content"], str), "the content of a message is not text")
    _final(generated := answered(_generate(target)))
    require(isinstance(generated["response"], str), "the response of /api/generate is not text")


def _stream(target: Target) -> None:
    for chunks in (read_lines(_chat(target, stream=True)), read_lines(_chat(target, stream=...))):
        for chunk in chunks[:-1]:
            require(chunk["done"] is False, "an object before the last one is done")
            early = [name for name in _DURATIONS if name in chunk]
            require(not early, f"an object before the last one has {', '.join(early)}")
            require(chunk["message"]["role"] == "assistant", "a message has no role")
        _final(chunks[-1])
        require(len(chunks) > 1, "a stream has one object")


def _same(target: Target) -> None:
    whole, chunks = answered(_chat(target)), read_lines(_chat(target, stream=True))
    said = whole["message"]["content"]
    streamed = "".join(chunk["message"]["content"] for chunk in chunks)
    require(said == streamed, f"{said!r} whole and {streamed!r} streamed")
    for name in ("done_reason", "eval_count"):
        require(whole[name] == chunks[-1][name], f"{name} is {whole[name]} whole and {chunks[-1][name]} streamed")


def _options(target: Target) -> None:
    data = answered(_chat(target, options={"num_predict": 4}))
    require(data["eval_count"] <= 4, f"num_predict 4 made {data['eval_count']} tokens")
    require(
        data["eval_count"] < 4 or data["done_reason"] in ("length", "stop"), f"done_reason is {data['done_reason']!r}"
    )
    text = answered(_chat(target))["message"]["content"]
    stop = text[len(text) // 2 :][:3]
    if stop.strip():
        cut = answered(_chat(target, options={"stop": [stop]}))["message"]["content"]
        require(stop not in cut and text.startswith(cut.rstrip()), f"stop {stop!r} gives {cut!r}")


def _tag(target: Target) -> None:
    name = target.model if ":" in target.model else f"{target.model}:latest"
    answered(_chat(target, model=name), f"the name {name!r}")


def _format(target: Target) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    for shown, form in (("'json'", "json"), ("a JSON Schema", {**schema, "additionalProperties": False})):
        data = offered(_chat(target, format=form, options={"num_predict": 200}), f"format {shown}")
        if data["done_reason"] == "length":
            continue
        value = json.loads(data["message"]["content"])
        require(isinstance(value, dict), f"format {shown} gives {value!r}")
        require(form == "json" or isinstance(value.get("ok"), bool), f"the text does not fit its schema: {value}")
    answer = _chat(target, format="yaml")
    _refused(answer, "format 'yaml'")


def _calls(target: Target) -> None:
    call = {"function": {"name": "set_lamp", "arguments": {"on": True, "level": 5}}}

    def length(content: str) -> int:
        turns = [
            *_ASK,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": content},
        ]
        return int(offered(_chat(target, messages=turns, tools=[_LAMP]), "an earlier call")["prompt_eval_count"])

    require(length("five and a half " * 20) > length("5") + 20, "the result of a call is not in the prompt")
    data = answered(_chat(target, tools=[_LAMP], options={"num_predict": 64}), "a tool")
    for one in data["message"].get("tool_calls") or ():
        require(isinstance(one["function"]["arguments"], dict), "the arguments of a call are not an object")


def _refused(answer: Answer, what: str, *statuses: int) -> None:
    require(answer.status in (statuses or (400, 422)), f"{what} was answered with {answer.shown()}")
    data = answer.json()
    is_error = isinstance(data, dict) and isinstance(data.get("error"), str) and data["error"]
    require(is_error, f"{what}: the body has no text 'error': {answer.shown()}")


def _errors(target: Target) -> None:
    _refused(_send(target, "POST", "/api/chat", b'{"model":'), "a cut body")
    _refused(_chat(target, messages="hi"), "messages 'hi'")
    _refused(_chat(target, options={"temperature": "hot"}), "the temperature 'hot'")
    _refused(_chat(target, messages=[{"role": "user", "content": "a", "images": ["nonsense"]}]), "the image 'nonsense'")
    _refused(_chat(target, model="no-such-model"), "a chat with 'no-such-model'", 404)
    _refused(_chat(target, model="no-such-model", stream=True), "a stream of 'no-such-model'", 404)
    _refused(_post(target, "/api/show", model="no-such-model"), "/api/show of 'no-such-model'", 404)


def _load(target: Target) -> None:
    data = answered(_post(target, "/api/chat", messages=[], stream=False), "a chat without messages")
    require(data["done"] is True and data["done_reason"] == "load", f"done_reason is {data.get('done_reason')!r}")
    for value in ("5m", 300):
        answered(_chat(target, keep_alive=value), f"keep_alive {value!r}")


def _think(target: Target) -> None:
    shown = answered(_post(target, "/api/show"))
    if "thinking" in shown["capabilities"]:
        raise NotOffered("the model thinks")
    message = answered(_chat(target, think=False), "think: false")["message"]
    require(not message.get("thinking"), "think: false gives thinking")


def _embeddings(target: Target) -> None:
    answer = _post(target, "/api/embed", input="The sea")
    if answer.status != 200:
        _refused(answer, "/api/embed", 400, 404, 422, 500, 501)
        raise NotOffered(f"embeddings are refused: {answer.shown()}", "refused")
    vectors = answered(answer)["embeddings"]
    require(len(vectors) == 1 and all(isinstance(value, float) for value in vectors[0]), "embeddings are not numbers")


CHECKS = (
    Check("O01", "/ and /api/version answer as clients expect that look for a server.", _version),
    Check("O02", "The lists of models and /api/show have what editors read.", _models),
    Check("O03", "A response has its text, counts, and durations in nanoseconds.", _whole),
    Check("O04", "A stream, the default, has one JSON object per line, and figures in the last one only.", _stream),
    Check("O05", "Streamed and whole responses say the same and count the same.", _same),
    Check("O06", "num_predict and stop end the text.", _options),
    Check("O07", "A name may have a tag.", _tag),
    Check("O08", "format holds, and one that makes no sense is refused.", _format),
    Check("O09", "Arguments of calls are objects, and results of calls are read.", _calls),
    Check("O10", "Malformed requests and unknown models are refused with the member 'error'.", _errors),
    Check("O11", "A chat without messages loads the model, and keep_alive is accepted.", _load),
    Check("O12", "think: false is accepted for a model that does not think.", _think),
    Check("O13", "/api/embed gives vectors, or an error.", _embeddings),
)
