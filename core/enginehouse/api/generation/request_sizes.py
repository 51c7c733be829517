"""Limits on what the requests of one call ask for together, whichever surface has made them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from enginehouse.api.http.admission.memory import Reservation
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import GenerateRequest
from enginehouse.settings.config import LimitsSettings

_MAX_SHARED_CHARS = 2**24
_MAX_SHARED_MEMBERS = 2**17
"""Limits on the size of data shared by several prompts, multiplied by the number of prompts."""


@define
class MediaMemory:
    """Memory of the decoded media of a request, held until it has ended: the most that one of its attempts needs.

    The value of :attr:`enginehouse.contract.types.GenerateRequest.hold`.
    """

    _reservation: Reservation
    _num_bytes: int = 0

    def __call__(self, num_bytes: int) -> None:
        """Hold at least ``num_bytes``. Raises as :meth:`.Reservation.take`."""
        if num_bytes > self._num_bytes:
            self._reservation.take(num_bytes - self._num_bytes)
            self._num_bytes = num_bytes


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
