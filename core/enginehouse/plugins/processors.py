"""Logits processors among the samplers of the registry. Not for authors, who register a ``LogitsProcessor``."""

from __future__ import annotations

from typing import Any

from attrs import define, field

from enginehouse.contract.sampler import LogitsProcessor, SamplerRole

_ORDER = -1000  # before every step


@define(eq=False)
class ProcessorSampler:
    """A processor as the first of all sampling steps, so that its fields are handled like those of samplers."""

    processor: LogitsProcessor
    order: int = _ORDER
    role: SamplerRole = "processor"
    name: str = field(init=False)
    api_version: int = field(init=False)
    request_fields: type[Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Copy the remaining attributes from the processor."""
        self.name, self.api_version = self.processor.name, self.processor.api_version
        self.request_fields = self.processor.request_fields

    def create(self, fields: Any) -> Any:
        """See :class:`LogitsProcessor`."""
        return self.processor.create(fields)
