"""API profiles as data: the differences of the five APIs that clients were written for.

A profile changes defaults, names and shapes, never the set of features. The settings, an API key or the request path
select one; ``api`` formats responses by it, and the pipeline uses its defaults as the last layer before the built-in
ones. Knows neither JSON nor HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

ProfileName = Literal["openai", "octomil", "mini-sglang", "octoai", "omlx"]

_PLAIN_HEAD = ("id", "object", "created", "model")
_HEAD = (*_PLAIN_HEAD, "system_fingerprint")


@frozen(kw_only=True)
class Profile:
    """One API. Defaults are OpenAI's.

    Attributes:
        name: as in settings and request paths.
        defaults: default values of request fields, if neither the request nor the model gives them.
        chat_id: prefix of the ids of chats.
        chunk_object: ``object`` of the chunks of a streamed chat.
        chunk_head: members of such a chunk before ``choices``.
        whole_head: members of a non-streamed response before ``choices``.
        opening_delta: the first delta of each choice.
        null_logprobs: ``logprobs`` is null if it was not requested; otherwise it is omitted.
        null_members: members of a non-streamed message that are null if empty; others are omitted. ``reasoning`` means
            for the fields that carry it.
        reasoning_field: field that carries reasoning; unset is the value of ``server.reasoning_field``.
        usage_details: ``usage`` also counts cached and reasoning tokens.
        usage_times: ``usage`` in streams also has times.
        usage_in_streams: usage in a separate chunk without choices, or in the last chunk with content.
        usage_by_default: ``stream_options`` without ``include_usage`` imply it.
        names_asked_model: ``model`` in responses is the requested name; otherwise the model's own.
        error_codes: HTTP status to the ``code`` of every error with that status.
        optimization_headers: savings of an answer (keys as in the member ``enginehouse``) to the response header that
            reports them, unless they are zero.
    """

    name: ProfileName
    defaults: Mapping[str, Any] = field(factory=dict)
    chat_id: str = "chatcmpl-"
    chunk_object: str = "chat.completion.chunk"
    chunk_head: tuple[str, ...] = _HEAD
    whole_head: tuple[str, ...] = _HEAD
    opening_delta: Mapping[str, str] = field(factory=lambda: {"role": "assistant", "content": ""})
    null_logprobs: bool = True
    null_members: tuple[str, ...] = ("refusal", "reasoning")
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] | None = None
    usage_details: bool = True
    usage_times: bool = False
    usage_in_streams: Literal["own_chunk", "last_content"] = "own_chunk"
    usage_by_default: bool = False
    names_asked_model: bool = False
    error_codes: Mapping[int, str] = field(factory=dict)
    optimization_headers: Mapping[str, str] = field(factory=dict)


_OCTOMIL = Profile(
    name="octomil",
    defaults={"temperature": 0.7, "top_p": 0.9},
    chunk_head=_PLAIN_HEAD,
    whole_head=_PLAIN_HEAD,
    null_logprobs=False,
    null_members=(),
    usage_details=False,
    names_asked_model=True,
    error_codes={
        400: "bad_request",
        401: "unauthorized",
        404: "not_found",
        409: "conflict",
        429: "rate_limited",
        500: "internal_error",
    },
    optimization_headers={
        "routed_model": "x-octomil-routed-model",
        "speculative": "x-octomil-speculative",
        "early_exit_tokens": "x-octomil-early-exit-tokens",
        "compression": "x-octomil-compression",
    },
)

_MINI_SGLANG = Profile(
    name="mini-sglang",
    defaults={"max_tokens": 16},
    chat_id="cmpl-",
    chunk_object="text_completion.chunk",
    chunk_head=("id", "object"),
    opening_delta={"role": "assistant"},
    null_logprobs=False,
    names_asked_model=True,
)

_OCTOAI = Profile(
    name="octoai",
    defaults={"max_tokens": 512},
    chunk_head=_PLAIN_HEAD,
    null_logprobs=False,
    usage_in_streams="last_content",
    usage_by_default=True,
    names_asked_model=True,
)

_OMLX = Profile(
    name="omlx",
    defaults={"max_tokens": 32768},
    chunk_head=_PLAIN_HEAD,
    whole_head=_PLAIN_HEAD,
    null_logprobs=False,
    null_members=("reasoning", "tool_calls"),
    reasoning_field="reasoning_content",
    usage_details=False,
    usage_times=True,
    names_asked_model=True,
)

DEFAULT_PROFILE = Profile(name="openai")

PROFILES: Mapping[str, Profile] = {
    profile.name: profile for profile in (DEFAULT_PROFILE, _OCTOMIL, _MINI_SGLANG, _OCTOAI, _OMLX)
}
"""All profiles by name."""
