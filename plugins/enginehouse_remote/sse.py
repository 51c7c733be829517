"""Decodes server-sent events from lines: the data after ``data:``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from enginehouse.contract.errors import GenerationFailed

__all__ = ["read_events"]

_MAX_LINE_BYTES = 8 * 1024 * 1024


async def read_events(body: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON objects of a stream, up to ``[DONE]``; comments and other fields are skipped.

    Args:
        body: bytes of the response, split anywhere.

    Raises:
        GenerationFailed: an event is not a JSON object.
    """
    kind = ""
    async for line in _lines(body):
        if line.startswith("event:"):
            kind = line.removeprefix("event:").strip()
        if not line.startswith(("data:", "error:")):  # old versions of llama-server name the field "error"
            continue
        name, _, text = line.partition(":")
        text = text.strip()
        if text == "[DONE]":
            return
        try:
            data = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise GenerationFailed(f"The remote server sent an event that is not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise GenerationFailed("The remote server sent an event that is not a JSON object.")
        if "error" in (name, kind) and "error" not in data:
            data = {"error": data}
        kind = ""
        yield data


async def _lines(body: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """Yield lines that end with LF or CRLF only: JSON may contain U+2028, at which Python splits lines."""
    parts: list[bytes] = []  # pieces of an unfinished line; joined once, as a line may arrive byte by byte
    num_bytes = 0
    async for piece in body:
        *ended, rest = piece.split(b"\n")
        for line in ended:
            yield b"".join([*parts, line]).removesuffix(b"\r").decode("utf-8", "replace")
            parts, num_bytes = [], 0
        parts.append(rest)
        num_bytes += len(rest)
        if num_bytes > _MAX_LINE_BYTES:
            raise GenerationFailed("The remote server sent a line that does not end.")
    if num_bytes:
        yield b"".join(parts).decode("utf-8", "replace")
