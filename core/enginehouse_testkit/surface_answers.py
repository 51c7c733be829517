"""An answer for tests of assemblers, which write it without a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from enginehouse.contract.usage import Usage

__all__ = ["FakeAnswer"]


@frozen(kw_only=True)
class FakeAnswer:
    """Implements :class:`enginehouse.contract.surface.Answer`; ``so_far`` is its usage."""

    id: str = "answer-1"
    request_id: str = "request-1"
    model: str = "model"
    num_prompt_tokens: int = 7
    is_streamed: bool = False
    parameters: Mapping[str, Any] = field(factory=dict)
    so_far: Usage = field(factory=Usage)

    def usage(self) -> Usage:
        """Return ``so_far``."""
        return self.so_far
