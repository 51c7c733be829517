"""Remote engine: sends requests to servers, chats as messages; returns the answers as events."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from enginehouse.contract.engine import EngineStream, ReplicaStats
from enginehouse.contract.errors import EngineDead, GenerationFailed, Overloaded, UnsupportedParameter
from enginehouse.contract.types import EngineRequest, EngineStats, PoolingRequest, PoolingResult, Segment
from enginehouse_backendkit.prefix_affinity import prefix_blocks
from enginehouse_remote import tei
from enginehouse_remote.bodies import body_of, routing_parts
from enginehouse_remote.failures import ServerFailed, of_exception, of_response
from enginehouse_remote.generation import RemoteGeneration
from enginehouse_remote.options import RemoteOptions
from enginehouse_remote.pooling import RowAnswer, parts_of, result_of
from enginehouse_remote.probing import Found
from enginehouse_remote.reading import AnswerLimits, read_beginning, read_body
from enginehouse_remote.servers import Server, Servers
from enginehouse_remote.stream import AnswerStream

__all__ = ["RemoteEngine"]

_A = TypeVar("_A")

_ANSWER_BYTES = 65536
_TOKEN_ID_BYTES = 16  # of a token's number in JSON; a text has at most as many tokens as bytes
_TOKEN_TEXT_BYTES = 2048


class _Tokens(msgspec.Struct):
    """Response of ``/tokenize``."""

    tokens: list[int]


class _Text(msgspec.Struct):
    """Response of ``/detokenize``."""

    content: str


class RemoteEngine:
    """Implements :class:`enginehouse.contract.engine.Engine` over the servers of one model."""

    def __init__(self, found: Found, urls: Sequence[str], headers: Mapping[str, str], options: RemoteOptions) -> None:
        self.info = found.info
        self.servers = Servers(urls, headers, options)
        self._found, self._options = found, options
        self._running: set[RemoteGeneration] = set()
        self._num_pooling = 0

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Send the request to a server; returns once a server has accepted it."""
        if request.num_prompt_logprobs is not None:
            message = "prompt_logprobs: not supported for remote models"
            raise UnsupportedParameter(message, "prompt_logprobs")
        self._check_number()
        self.servers.start()
        use = request.chat.tool_use if request.chat is not None else None
        requires_call = use is not None and use.choice == "required"
        new_stream = functools.partial(
            AnswerStream, request.num_choices, request.sampling.num_logprobs, requires_call=requires_call
        )
        body = body_of(request, self._found.model, self._found.kind)
        blocks: tuple[int, ...] = ()
        if self.servers.uses_prefixes:
            blocks = prefix_blocks(routing_parts(body.data), request.cache_namespace)
        limits = AnswerLimits.of(request, self.info.max_context)
        generation = RemoteGeneration(
            self.servers,
            self._options,
            body,
            blocks=blocks,
            limits=limits,
            new_stream=new_stream,
            on_end=self._running.discard,
        )
        self._running.add(generation)
        try:
            await generation.accepted
        except BaseException:
            generation.cancel()
            raise
        return generation

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        """Ask a server for the rows of a request; see :class:`enginehouse.contract.engine.PoolingEngine`."""
        self._check_number()
        kind, info = self._found.name_of_kind, self.info.pooling
        if kind == "tei":
            parts = tei.parts_of(request, self._found.max_inputs)
        else:
            parts = parts_of(request, self._found.model, kind, info)
        self._num_pooling += 1
        try:
            answers: list[RowAnswer] = []
            for part in parts:
                answer, headers = await self._send(part.path, part.body, part.answer, part.max_bytes)
                if kind == "tei":
                    answer = tei.answer_of(request, answer, headers.get(tei.TOKENS_HEADER, ""), info)
                answers.append(answer)
            return result_of(request, parts, answers, kind, info)
        except (ValueError, OverflowError) as error:
            raise GenerationFailed(f"The servers of this model gave an invalid answer: {error}") from error
        finally:
            self._num_pooling -= 1

    async def tokenize(self, segments: Sequence[Segment], add_special: bool) -> list[int]:
        """Tokenize on a server; only Enginehouse servers have this endpoint with a known meaning."""
        if len({segment.trusted for segment in segments}) > 1:
            raise UnsupportedParameter("prompt: a remote model tokenizes texts only in one piece", "prompt")
        text = "".join(segment.text for segment in segments)
        trusted = bool(segments) and segments[0].trusted
        data = {"content": text, "add_special": add_special, "parse_special": trusted}
        max_bytes = _ANSWER_BYTES + _TOKEN_ID_BYTES * len(text.encode())
        return (await self._ask("/tokenize", data, "prompt", _Tokens, max_bytes)).tokens

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Detokenize on a server."""
        max_bytes = _ANSWER_BYTES + _TOKEN_TEXT_BYTES * len(token_ids)
        return (await self._ask("/detokenize", {"tokens": list(token_ids)}, "tokens", _Text, max_bytes)).content

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Raise UnsupportedParameter: servers do not report the bytes of token ids."""
        raise UnsupportedParameter("with_pieces: remote servers do not report the pieces of tokens", "with_pieces")

    async def stats(self) -> EngineStats:
        """Number of requests running on the servers."""
        num_running = len(self._running) + self._num_pooling
        return EngineStats(num_running=num_running, max_sequences=self._options.max_requests)

    @property
    def replicas(self) -> Sequence[ReplicaStats]:
        """Statistics of the servers, if there are several."""
        return self.servers.stats if len(self.servers.all) > 1 else ()

    async def close(self) -> None:
        """Cancel all requests and close the connections."""
        for generation in list(self._running):
            generation.end(EngineDead("the engine was closed"))
        await self.servers.close()

    def _check_number(self) -> None:
        """Raise Overloaded if the servers have as many requests as the settings allow."""
        num_running = len(self._running) + self._num_pooling
        if num_running >= self._options.max_requests:
            raise Overloaded(f"{num_running} requests run at the servers of this model; try again later.")

    async def _ask(self, path: str, data: dict[str, Any], param: str, kind: type[_A], max_bytes: int) -> _A:
        """Send a question that only Enginehouse servers answer."""
        if not self._found.tokenizes:
            raise UnsupportedParameter(f"{param}: the remote server has no {path}", param)
        answer, _ = await self._send(path, {"model": self._found.model, **data}, kind, max_bytes)
        return answer

    async def _send(
        self, path: str, content: Mapping[str, Any], kind: type[_A], max_bytes: int
    ) -> tuple[_A, httpx.Headers]:
        """Send a request; returns the whole response of the first server that answers, and its headers."""
        self.servers.start()
        tried: set[Server] = set()
        last: ServerFailed | None = None
        while (chosen := self.servers.choose(tried)) is not None:
            server, _ = chosen
            tried.add(server)
            try:
                with server.used():
                    return await self._ask_server(server, path, content, kind, max_bytes)
            except ServerFailed as failed:
                if failed.is_down:
                    self.servers.mark_down(server, failed.final.message)
                last = failed
        assert last is not None
        raise last.final from last

    async def _ask_server(
        self, server: Server, path: str, content: Mapping[str, Any], kind: type[_A], max_bytes: int
    ) -> tuple[_A, httpx.Headers]:
        base = tei.root_of(server.url) if self._found.name_of_kind == "tei" else server.url
        limit_s = self._options.idle_timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self.servers.client.stream("POST", base + path, json=content, timeout=limit_s) as response,
            ):
                if response.status_code != 200:
                    raise of_response(response.status_code, await read_beginning(response), server.url)
                body = await read_body(response, max_bytes)
        except TimeoutError:
            message = f"The server {server.url} did not answer {path} within {limit_s:g} s."
            raise ServerFailed(EngineDead(message), is_down=False) from None
        except httpx.HTTPError as error:
            raise of_exception(error, server.url) from error
        try:
            return msgspec.json.decode(body, type=kind), response.headers
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise GenerationFailed(f"The server {server.url} gave an invalid answer to {path}: {error}") from error
