"""``[limits]``: limits per request, per caller and of memory, and timeouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen
from attrs.validators import ge, gt, optional

from enginehouse.settings.reload import LIVE, SERVER

MAIN_MEMORY = "cpu"
"""Device name of the machine's main memory."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


@frozen
class ByteCount:
    """An amount of memory or disk space."""

    num_bytes: int

    @classmethod
    def read(cls, value: Any) -> ByteCount:
        """Read an amount from the settings. Raises ValueError."""
        return cls(read_bytes(value))

    def __str__(self) -> str:
        """Readable form, also accepted by :meth:`read`."""
        return format_bytes(self.num_bytes)


@frozen
class MemoryBudget:
    """Memory limits for models, by device. A device that is not listed has no limit of its own."""

    by_device: Mapping[str, int]

    @classmethod
    def read(cls, value: Any) -> MemoryBudget:
        """Read one amount for main memory, or a table of amounts by device.

        Raises:
            ValueError: it is neither; the message lists the valid forms.
        """
        if isinstance(value, dict):
            return cls({device: read_bytes(amount) for device, amount in value.items()})
        return cls({MAIN_MEMORY: read_bytes(value)})


def read_bytes(value: Any) -> int:
    """Read a number of bytes, or an amount like ``"8GiB"`` or ``"500 MB"``. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    else:
        found = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None or found[2] not in _UNITS:
            raise ValueError("must be a number of bytes or an amount such as '8GiB' or '500MB'")
        num_bytes = int(float(found[1]) * _UNITS[found[2]])
    if num_bytes <= 0:
        raise ValueError("must be more than 0 bytes")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Format an amount for messages, such as ``7.5 GiB``."""
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"


@frozen(kw_only=True)
class Timeouts:
    """Time limits of one request in seconds; None means no limit.

    Attributes:
        queue_s: from its acceptance until it is scheduled into the batch.
        first_token_s: from its arrival to its first output.
        total_s: from its arrival to the end of its answer.
    """

    queue_s: float | None
    first_token_s: float | None
    total_s: float | None


@frozen(kw_only=True)
class LimitsSettings:
    """``[limits]``: limits per request, per caller and in total, and timeouts.

    Attributes:
        max_body_bytes: maximum size of a request body.
        max_header_bytes: maximum size of a request line and its headers.
        max_headers: maximum number of headers of a request.
        max_client_bytes: memory for the buffered data of all clients together: request heads, bodies until they are
            answered, their decoded media, pipelined requests, rows of pooling requests, and unread responses. Data
            beyond it is refused.
        max_client_bytes_per_key: part of this that one key may use, and also all connections together whose callers are
            not identified yet; unset is half. Without keys, one client may use all of it.
        max_message_bytes: maximum size of a chat message, as JSON.
        max_json_depth: maximum nesting depth of a request body.
        max_queue: maximum number of waiting requests per model; further ones are refused.
        max_queue_per_key: maximum number of these per key; unset is three quarters. Without keys, one client may use
            all of it.
        max_queue_tokens: maximum number of waiting prompt tokens per model; a request that exceeds it is refused,
            unless none waits.
        requests_per_minute: of the whole server; unset means no limit, here and below.
        tokens_per_minute: of prompts and answers together, of the whole server.
        max_concurrent: concurrent requests that generate, tokenize, render or ask for a route, of the whole server.
        key_requests_per_minute: of each key without a limit of its own.
        key_tokens_per_minute: of prompts and answers together, of each such key.
        key_max_concurrent: concurrent requests of this kind, of each such key.
        queue_timeout_s: maximum time in the queue; unset means no limit. A request that is expected to wait longer is
            refused at once.
        first_token_timeout_s: maximum time from a request's arrival to its first output.
        total_timeout_s: maximum time from a request's arrival to the end of its answer.
        max_choices: maximum value of ``n``.
        max_messages: maximum number of messages in a chat.
        max_inputs: maximum number of texts and pairs of texts (documents to rank) in a request to a pooling model.
        max_stop: maximum number of stop strings, and of regular expressions that stop.
        max_tokens: maximum answer length in tokens; unset is the rest of the context.
        render_timeout_s: time limit in seconds for rendering a chat template, and for decoding all images of a request.
        render_max_chars: maximum length of a rendered prompt, in characters.
        memory_budget: memory for loaded models, in bytes or like ``"8GiB"``; a table gives amounts by device (``{cpu =
            "8GiB", "cuda:0" = "70GiB"}``). Unset is the memory of this machine, without a limit on GPUs.
        load_wait_s: maximum time in seconds that a request waits for its model to be loaded; then it gets status 503.
        drain_s: time in seconds for running requests of a model to finish before it is unloaded.
        plugin_timeout_s: maximum time in seconds of a call into a plugin that is not part of Enginehouse while a
            request is served, and for which a coroutine of it may block.
    """

    max_body_bytes: int = field(default=16 * 1024 * 1024, validator=gt(0), metadata=LIVE)
    max_header_bytes: int = field(default=64 * 1024, validator=ge(1024), metadata=SERVER)
    max_headers: int = field(default=256, validator=ge(16), metadata=SERVER)
    max_client_bytes: int = field(default=256 * 1024 * 1024, validator=ge(1024 * 1024), metadata=LIVE)
    max_client_bytes_per_key: int | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    max_message_bytes: int = field(default=8 * 1024 * 1024, validator=gt(0), metadata=LIVE)
    max_json_depth: int = field(default=64, validator=gt(0), metadata=LIVE)
    max_queue: int = field(default=128, validator=ge(0), metadata=SERVER)
    max_queue_per_key: int | None = field(default=None, validator=optional(ge(0)), metadata=SERVER)
    max_queue_tokens: int = field(default=1_000_000, validator=gt(0), metadata=SERVER)
    requests_per_minute: int | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    tokens_per_minute: int | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    max_concurrent: int | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    key_requests_per_minute: int | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    key_tokens_per_minute: int | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    key_max_concurrent: int | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    queue_timeout_s: float | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    first_token_timeout_s: float | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    total_timeout_s: float | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    max_choices: int = field(default=16, validator=gt(0), metadata=LIVE)
    max_messages: int = field(default=4096, validator=gt(0), metadata=LIVE)
    max_inputs: int = field(default=2048, validator=gt(0), metadata=LIVE)
    max_stop: int = field(default=16, validator=gt(0), metadata=LIVE)
    max_tokens: int | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    render_timeout_s: float = field(default=5.0, validator=gt(0), metadata=SERVER)
    render_max_chars: int = field(default=8_000_000, validator=gt(0), metadata=SERVER)
    memory_budget: MemoryBudget | None = field(default=None, metadata=LIVE)
    load_wait_s: float = field(default=60.0, validator=ge(0), metadata=LIVE)
    drain_s: float = field(default=30.0, validator=ge(0), metadata=LIVE)
    plugin_timeout_s: float = field(default=10.0, validator=gt(0), metadata=LIVE)

    @property
    def max_prompts(self) -> int:
        """Maximum number of prompts in one body: as many as may wait."""
        return max(1, self.max_queue)
