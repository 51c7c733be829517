"""Limits on what the requests of one call ask for together, whichever surface has made them."""

from __future__ import annotations

from collections.abc import Sequence

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import DecodedImage, GenerateRequest
from enginehouse.settings.config import LimitsSettings

_MAX_SHARED_CHARS = 2**24
_MAX_SHARED_MEMBERS = 2**17
"""Limits on the size of data shared by several prompts, multiplied by the number of prompts."""


def num_pixel_bytes(request: GenerateRequest) -> int:
    """Return the memory of a started request's decoded images, which is held until it has ended."""
    parts = (part for message in request.messages or () for part in message.parts)
    return sum(len(part.rgb) for part in parts if isinstance(part, DecodedImage))


def check_request_sizes(requests: Sequence[GenerateRequest], limits: LimitsSettings) -> None:
    """Refuse what a small body could make large: choices, prompts, messages, and data that is sent with each prompt.

    Raises:
        InvalidRequest: there is too much of something.
    """
    first, num_prompts = requests[0], len(requests)
    for field, noun, number, most in (
        ("n", "choices", first.num_choices, limits.max_choices),
        ("prompt", "prompts", num_prompts, limits.max_prompts),
        ("messages", "messages", len(first.messages or ()), limits.max_messages),
    ):
        if number > most:
            raise InvalidRequest(f"{field}: this server allows at most {most} {noun}, not {number}", field)
    constraint, bias = first.constraint, first.sampling.get("logit_bias", ())
    if constraint is not None and num_prompts * len(constraint.text) > _MAX_SHARED_CHARS:
        most = _MAX_SHARED_CHARS // num_prompts
        message = f"with {num_prompts} prompts it may have at most {most} characters, not {len(constraint.text)}"
        raise InvalidRequest(f"{constraint.param}: {message}", constraint.param)
    if num_prompts * len(bias) > _MAX_SHARED_MEMBERS:
        most = _MAX_SHARED_MEMBERS // num_prompts
        message = f"with {num_prompts} prompts it may have at most {most} members, not {len(bias)}"
        raise InvalidRequest(f"logit_bias: {message}", "logit_bias")
