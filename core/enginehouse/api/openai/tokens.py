"""``POST /tokenize``, ``/detokenize``, ``/apply-template`` and ``/chat/completions/input_tokens``: the model's input.

Bodies and responses combine those of llama-server and vLLM. Templates run in rendering processes, tokenization in the
model's worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from attrs import NOTHING, evolve, frozen

from enginehouse.api.generation.decoding import MAX_TOKEN_IDS, DecodedCall, RequestBody
from enginehouse.api.generation.server_access import text_prompt
from enginehouse.api.http.frames import encode_json
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openai.encoding import token_text
from enginehouse.api.openai.prompts import read_token_ids
from enginehouse.api.openapi.answers import reference
from enginehouse.contract.adapters import cache_key
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.fields import FIELDS
from enginehouse.contract.media import find_chunks
from enginehouse.contract.rows import row
from enginehouse.contract.shapes import ADAPTER_FIELDS, TOKEN_ID, MessageBody, read_adapters
from enginehouse.contract.surface import Reply, ReplyRoute, Route, new_id
from enginehouse.contract.types import GenerateRequest
from enginehouse.pipeline.prompting import Prompt
from enginehouse.serving import LoadedModel
from enginehouse.serving.background import run_in_thread
from enginehouse.settings.config import LimitsSettings

_C = TypeVar("_C", bound=ChatBody)

_MANY_TOKENS = 20_000  # written in about 10 ms

_SHAPES_PROMPT = frozenset(name for name, row in FIELDS.items() if row.prompt)
"""Fields of a chat request that the prompt depends on."""


@frozen(kw_only=True)
class ApplyTemplateBody(ChatBody):
    """The body of ``/apply-template``: a chat request, whose prompt is returned; other fields have no effect."""

    def check_prompt(self) -> None:
        """Check that there are messages."""
        if self.messages is None or self.prompt is not None:
            raise InvalidRequest("messages: is required; prompt is not allowed here", "messages")

    @staticmethod
    def find_ignored(data: Mapping[str, Any]) -> Iterator[str]:
        """Yield fields that do not affect the prompt, and unknown ones inside those that do."""
        yield from (name for name in data if name not in _SHAPES_PROMPT)
        yield from ChatBody.find_ignored({name: value for name, value in data.items() if name in _SHAPES_PROMPT})


@frozen(kw_only=True)
class TokenizeBody(ChatBody):
    """The body of ``/tokenize``: a text or a chat request."""

    content: str | None = row(
        "A text; as in llama-server, without the model's special prefix unless `add_special` is true."
    )
    prompt: str | None = row(
        "A text; as in vLLM and `/v1/completions`, with the special prefix unless `add_special` is false."
    )
    messages: tuple[MessageBody, ...] | None = row(
        "A chat, whose template writes the special prefix.", schema={"minItems": 1}, limit=("maxItems", "max_messages")
    )
    add_special: bool | None = row("Prepend the model's special prefix (for example BOS).")
    add_special_tokens: bool | None = row("Another name of `add_special`.")
    parse_special: bool | None = row("Treat control-token strings in a text as control tokens.")
    with_pieces: bool = row(
        "Return `tokens` as objects with `id` and `piece`, the token's text, or its bytes.", default=False
    )
    return_token_strs: bool = row("Also return the text of each token, as `token_strs`.", default=False)
    details: bool = row(
        "Also say how much of the prompt is cached for `cache_salt`, `prompt_cache_key` and the adapters, and in which "
        "parts of its text control-token strings are trusted to be control tokens.",
        default=False,
    )

    def check(self, limits: LimitsSettings) -> None:
        """Check combinations of fields."""
        super().check(limits)
        if None not in (self.add_special, self.add_special_tokens) and self.add_special != self.add_special_tokens:
            raise InvalidRequest("add_special_tokens: contradicts add_special; give one of them", "add_special_tokens")
        if self.messages is not None and self.parse_special is not None:
            raise InvalidRequest("parse_special: only for a text; the text of messages is plain", "parse_special")

    def check_prompt(self) -> None:
        """Check that there is exactly one input to tokenize."""
        given = [name for name in ("content", "prompt", "messages") if getattr(self, name) is not None]
        if not given:
            raise InvalidRequest("content: one of content, prompt and messages is required", "content")
        if len(given) > 1:
            raise InvalidRequest(f"{given[1]}: not allowed together with {given[0]}; give one of them", given[1])

    @staticmethod
    def find_ignored(data: Mapping[str, Any]) -> Iterator[str]:
        """Yield fields without effect: those of generation, and for a text also those of chats."""
        shaping = _SHAPES_PROMPT if "messages" in data else frozenset({"model"})
        own = _OF_TOKENIZE | (_OF_CACHE if data.get("details") else frozenset())
        yield from (name for name in data if name not in shaping | own)
        yield from ChatBody.find_ignored({name: value for name, value in data.items() if name in shaping})

    @property
    def prefixed(self) -> bool:
        """True if the model's special prefix is prepended."""
        asked = self.add_special if self.add_special is not None else self.add_special_tokens
        return self.prompt is not None if asked is None else asked


