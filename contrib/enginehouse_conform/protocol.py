"""H27 to H31: models, malformed requests, long prompts, keys, and HTTP itself."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from enginehouse.cli.target import Answer, Target
from enginehouse_conform.check import Check, CheckFailed, NotOffered, require
from enginehouse_conform.reading import answered, refused

__all__ = ["CHECKS"]

_MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("a cut body", b'{"model":'),
    ("an empty body", b""),
    ("a list", b"[]"),
    ("a string", b'"x"'),
    ("null", b"null"),
    ("invalid UTF-8", b'{"model": "\xff\xfe"}'),
    ("20,000 brackets", b"[" * 20_000),
)
_WRONG_TYPES: tuple[tuple[str, Any], ...] = (
    ("temperature", "hot"),
    ("messages", {}),
    ("stream", "yes"),
    ("max_tokens", []),
    ("stop", 5),
    ("tools", "t"),
)
_MAX_WORDS = 400_000


def _models(target: Target) -> None:
    data = answered(target.get("/models"))
    require(data.get("object") == "list", f"the list is a {data.get('object')!r}")
    for entry in [*data["data"], answered(target.get(f"/models/{quote(target.model)}"), "one model")]:
        require(entry.get("object") == "model", f"an entry is a {entry.get('object')!r}")
        kinds = {"id": str, "created": int, "owned_by": str}
        wrong = [name for name, kind in kinds.items() if not isinstance(entry.get(name), kind)]
        require(not wrong, f"an entry lacks {', '.join(wrong)}")


def _unknown_model(target: Target) -> None:
    answers = {
        "the model 'no-such-model'": target.get("/models/no-such-model"),
        "a chat with 'no-such-model'": target.chat(model="no-such-model"),
        "a chat with '../../etc'": target.chat(model="../../etc"),
    }
    for what, answer in answers.items():
        require(answer.status == 404, f"{what} was answered with {answer.shown()}")
        error = (answer.json() or {}).get("error") or {}
        require(error.get("code") == "model_not_found", f"{what}: the code is {error.get('code')!r}")


def _malformed(target: Target) -> None:
    path = f"{target.root}/chat/completions"
    for what, body in _MALFORMED:
        refused(target.send("POST", path, body), what)
    form = target.send("POST", path, b"a=b", {"Content-Type": "application/x-www-form-urlencoded"})
    refused(form, "a form")
    answered(target.chat(max_tokens=2), "a plain request afterwards")


def _wrong_types(target: Target) -> None:
    for name, value in _WRONG_TYPES:
        refused(target.chat(**{name: value}), f"{name} {value!r}", name)


def _context(target: Target) -> int:
    entry = target.entry
    meta = entry.get("meta") if isinstance(entry.get("meta"), dict) else {}
    named = [entry.get(name) for name in ("max_context", "max_model_len", "context_length", "context_window")]
    named += [(meta or {}).get("n_ctx"), (meta or {}).get("n_ctx_train")]
    context = next((value for value in named if isinstance(value, int) and value > 0), None)
    if context is None:
        raise NotOffered("the list of models does not say how long the context is")
    if 3 * context > _MAX_WORDS:
        raise NotOffered(f"a context of {context} tokens is too long to fill")
    return context


def _too_long(target: Target) -> None:
    context = _context(target)
    words = "word " * (3 * context)
    for stream in (False, True):
        answer = target.chat(messages=[{"role": "user", "content": words}], stream=stream)
        refused(answer, f"a prompt of {3 * context} words (stream: {stream})")
        error = answer.json()["error"]
        require(error["code"] == "context_length_exceeded", f"the code is {error['code']!r}")
    answered(target.chat(max_tokens=2), "a plain request afterwards")


def _keys(target: Target) -> None:
    if target.key is None:
        raise NotOffered("no API key was given")
    body = json.dumps(target.chat_body(max_tokens=2)).encode()
    for path, sent in (("/chat/completions", body), ("/models", None)):
        method = "POST" if sent else "GET"
        for what, headers in (
            ("no key", {}),
            ("a wrong key", {"Authorization": "Bearer wrong"}),
            ("a wrong scheme", {"Authorization": f"Basic {target.key}"}),
        ):
            answer = target.send(method, target.root + path, sent, headers, has_key=False)
            require(answer.status == 401, f"{path} with {what} was answered with {answer.shown()}")
            require(isinstance((answer.json() or {}).get("error"), dict), f"{path} with {what}: no error object")


def _http(target: Target) -> None:
    wrong_method = target.get("/chat/completions")
    require(wrong_method.status == 405, f"GET on the chat address was answered with {wrong_method.shown()}")
    unknown = target.get("/no/such/address")
    require(unknown.status == 404, f"an unknown address was answered with {unknown.shown()}")
    for answer in (wrong_method, unknown):
        require(isinstance((answer.json() or {}).get("error"), dict), f"no error object: {answer.shown()}")


def _cors(target: Target) -> None:
    if target.origin is None:
        raise NotOffered("no allowed origin was given (--origin)")
    preflight = _preflight(target, target.origin)
    require(preflight.status in (200, 204), f"a preflight was answered with {preflight.shown()}")
    _check_allows(preflight, target.origin, "a preflight")
    allowed = preflight.headers.get("access-control-allow-headers", "").lower()
    require("authorization" in allowed or allowed == "*", f"a preflight allows the headers {allowed!r}")
    other = _preflight(target, "https://evil.example")
    if other.headers.get("access-control-allow-origin") in ("*", "https://evil.example"):
        raise CheckFailed("any other origin is allowed, too")
    path, origin = f"{target.root}/chat/completions", {"Origin": target.origin}
    for what, body in (("an answer", target.chat_body(max_tokens=2)), ("an error", {})):
        _check_allows(target.send("POST", path, json.dumps(body).encode(), origin), target.origin, what)


def _preflight(target: Target, origin: str) -> Answer:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return target.send("OPTIONS", f"{target.root}/chat/completions", None, headers, has_key=False)


def _check_allows(answer: Answer, origin: str, what: str) -> None:
    allowed = answer.headers.get("access-control-allow-origin")
    require(allowed in (origin, "*"), f"{what} allows the origin {allowed!r}")


CHECKS = (
    Check("H27", "The list of models and a single model have OpenAI's form.", _models),
    Check("H27", "An unknown model is a 404 with the code 'model_not_found'.", _unknown_model),
    Check("H28", "Malformed bodies are refused with an error object, and the server goes on.", _malformed),
    Check("H28", "A field of the wrong type is refused by name.", _wrong_types),
    Check("H29", "A prompt longer than the context is a 400 with 'context_length_exceeded'.", _too_long),
    Check("H30", "Requests without a valid key are answered with 401.", _keys),
    Check("H31", "A wrong method is a 405, an unknown address a 404, both with an error object.", _http),
    Check("H31", "The given web origin may call, others may not.", _cors),
)
