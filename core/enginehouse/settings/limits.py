"""``[limits]``: bounds of one request, of callers and of memory, and longest times."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen
from attrs.validators import ge, gt, optional

__all__ = ["MAIN_MEMORY", "ByteCount", "LimitsSettings", "MemoryBudget", "format_bytes", "read_bytes"]

MAIN_MEMORY = "cpu"
"""Name of the machine's main memory among the devices."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


@frozen
class ByteCount:
    """One amount, of memory or of a disk."""

    num_bytes: int

    @classmethod
    def read(cls, value: Any) -> ByteCount:
        """As settings write it; raises ValueError."""
        return cls(read_bytes(value))

    def __str__(self) -> str:
        """For people, and for :meth:`read`."""
        return format_bytes(self.num_bytes)


@frozen
class MemoryBudget:
    """How much memory models may hold, by device. A device that is not named has no bound of its own."""

    by_device: Mapping[str, int]

    @classmethod
    def read(cls, value: Any) -> MemoryBudget:
        """One amount for main memory, or a table of them by device.

        Raises:
            ValueError: it is neither; says which forms there are.
        """
        if isinstance(value, dict):
            return cls({device: read_bytes(amount) for device, amount in value.items()})
        return cls({MAIN_MEMORY: read_bytes(value)})


def read_bytes(value: Any) -> int:
    """A number of bytes, written as one or like ``"8GiB"`` or ``"500 MB"``; raises ValueError."""
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
    """For messages, such as ``7.5 GiB``."""
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"


@frozen(kw_only=True)
class LimitsSettings:
    """``[limits]``: what one request may ask for, what one caller and all together may, and how long things may take.

    Attributes:
        max_body_bytes: longest request body.
        max_header_bytes: longest head of a request: its first line and headers.
        max_headers: most headers of a request.
        max_client_bytes: memory for the data of all clients together: heads, bodies until they are answered, pipelined
            requests, and unread responses. Data beyond it is refused.
        max_client_bytes_per_key: the share that one key may hold, and all connections together whose callers are not
            identified yet; unset is half. Without keys one caller may hold all.
        max_message_bytes: longest message of a chat, as JSON.
        max_json_depth: deepest nesting of a request body.
        max_queue: requests that wait per model; one more is refused.
        max_queue_per_key: of these, how many one key may have; unset is three quarters. Without keys all may be one's.
        max_queue_tokens: prompt tokens that wait per model; a request that brings more is refused, unless none waits.
        requests_per_minute: of the whole server; unset is no limit, here and below.
        tokens_per_minute: of prompts and answers together, of the whole server.
        max_concurrent: requests at once that generate, tokenize, render or ask for a route, of the whole server.
        key_requests_per_minute: of each key that names no limit of its own.
        key_tokens_per_minute: of prompts and answers together, of each such key.
        key_max_concurrent: such requests at once, of each such key.
        queue_timeout_s: longest wait for a place in the batch; unset is no limit. A request that must be expected to
            wait longer is refused at once.
        first_token_timeout_s: longest time from a request's arrival to the first sign of its answer.
        total_timeout_s: longest time from a request's arrival to the end of its answer.
        max_choices: largest ``n``.
        max_messages: most messages in one chat.
        max_stop: most stop strings.
        max_tokens: longest answer in tokens; unset is the rest of the context.
        render_timeout_s: seconds that a chat template may take.
        render_max_chars: longest prompt that a chat template may make, in characters.
        memory_budget: memory that loaded models may hold, in bytes or like ``"8GiB"``; a table gives amounts by device
            (``{cpu = "8GiB", "cuda:0" = "70GiB"}``). Unset is what this machine has, without a bound on GPUs.
        load_wait_s: seconds that a request waits for a model that is loaded for it; then it is answered 503.
        drain_s: seconds that running requests of a model get to finish before it is unloaded.
    """

    max_body_bytes: int = field(default=16 * 1024 * 1024, validator=gt(0))
    max_header_bytes: int = field(default=64 * 1024, validator=ge(1024))
    max_headers: int = field(default=256, validator=ge(16))
    max_client_bytes: int = field(default=256 * 1024 * 1024, validator=ge(1024 * 1024))
    max_client_bytes_per_key: int | None = field(default=None, validator=optional(gt(0)))
    max_message_bytes: int = field(default=8 * 1024 * 1024, validator=gt(0))
    max_json_depth: int = field(default=64, validator=gt(0))
    max_queue: int = field(default=128, validator=ge(0))
    max_queue_per_key: int | None = field(default=None, validator=optional(ge(0)))
    max_queue_tokens: int = field(default=1_000_000, validator=gt(0))
    requests_per_minute: int | None = field(default=None, validator=optional(gt(0)))
    tokens_per_minute: int | None = field(default=None, validator=optional(gt(0)))
    max_concurrent: int | None = field(default=None, validator=optional(gt(0)))
    key_requests_per_minute: int | None = field(default=None, validator=optional(gt(0)))
    key_tokens_per_minute: int | None = field(default=None, validator=optional(gt(0)))
    key_max_concurrent: int | None = field(default=None, validator=optional(gt(0)))
    queue_timeout_s: float | None = field(default=None, validator=optional(gt(0)))
    first_token_timeout_s: float | None = field(default=None, validator=optional(gt(0)))
    total_timeout_s: float | None = field(default=None, validator=optional(gt(0)))
    max_choices: int = field(default=16, validator=gt(0))
    max_messages: int = field(default=4096, validator=gt(0))
    max_stop: int = field(default=16, validator=gt(0))
    max_tokens: int | None = field(default=None, validator=optional(gt(0)))
    render_timeout_s: float = field(default=5.0, validator=gt(0))
    render_max_chars: int = field(default=8_000_000, validator=gt(0))
    memory_budget: MemoryBudget | None = None
    load_wait_s: float = field(default=60.0, validator=ge(0))
    drain_s: float = field(default=30.0, validator=ge(0))