_OF_TOKENIZE = frozenset(TokenizeBody.__annotations__)
_OF_CACHE = frozenset({"cache_salt", "prompt_cache_key", *ADAPTER_FIELDS})


@frozen(kw_only=True)
class DetokenizeBody(RequestBody):
    """The body of ``/detokenize``."""

    model: str | None = row(FIELDS["model"].text)
    tokens: Any = row(
        "Token ids.", default=NOTHING, schema={"type": "array", "items": TOKEN_ID, "maxItems": MAX_TOKEN_IDS}
    )

    @staticmethod
    def find_ignored(data: Mapping[str, Any]) -> Iterator[str]:
        """Yield the fields of plugins: none of them has an effect here."""
        yield from (name for name in data if name not in ("model", "tokens"))


def token_routes(state: ApiState) -> list[Route]:
    """Return the routes, without a prefix."""
    tokens = _Tokens(state)
    return [
        ReplyRoute(
            path="/tokenize",
            name="tokenize",
            summary="Token ids of a text or a chat",
            body=TokenizeBody,
            handle=tokens.tokenize,
            request_schema=reference("TokenizeRequest"),
            response_schema=reference("Tokens"),
        ),
        ReplyRoute(
            path="/detokenize",
            name="detokenize",
            summary="The text of token ids",
            body=DetokenizeBody,
            handle=tokens.detokenize,
            request_schema=reference("DetokenizeRequest"),
            response_schema=reference("DetokenizedText"),
        ),
        ReplyRoute(
            path="/apply-template",
            name="apply_template",
            summary="The prompt that a chat makes",
            body=ApplyTemplateBody,
            handle=tokens.apply_template,
            request_schema=reference("ApplyTemplateRequest"),
            response_schema=reference("RenderedPrompt"),
        ),
        ReplyRoute(
            path="/chat/completions/input_tokens",
            name="count_chat_tokens",
            summary="The number of prompt tokens of a chat",
            body=ApplyTemplateBody,
            handle=tokens.count,
            request_schema=reference("ApplyTemplateRequest"),
            response_schema=reference("InputTokens"),
        ),
    ]


