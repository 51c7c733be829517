"""The surface: OpenAI's Responses API, with and without ``/v1``."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from attrs import evolve

from enginehouse.contract.calls import Call
from enginehouse.contract.errors import EnginehouseError, InvalidRequest, UnsupportedParameter, quoted
from enginehouse.contract.hookspecs import API_VERSION
from enginehouse.contract.surface import (
    SSE,
    Answer,
    Assembler,
    Chunk,
    ErrorAnswer,
    GenerationRoute,
    Reply,
    ReplyRoute,
    Route,
    new_id,
)
from enginehouse.contract.types import GenerateRequest
from enginehouse_responses.body import InputTokensBody, PromptBody, ResponsesBody
from enginehouse_responses.conversation import Conversation, generate_request, prompt_request
from enginehouse_responses.items import items_of, reference_of
from enginehouse_responses.kept import KeptResponses, KeptWriter
from enginehouse_responses.options import ResponsesOptions
from enginehouse_responses.resource import Resource
from enginehouse_responses.sealed import Seal
from enginehouse_responses.store import ResponseStore, StoredResponse
from enginehouse_responses.truncation import fitting
from enginehouse_responses.unread import find_unread
from enginehouse_responses.writer import ResponseWriter

__all__ = ["ResponsesSurface"]

_FRAME = evolve(SSE, event="type", last_failed=SSE.last)
_MAX_LISTED = 100


class ResponsesSurface:
    """Creates responses, and serves those that are stored.

    Args:
        options: without a store, the addresses of stored responses answer that there is none.
    """

    name = "responses"
    api_version = API_VERSION
    request_id_header = None
    takes_any_type = False

    def __init__(self, options: ResponsesOptions) -> None:
        self._dialect = options.dialect
        self._seal = Seal(secrets.token_bytes(32))
        self._kept: KeptResponses | None = None
        if options.is_on:
            self._kept = KeptResponses(ResponseStore(options), options.max_events_bytes)
        self._conversations: WeakKeyDictionary[ResponsesBody, Conversation] = WeakKeyDictionary()
        self.routes: Sequence[Route] = [
            route for prefix in ("/v1", "") for route in self._routes(f"{prefix}/responses")
        ]

    @property
    def store(self) -> ResponseStore | None:
        """The stored responses; None if none are."""
        return None if self._kept is None else self._kept.store

    def error(self, error: ErrorAnswer) -> Reply:
        """Return OpenAI's error object. What is wrong with a chat as a whole is wrong with ``input``."""
        param = "input" if error.param == "messages" else error.param
        body = {"message": error.message, "type": error.kind, "param": param, "code": error.code}
        return Reply({"error": body})

    def _routes(self, path: str) -> list[Route]:
        one = f"{path}/{{response_id:str}}"
        return [
            GenerationRoute(
                path=path,
                name="create_response",
                summary="Create a response",
                body=ResponsesBody,
                requests=self._requests,
                assemble=self._assemble,
                detached=self._is_detached,
                frame=_FRAME,
            ),
            ReplyRoute(
                path=f"{path}/input_tokens",
                name="count_response_input_tokens",
                summary="Count the input tokens of a response",
                body=InputTokensBody,
                handle=self._count,
            ),
            ReplyRoute(
                method="GET",
                path=one,
                name="get_response",
                summary="Retrieve a stored response, or its stream",
                limits=None,
                handle=self._get,
            ),
            ReplyRoute(
                method="DELETE",
                path=one,
                name="delete_response",
                summary="Delete a stored response",
                limits=None,
                handle=self._delete,
            ),
            ReplyRoute(
                path=f"{one}/cancel",
                name="cancel_response",
                summary="Cancel a response in the background",
                limits=None,
                handle=self._cancel,
            ),
            ReplyRoute(
                method="GET",
                path=f"{one}/input_items",
                name="list_response_input_items",
                summary="List the items that were sent for a response",
                limits=None,
                handle=self._input_items,
            ),
        ]

    # -- creating ----------------------------------------------------------------------------------

    async def _requests(self, call: Call) -> list[GenerateRequest]:
        body: ResponsesBody = call.body
        body.check()
        if body.background and not self._is_stored(call):
            raise InvalidRequest("background: only allowed for responses that are stored", "background")
        if body.store and self._kept is None:
            call.ignore("store")
        if body.return_progress and not body.stream:
            call.ignore("return_progress")
        conversation = await self._conversation(call, body)
        prompt = prompt_request(body, conversation, self._seal)
        if body.truncation == "auto":
            prompt = await self._truncated(call, prompt, conversation)
        for path in (*conversation.toolbox.left_out, *find_unread(body)):
            call.ignore(path)
        request = generate_request(body, prompt)
        self._conversations[body] = conversation
        return [request]

    async def _assemble(self, call: Call, answer: Answer) -> Assembler:
        body: ResponsesBody = call.body
        conversation, is_stored = self._conversations.pop(body), self._is_stored(call)
        resource = Resource.of(
            answer.id,
            answer.model,
            body,
            conversation.toolbox,
            is_stored=is_stored,
            defaults=call.server.defaults(body.model),
        )
        writer = ResponseWriter(
            resource,
            conversation.toolbox,
            seal=self._seal.pack if body.wants_seal else None,
            has_logprobs=body.num_logprobs is not None,
            keeps_prompt=body.cache_prompt,
            dialect=self._dialect,
            usage=answer.usage if body.timings_per_token else None,
        )
        if not is_stored:
            return writer
        assert self._kept is not None
        items = [_with_id(item) for item in conversation.given]
        if body.background:
            resource.status = "queued"
        return KeptWriter(self._kept, writer, namespace=call.caller.key_namespace, items=items)

    def _is_stored(self, call: Call) -> bool:
        return self._kept is not None and call.body.store is not False

    def _is_detached(self, call: Call) -> bool:
        """True if the response goes on without its client, who can take it up again."""
        return self._is_stored(call) and bool(call.body.stream or call.body.background)

    async def _conversation(self, call: Call, body: PromptBody) -> Conversation:
        """Return the items and tools of a request, with those of the responses that it continues."""
        previous = body.previous_response_id
        before: list[Mapping[str, Any]] = []
        if previous is not None:
            if self._kept is None:
                message = "this server stores no responses (plugins.responses.store); send the whole input"
                raise UnsupportedParameter(f"previous_response_id: {message}", "previous_response_id")
            namespace = call.caller.key_namespace
            chain = await self._kept.store.chain(namespace, previous)
            if chain is None:
                message = f"no stored response has the id {quoted(previous)}, or one that it continues is gone"
                raise InvalidRequest(f"previous_response_id: {message}", "previous_response_id")
            if self._kept.live(namespace, previous) is not None:
                message = f"the response {previous!r} is not complete yet"
                raise InvalidRequest(f"previous_response_id: {message}", "previous_response_id")
            before = [item for one in chain for item in (*one.input, *one.output)]
        references = [one for item in items_of(body.input or []) if (one := reference_of(item)) is not None]
        if not references or self._kept is None:
            return Conversation.of(body, before)
        return Conversation.of(body, before, await self._kept.store.items(call.caller.key_namespace, references))

    async def _truncated(self, call: Call, prompt: GenerateRequest, conversation: Conversation) -> GenerateRequest:
        """Return a request without its oldest items, if all do not fit the context."""
        body: ResponsesBody = call.body
        best = prompt

        async def fits(items: Sequence[Mapping[str, Any]]) -> bool:
            nonlocal best
            best = prompt_request(body, conversation, self._seal, items)
            num_tokens = await call.server.count_tokens(best)
            info = call.server.model(body.model).info
            context = info.max_context if info is not None else num_tokens + 1
            return num_tokens + min(body.max_output_tokens or 1, context // 2) <= context

        kept = await fitting(conversation.items, fits)
        return prompt_request(body, conversation, self._seal, kept)

    async def _count(self, call: Call) -> Reply:
        body: InputTokensBody = call.body
        conversation = await self._conversation(call, body)
        num_tokens = await call.server.count_tokens(prompt_request(body, conversation, self._seal))
        for path in (*conversation.toolbox.left_out, *find_unread(body)):
            call.ignore(path)
        return Reply({"object": "response.input_tokens", "input_tokens": num_tokens})

    # -- stored responses --------------------------------------------------------------------------

    async def _find(self, call: Call) -> StoredResponse | None:
        """Return the response of the path, as it is now; None if the caller has none with this id."""
        if self._kept is None:
            return None
        namespace, response_id = call.caller.key_namespace, call.path["response_id"]
        found = await self._kept.store.get(namespace, response_id)
        live = self._kept.live(namespace, response_id)
        return found if found is None or live is None else StoredResponse(live.to_plain(), found.input)

    async def _get(self, call: Call) -> Reply:
        found = await self._find(call)
        if found is None:
            return self._missing(call)
        is_streamed = _flag(call.query, "stream")
        _ignore_others(call, "stream", *(["starting_after"] if is_streamed else []))
        if not is_streamed:
            return Reply(found.response)
        after = _number(call.query, "starting_after", -1, 0)
        assert self._kept is not None
        log = self._kept.logs.find(call.path["response_id"])
        if log is None:
            message = "the events of this response are not kept (any more); retrieve it without stream"
            raise InvalidRequest(f"stream: {message}", "stream")
        return Reply(stream=log.read(after), frame=_FRAME)

    async def _delete(self, call: Call) -> Reply:
        if self._kept is None or await self._find(call) is None:
            return self._missing(call)
        response_id = call.path["response_id"]
        await self._end(call)
        await self._kept.store.delete(call.caller.key_namespace, response_id)
        self._kept.logs.drop(response_id)
        return Reply({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, call: Call) -> Reply:
        found = await self._find(call)
        if found is None:
            return self._missing(call)
        if not found.response["background"]:
            raise InvalidRequest("background: only responses in the background can be cancelled", "background")
        await self._end(call)
        again = await self._find(call)
        return self._missing(call) if again is None else Reply(again.response)

    async def _end(self, call: Call) -> None:
        """End the generation of the response of the path, if it goes on."""
        assert self._kept is not None
        live = self._kept.live(call.caller.key_namespace, call.path["response_id"])
        if live is not None:
            live.cancel()
            # Without a key, a caller may not cancel by id; then it ends at its next piece.
            with contextlib.suppress(EnginehouseError):
                call.server.cancel(live.id)
            await live.wait()

    async def _input_items(self, call: Call) -> Reply:
        found = await self._find(call)
        if found is None:
            return self._missing(call)
        limit = _number(call.query, "limit", 20, 1)
        if limit > _MAX_LISTED:
            raise InvalidRequest(f"limit: must be at most {_MAX_LISTED}, not {limit}", "limit")
        order = call.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order: must be 'asc' or 'desc', not {quoted(order)}", "order")
        _ignore_others(call, "limit", "order", "after")
        items = found.input if order == "asc" else found.input[::-1]
        after = call.query.get("after")
        if after is not None:
            at = next((index for index, item in enumerate(items) if item["id"] == after), None)
            if at is None:
                raise InvalidRequest(f"after: no item has the id {quoted(after)}", "after")
            items = items[at + 1 :]
        shown = items[:limit]
        ends = (
            {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
        )
        return Reply({"object": "list", "data": shown, **ends, "has_more": len(items) > limit})

    def _missing(self, call: Call) -> Reply:
        response_id = call.path["response_id"][:100]
        message = f"The response {response_id!r} does not exist"
        message += "." if self._kept is not None else ": this server stores no responses (plugins.responses.store)."
        body = {"message": message, "type": "invalid_request_error", "param": "response_id", "code": "not_found"}
        return Reply({"error": body}, status=404)


def _with_id(item: dict[str, Any]) -> Chunk:
    """Return an item as it is stored and listed."""
    kind = item.get("type", "message")
    content = item.get("content")
    listed = {"id": new_id("msg_" if kind == "message" else "item_"), **item, "type": kind}
    if kind == "message":
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        listed.setdefault("status", "completed")
        if isinstance(content, str):
            listed["content"] = [
                {"type": part, "text": content, **({"annotations": []} if part == "output_text" else {})}
            ]
    return listed


def _flag(query: Mapping[str, str], name: str) -> bool:
    """Return a switch of the query. Raises InvalidRequest."""
    text = query.get(name, "false")
    if text not in ("true", "1", "false", "0"):
        raise InvalidRequest(f"{name}: must be true or false, not {quoted(text)}", name)
    return text in ("true", "1")


def _ignore_others(call: Call, *names: str) -> None:
    """List the parameters of the query besides ``names`` as ignored, such as ``include``, which changes nothing."""
    for name in call.query:
        if name not in names:
            call.ignore(name)


def _number(query: Mapping[str, str], name: str, default: int, least: int) -> int:
    """Return an integer of the query. Raises InvalidRequest."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < least:
        raise InvalidRequest(f"{name}: must be an integer from {least} on, not {quoted(text)}", name)
    return int(text)
