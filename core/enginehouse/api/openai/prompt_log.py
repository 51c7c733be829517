"""The log of prompts: a logger of its own, written to only when both the request and the settings say so.

Nothing else of the server logs what clients write. ``enginehouse.prompts`` can be given a handler and a place of
its own, or be silenced, with the means of the standard library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from enginehouse.api.openai.encoding import encode_line
from enginehouse.contract.types import GenerateRequest

__all__ = ["log_prompts"]

_log = logging.getLogger("enginehouse.prompts")


def log_prompts(requests: Iterable[GenerateRequest]) -> None:
    """Write the prompt of each request: its id and, as JSON, its messages, its text or its token ids."""
    for request in requests:
        prompt = next(part for part in (request.messages, request.text, request.token_ids) if part is not None)
        line = f"id={request.request_id} prompt={encode_line(prompt).decode()}"
        if request.suffix is not None:
            line += f" suffix={encode_line(request.suffix).decode()}"
        _log.info("%s", line)
