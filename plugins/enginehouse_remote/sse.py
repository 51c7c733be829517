"""Server-sent events out of lines: what follows ``data:``, decoded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from enginehouse.errors import GenerationFailed

__all__ = ["read_events"]


async def read_events(lines: AsyncIterator[str]) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of a stream, up to ``[DONE]``; comments and other fields are skipped.

    Raises:
        GenerationFailed: an event is no JSON object.
    """
    kind = ""
    async for line in lines:
        if line.startswith("event:"):
            kind = line.removeprefix("event:").strip()
        if not line.startswith(("data:", "error:")):  # llama-server of old names the field "error"
            continue
        name, _, text = line.partition(":")
        text = text.strip()
        if text == "[DONE]":
            return
        try:
            data = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise GenerationFailed(f"The server behind this model sent an event that is no JSON: {error}") from error
        if not isinstance(data, dict):
            raise GenerationFailed("The server behind this model sent an event that is no JSON object.")
        if "error" in (name, kind) and "error" not in data:
            data = {"error": data}
        kind = ""
        yield data
