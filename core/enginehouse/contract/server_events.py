"""Server events for plugins that implement the hook ``on_event``: immutable values, created after the fact.

They contain no prompts and no answers. Times are in seconds unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

__all__ = ["ModelChanged", "RequestEnded", "ServerEvent", "ServerStarted", "ServerStopped"]


@frozen(kw_only=True)
class ServerStarted:
    """The first event: the server has started."""

    version: str


@frozen(kw_only=True)
class ServerStopped:
    """The last event. Pending data must be sent now, within a few seconds."""


@frozen(kw_only=True)
class ModelChanged:
    """A state change of a model.

    Attributes:
        kind: the change, such as ``ready``, ``failed``, ``restarting`` or ``unloaded``.
        text: the reason.
        instance: number of the model among all that this server has had: two have the same name while a new
            configuration replaces one by the other. ``replaced`` refers to the new one.
    """

    model: str
    kind: str
    text: str = ""
    instance: int = 1


@frozen(kw_only=True)
class RequestEnded:
    """The end of the response to a request, successful or not. None is "does not apply".

    Attributes:
        endpoint: the route without its prefix, such as ``/chat/completions``; None without a route.
        status: of the HTTP response; 0 if none was sent.
        outcome: finish reasons (``stop``, ``length``), ``cancelled`` if the client disconnected, ``ok``, or an error
            code.
        request_id: value of the response header ``X-Request-Id``.
        answer_id: the id in the response body.
        key: name of the API key.
        model: the configured name of the model that answered; ``asked_model`` is the name in the request.
        first_token_s: from the arrival to the first text.
        usage: counts and times of generation by their names in the log (see :class:`enginehouse.contract.usage.Usage`);
            only those that apply.
        parameters: sampling and stopping parameters in effect, by their names in requests.
        began_ns: Unix time of the request's arrival, in nanoseconds; it ended ``total_s`` later.
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
    first_token_s: float | None = None
    total_s: float = 0.0
    finish_reasons: Sequence[str] = ()
    usage: Mapping[str, float] = field(factory=dict)
    parameters: Mapping[str, Any] = field(factory=dict)
    began_ns: int = 0
    traceparent: str | None = None
    tracestate: str | None = None


ServerEvent = ServerStarted | RequestEnded | ModelChanged | ServerStopped
"""Arguments of ``on_event``."""
