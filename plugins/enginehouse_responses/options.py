"""Settings of the plugin, ``[plugins.responses]``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, gt

__all__ = ["Dialect", "ResponsesOptions"]

Dialect = Literal["openai", "open_responses"]
"""Two specifications of the API, which name some events differently."""


@frozen(kw_only=True)
class ResponsesOptions:
    """Settings of responses and of the store.

    Attributes:
        store: keep responses in memory, so that they can be retrieved, continued and resumed. Requests may leave it
            with ``store: false``.
        file: keep them in this SQLite file instead, which survives a restart and is readable by its owner only. A
            relative name is relative to the configuration file.
        max_responses: further ones replace those that were not used for the longest time.
        max_bytes: of all stored responses together.
        max_age_s: seconds after which a response that is not used is removed.
        max_events_bytes: memory for the events of streams that can be resumed; the oldest ones give way.
        dialect: names of the events of reasoning: ``reasoning_text`` as OpenAI's SDK knows them, or ``reasoning`` as
            Open Responses does.
    """

    store: bool = False
    file: Path | None = None
    max_responses: int = field(default=10_000, validator=gt(0))
    max_bytes: int = field(default=256 * 2**20, validator=gt(0))
    max_age_s: float = field(default=30 * 86_400.0, validator=gt(0))
    max_events_bytes: int = field(default=64 * 2**20, validator=ge(0))

    dialect: Dialect = "openai"

    @property
    def is_on(self) -> bool:
        """True if responses are stored."""
        return self.store or self.file is not None
