"""Speculative decoding with a draft head of the model, which the backend runs: an EAGLE-3 head or an MTP layer."""

from __future__ import annotations

from attrs import define, field, frozen
from attrs.validators import ge, gt, le

from enginehouse.contract.drafter import BoundDrafter, DraftContext, HeadKeeper
from enginehouse.contract.errors import ModelLoadError

__all__ = ["HeadDrafter", "HeadOptions"]


@frozen(kw_only=True)
class HeadOptions:
    """Settings of the drafter ``head``.

    Attributes:
        min_probability: a draft ends before a token that the head considers less probable than this.
        max_tokens: longest draft.
    """

    min_probability: float = field(default=0.4, validator=[ge(0.0), le(1.0)])
    max_tokens: int = field(default=8, validator=gt(0))


@define(eq=False)
class HeadDrafter:
    """The registered drafter."""

    name: str = "head"
    api_version: int = 1
    options: type[HeadOptions] = HeadOptions
    takes_head: bool = True

    def bind(self, context: DraftContext, options: HeadOptions) -> BoundDrafter:
        """Let the runner load the head.

        Raises:
            ModelLoadError: the runner has no draft heads, or this one does not fit the model.
        """
        runner = context.runner
        if not isinstance(runner, HeadKeeper):
            raise ModelLoadError("needs a backend that runs draft heads of its models, such as hf")
        return runner.open_head(
            context.head_source, max_tokens=options.max_tokens, min_probability=options.min_probability
        )
