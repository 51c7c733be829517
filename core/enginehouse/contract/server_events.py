"""What a server tells plugins that listen (hook ``on_event``): values, made when something has happened.

No prompt and no answer is in them. Times are in seconds unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

__all__ = ["ModelChanged", "RequestEnded", "ServerEvent", "ServerStarted", "ServerStopped"]


@frozen(kw_only=True)
class ServerStarted:
    """The first event."""

    version: str


@frozen(kw_only=True)
class ServerStopped:
    """The last event: what waits to be sent must be sent now, within a few seconds."""


@frozen(kw_only=True)
class ModelChanged:
    """Something happened to a model.

    Attributes:
        kind: what, such as ``ready``, ``failed``, ``restarting`` or ``unloaded``.
        text: why.
        instance: number of the model among all that this server has had: two of them have the same name while a new
            configuration replaces one by the other. ``replaced`` tells of the new one.
    """

    model: str
    kind: str
    text: str = ""
    instance: int = 1


@frozen(kw_only=True)
class RequestEnded:
    """The response to a request has ended, however it did. None is "does not apply".

    Attributes:
        endpoint: the route's address without its prefix, such as ``/chat/completions``; None where there is no route.
        status: of the HTTP response; 0 when none was sent.
        outcome: finish reasons (``stop``, ``length``), ``cancelled`` when the client left, ``ok``, or an error code.
        request_id: as in the header ``X-Request-Id`` of the response.
        answer_id: the id inside the answer.
        key: name of the API key.
        model: the configured name of the model that answered; ``asked_model`` is what the request said.
        replays: how often the answer was taken up again after its worker died.
        first_token_s: from the arrival to the first text.
        figures: what optimisations report, by name.
        parameters: sampling and stopping parameters in effect, by the name that clients write.
        began_ns: Unix time of the request's arrival, in nanoseconds; ``total_s`` later it ended.
        traceparent: the header of that name, of W3C Trace Context; not checked.
        tracestate: the header of that name.
    """

    method: str
    path: str
    endpoint: str | None
    status: int
    outcome: str
    request_id: str | None
    answer_id: str | None = None
    key: str | None = None
    model: str | None = None
    asked_model: str | None = None
    stream: bool | None = None
    num_choices: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    replays: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    first_token_s: float | None = None
    total_s: float = 0.0
    finish_reasons: Sequence[str] = ()
    figures: Mapping[str, float] = field(factory=dict)
    parameters: Mapping[str, Any] = field(factory=dict)
    began_ns: int = 0
    traceparent: str | None = None
    tracestate: str | None = None


ServerEvent = ServerStarted | RequestEnded | ModelChanged | ServerStopped
