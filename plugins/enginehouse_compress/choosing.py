"""Compression choice: combines a request with the settings of its model into method, ratio and scope."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from enginehouse.contract.compressor import Compressor
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import GenerateRequest
from enginehouse_compress.fields import CompressionBody, asked_compression
from enginehouse_compress.settings import CompressorSettings, needs_embeddings

__all__ = ["DEFAULT_RATIO", "Choice", "choose", "choose_for_room"]

DEFAULT_RATIO = 0.5
"""Default share of the tokens that is kept."""


@frozen(kw_only=True)
class Choice:
    """A compression to be carried out.

    Attributes:
        min_tokens: texts with fewer tokens are left unchanged.
        system: also compress system messages.
        scorer: name of the model that scores the probability of texts; None for the model itself.
        embedder: name of the model that embeds texts; None if the settings name none.
    """

    compressor: Compressor
    ratio: float
    min_tokens: int = 0
    system: bool = False
    scorer: str | None = None
    embedder: str | None = None


def choose(
    request: GenerateRequest, settings: CompressorSettings | None, compressors: Mapping[str, Compressor]
) -> Choice | None:
    """Return the compression to apply before the request is submitted; None leaves its prompt unchanged.

    Raises:
        InvalidRequest: the request asks for something that does not exist, or that its prompt does not allow.
    """
    asked = asked_compression(request)
    if asked is None:
        if settings is None or settings.when != "always" or not _may_be_shortened(request):
            return None
        return _chosen_by(settings, compressors)
    if asked is False:
        return None
    asked = CompressionBody() if asked is True else asked
    _check_prompt(request)
    method = asked.method or (settings.method if settings is not None else None)
    if method is None:
        param = "compression.method"
        raise InvalidRequest(f"{param}: is required, as this model has none by itself", param)
    compressor = compressors.get(method)
    if compressor is None:
        there = f"; the methods are {', '.join(compressors)}" if compressors else "; no plugin brings one"
        raise InvalidRequest(f"compression.method: unknown method {method!r}{there}", "compression.method")
    if asked.ratio is not None and not compressor.is_budgeted:
        raise InvalidRequest(f"compression.ratio: the method {method!r} has no ratio", "compression.ratio")
    if needs_embeddings(compressor) and (settings is None or settings.embedder is None):
        message = f"compression.method: {method!r} needs an embedder, which the settings of this model do not name"
        raise InvalidRequest(message, "compression.method")
    own_ratio = settings.ratio if settings is not None else None
    return Choice(
        compressor=compressor,
        ratio=asked.ratio or own_ratio or DEFAULT_RATIO,
        system=settings is not None and settings.system,
        scorer=settings.scorer if settings is not None else None,
        embedder=settings.embedder if settings is not None else None,
    )


def choose_for_room(
    request: GenerateRequest, settings: CompressorSettings | None, compressors: Mapping[str, Compressor]
) -> Choice | None:
    """Return the compression to apply when the prompt does not fit; None refuses the request."""
    if settings is None or settings.when != "overflow" or not _may_be_shortened(request):
        return None
    if asked_compression(request) is False:
        return None
    return _chosen_by(settings, compressors)


def _chosen_by(settings: CompressorSettings, compressors: Mapping[str, Compressor]) -> Choice:
    """Return the choice made by the (already checked) settings of a model."""
    return Choice(
        compressor=compressors[settings.method],
        ratio=settings.ratio or DEFAULT_RATIO,
        min_tokens=settings.min_tokens if settings.when == "always" else 0,
        system=settings.system,
        scorer=settings.scorer,
        embedder=settings.embedder,
    )


def _may_be_shortened(request: GenerateRequest) -> bool:
    """True if settings may compress the request: only chats without prompt log-probabilities."""
    return request.messages is not None and request.num_prompt_logprobs is None


def _check_prompt(request: GenerateRequest) -> None:
    for is_given, what in (
        (request.token_ids is not None, "a prompt of token ids"),
        (request.suffix is not None, "suffix"),
        (request.num_prompt_logprobs is not None, "the log-probabilities of the prompt"),
    ):
        if is_given:
            raise InvalidRequest(f"compression: not allowed together with {what}", "compression")