@frozen(eq=False)
class _Tokens:
    """Handlers of the routes."""

    state: ApiState

    async def tokenize(self, call: DecodedCall[TokenizeBody]) -> Reply:
        """Return the token ids of a text or a chat."""
        body, state, caller = call.body, self.state, call.caller
        async with call.server.use(body.model) as model:
            prompt = await _tokenized_prompt(call, model)
            token_ids = await prompt.tokenize(state.pipeline.recovery, caller.name)
            pieces: Sequence[bytes] = ()
            if body.with_pieces or body.return_token_strs:
                of_text = [max(0, token_id) for token_id in token_ids]
                found = await state.pipeline.recovery.pieces(model, of_text, caller.name)
                pieces = [piece if token_id >= 0 else b"" for token_id, piece in zip(token_ids, found, strict=True)]
            details = await _details(state, call, prompt, token_ids) if body.details else {}
        written = await run_in_thread(
            len(token_ids) > _MANY_TOKENS,
            lambda: encode_json({**_tokenized(body, token_ids, pieces, model.info.max_context), **details}),
        )
        call.unsupported.extend(prompt.unsupported)
        return Reply(written)

    async def detokenize(self, call: DecodedCall[DetokenizeBody]) -> Reply:
        """Return the text of token ids, with control tokens by name."""
        token_ids = await run_in_thread(
            call.is_large, lambda: read_token_ids(call.body.tokens, "tokens", may_be_empty=True)
        )
        text = await call.server.detokenize(token_ids, call.body.model)
        return Reply({"content": text, "prompt": text})

    async def apply_template(self, call: DecodedCall[ApplyTemplateBody]) -> Reply:
        """Return the prompt that a chat request produces."""
        async with call.server.use(call.body.model) as model:
            prompt = await call.server.prompt(await _chat(call), model)
        call.unsupported.extend(prompt.unsupported)
        return Reply({"prompt": "".join(segment.text for segment in prompt.segments)})

    async def count(self, call: DecodedCall[ApplyTemplateBody]) -> Reply:
        """Return the number of prompt tokens of a chat request."""
        async with call.server.use(call.body.model) as model:
            prompt = await call.server.prompt(await _chat(call), model)
            token_ids = await prompt.tokenize(self.state.pipeline.recovery, call.caller.name)
        call.unsupported.extend(prompt.unsupported)
        return Reply({"input_tokens": len(token_ids)})


async def _tokenized_prompt(decoded: DecodedCall[TokenizeBody], model: LoadedModel) -> Prompt:
    """Return the prompt for ``model`` to tokenize."""
    body = decoded.body
    if body.messages is not None:
        prompt = await decoded.server.prompt(await _chat(decoded), model)
        return evolve(prompt, token_ids=None, add_special=body.prefixed)
    text = (body.content if body.content is not None else body.prompt) or ""
    return text_prompt(model, text, add_special=body.prefixed, parse_special=body.parse_special is not False)


async def _details(
    state: ApiState, decoded: DecodedCall[TokenizeBody], prompt: Prompt, token_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the member ``details``. Only the caller's own namespace is searched."""
    caller, body = decoded.caller, decoded.body
    param, asked = read_adapters({name: getattr(body, name) for name in ADAPTER_FIELDS})
    request = GenerateRequest(request_id="", model=body.model, adapters=asked, adapters_param=param)
    namespace = cache_key(caller.namespace(body.namespace), state.pipeline.adapters(request, prompt.model))
    cached = await state.pipeline.recovery.cached_tokens(prompt.model, token_ids, namespace, caller.name)
    segments = [{"text": segment.text, "trusted": segment.trusted} for segment in prompt.segments]
    return {"details": {"cached_tokens": cached, "segments": segments}}


async def _chat(decoded: DecodedCall[_C]) -> GenerateRequest:
    """Return the body's chat as a request."""
    return await run_in_thread(
        decoded.is_large, lambda: decoded.identify(decoded.body.request(new_id("prompt-"), **decoded.body.chat()))
    )


def _tokenized(
    body: TokenizeBody, token_ids: Sequence[int], pieces: Sequence[bytes], max_context: int
) -> dict[str, Any]:
    """Return the response of ``/tokenize``."""
    answer: dict[str, Any] = {
        "tokens": _with_pieces(token_ids, pieces) if body.with_pieces else token_ids,
        "count": len(token_ids),
        "max_model_len": max_context,
    }
    if token_ids and min(token_ids) < 0:
        chunks = find_chunks(token_ids)
        answer["chunks"] = [{"type": kind, "start": start, "count": count} for kind, start, count in chunks]
    if body.return_token_strs:
        answer["token_strs"] = [token_text(piece) for piece in pieces]
    return answer


def _with_pieces(token_ids: Sequence[int], pieces: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return ids with their text, or with their bytes if these are not whole characters."""
    return [{"id": token_id, "piece": _piece(piece)} for token_id, piece in zip(token_ids, pieces, strict=True)]


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
