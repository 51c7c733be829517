"""``POST /v1/completions``: its body, its wire format, its handler."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from attrs import field, frozen
from attrs.validators import ge, le, optional
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from enginehouse.api.answer import Assembly, Choice
from enginehouse.api.body import read_body
from enginehouse.api.choice_parser import Piece
from enginehouse.api.decoding import BodyDecoder, GenerationBody
from enginehouse.api.encoding import LegacyLogprobs, encode_json, encode_line, fingerprint
from enginehouse.api.generation import GenerationResponse
from enginehouse.api.sse import event
from enginehouse.api.state import ApiState
from enginehouse.api.unsupported import refuse
from enginehouse.config import LimitsSettings
from enginehouse.errors import InvalidRequest
from enginehouse.parameters import INT64_MAX

__all__ = ["CompletionBody", "CompletionDialect", "completion_route", "read_prompts"]


@frozen(kw_only=True)
class CompletionBody(GenerationBody):
    """The request body.

    Attributes:
        prompt: a string, a list of strings, a list of token ids, or a list of such lists.
        logprobs: how many alternatives to report per token; 0 reports the drawn token only.
        best_of: accepted when it equals ``n``: then there is nothing to choose from.
    """

    prompt: Any
    logprobs: int | None = field(default=None, validator=optional([ge(0), le(20)]))
    best_of: int | None = None

    def check(self, limits: LimitsSettings) -> None:
        """Check combinations of fields."""
        super().check(limits)
        if self.best_of not in (None, self.n):
            raise refuse("best_of")

    def sampling(self) -> dict[str, Any]:
        """The sampling fields, log-probabilities included."""
        num_logprobs = {} if self.logprobs is None else {"num_logprobs": self.logprobs}
        return {**super().sampling(), **num_logprobs}


def read_prompts(prompt: Any, max_prompts: int) -> list[dict[str, Any]]:
    """The prompts, each as the keyword argument ``text`` or ``token_ids`` of a request.

    Raises:
        InvalidRequest: it is none of the four forms, or empty somewhere.
    """
    if isinstance(prompt, str):
        return [_text(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt: must be a string, a list of strings, or lists of token ids", "prompt")
    if not prompt:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    if _is_id(prompt[0]):
        return [_token_ids(prompt, "prompt")]
    if len(prompt) > max_prompts:
        raise InvalidRequest(f"prompt: at most {max_prompts} prompts are allowed, not {len(prompt)}", "prompt")
    read = _text if isinstance(prompt[0], str) else _token_ids
    return [read(item, f"prompt[{index}]") for index, item in enumerate(prompt)]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}: must be a string, as the prompts before it", path)
    if not value:
        raise InvalidRequest(f"{path}: must not be empty", path)
    return {"text": value}


def _token_ids(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{path}: must be a list of at least one token id", path)
    for index, token_id in enumerate(value):
        if not _is_id(token_id) or not 0 <= token_id <= INT64_MAX:
            where = f"{path}[{index}]"
            raise InvalidRequest(f"{where}: must be a token id, a whole number from 0 on", where)
    return {"token_ids": tuple(value)}


def completion_route(state: ApiState) -> HTTPRouteHandler:
    """The route."""
    settings = state.settings
    unsupported = settings.server.unsupported_parameters
    decoder = BodyDecoder(CompletionBody, state.registry.samplers, settings.limits, unsupported)

    @post("/v1/completions", status_code=200)
    async def create_completion(request: Request[Any, Any, Any]) -> ASGIApp:
        """Continue texts."""
        decoded = decoder.decode(await read_body(request.receive, settings.limits.max_body_bytes))
        prompts = read_prompts(decoded.body.prompt, max(1, settings.limits.max_queue))
        request_id = f"cmpl-{uuid.uuid4().hex}"

        def dialect(assembly: Assembly) -> CompletionDialect:
            return CompletionDialect(request_id, assembly, decoded.body)

        ids = [request_id, *(f"{request_id}-{index}" for index in range(1, len(prompts)))]
        requests = [decoded.request(name, **prompt) for name, prompt in zip(ids, prompts, strict=True)]
        return GenerationResponse(state=state, decoded=decoded, requests=requests, dialect=dialect)

    return create_completion


class CompletionDialect:
    """Writes ``text_completion`` objects, whole and as events."""

    def __init__(self, request_id: str, assembly: Assembly, body: CompletionBody) -> None:
        model = assembly.running[0].model
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": fingerprint(model.info),
        }
        self._hidden_token_ids = frozenset(model.info.special_tokens.values())
        num_choices = assembly.num_choices * assembly.num_prompts
        self._logprobs = [LegacyLogprobs(self._hidden_token_ids) for _ in range(num_choices)]
        self._start = b"data: " + encode_line(self._head)[:-1] + b',"choices":[{"index":'
        self._usage = b',"usage":null' if body.include_usage else b""
        self._end = b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def opening(self) -> bytes:
        """Nothing: these chunks have no roles."""
        return b""

    def event(self, piece: Piece) -> bytes:
        """A chunk with text, or with the reason why the choice ended."""
        start = self._start + str(piece.index).encode() + b',"text":' + encode_line(piece.text)
        if piece.finish_reason is None and piece.logprobs is None:
            return start + self._end
        logprobs = None if piece.logprobs is None else self._logprobs[piece.index].take(piece.logprobs)
        reason = encode_json(piece.finish_reason)
        end = b',"logprobs":' + encode_line(logprobs) + b',"finish_reason":' + reason + b"}]" + self._usage + b"}\n\n"
        return start + end

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices that carries the token counts."""
        return event(encode_line({**self._head, "choices": [], "usage": usage}))

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> bytes:
        """The whole answer."""
        written = [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": None if choice.logprobs is None else self._logprobs[choice.index].take(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return encode_json({**self._head, "choices": written, "usage": usage})
