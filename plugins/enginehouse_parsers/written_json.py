"""JSON of tools as prompts and schemas hold it: written as `json.dumps` does, but a dozen times as fast.

Definitions may have several megabytes, and no other thread runs while either of the two writes: neither does the
server's event loop.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

__all__ = ["written_json"]


def written_json(value: Any) -> str:
    """The value on one line, with a space behind each comma and colon."""
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()
    except UnicodeEncodeError:  # half a character, which only the other one writes
        return json.dumps(value)
