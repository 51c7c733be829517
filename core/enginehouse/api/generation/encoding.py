"""JSON of responses, and the prompt log, if enabled."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from enginehouse.contract.types import GenerateRequest

__all__ = ["encode_json", "encode_line", "log_prompts"]

encode_json = msgspec.json.Encoder().encode
"""Encodes plain data to JSON bytes."""

_LINE_BREAKS = (
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
    ("\x85".encode(), b"\\u0085"),
)
"""Characters that JSON allows unescaped, but at which careless stream readers split lines."""


def encode_line(value: Any) -> bytes:
    """Encode JSON that stays on one line for every client."""
    encoded = encode_json(value)
    if not encoded.isascii():
        for raw, escaped in _LINE_BREAKS:
            if raw in encoded:
                encoded = encoded.replace(raw, escaped)
    return encoded


_log = logging.getLogger("enginehouse.prompts")


def log_prompts(requests: Iterable[GenerateRequest]) -> None:
    """Log the prompt of each request that allows it: its id and, as JSON, its messages, text or token ids."""
    for request in requests:
        if not request.log_prompt:
            continue
        prompt = next(part for part in (request.messages, request.text, request.token_ids) if part is not None)
        line = f"id={request.request_id} prompt={encode_line(prompt).decode()}"
        if request.suffix is not None:
            line += f" suffix={encode_line(request.suffix).decode()}"
        _log.info("%s", line)
