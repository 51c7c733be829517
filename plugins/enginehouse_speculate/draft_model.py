"""Speculative decoding with a smaller model of the same vocabulary, which drafts greedily."""

from __future__ import annotations

from attrs import define, field, frozen
from attrs.validators import ge, gt, le

from enginehouse.contract.drafter import BoundDrafter, DraftContext
from enginehouse.contract.errors import ModelLoadError
from enginehouse_speculate.second_model import SecondModel

__all__ = ["DraftModelDrafter", "DraftModelOptions"]


@frozen(kw_only=True)
class DraftModelOptions:
    """Settings of the drafter ``draft-model``.

    Attributes:
        min_probability: a draft ends before a token that the smaller model considers less probable than this.
        max_tokens: longest draft.
    """

    min_probability: float = field(default=0.4, validator=[ge(0.0), le(1.0)])
    max_tokens: int = field(default=16, validator=gt(0))


@define(eq=False)
class DraftModelDrafter:
    """The registered drafter."""

    name: str = "draft-model"
    api_version: int = 1
    options: type[DraftModelOptions] = DraftModelOptions

    def bind(self, context: DraftContext, options: DraftModelOptions) -> BoundDrafter:
        """Open the smaller model and compare the vocabularies.

        Raises:
            ModelLoadError: it cannot be opened, or has another vocabulary.
        """
        if context.open_second is None:
            raise ModelLoadError("needs the smaller model as its 'source'")
        runner = context.open_second()
        own, other = context.runner.tokenizer, runner.tokenizer
        if own.vocab_size != other.vocab_size or list(own.token_bytes) != list(other.token_bytes):
            runner.close()
            raise ModelLoadError("the smaller model has another vocabulary than the model that it drafts for")
        return SecondModel(runner, options.min_probability, options.max_tokens)
