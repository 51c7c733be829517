"""Settings of a remote model: what users write in ``[models.<name>]``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import attrs
from attrs import field, frozen
from attrs.validators import ge, gt, optional

from enginehouse.contract.errors import ModelLoadError

__all__ = ["Kind", "RemoteOptions", "base_url"]

Kind = Literal["enginehouse", "vllm", "sglang", "llamacpp", "openai"]
"""Which server answers; ``openai`` is any that honours what OpenAI's API has."""


def _check_urls(_: Any, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for url in value:
        if not url.startswith(("http://", "https://")) or not urlsplit(url).hostname:
            raise ValueError(f"{url!r} is no address of a server; write http://host:port/v1")


@frozen(kw_only=True)
class RemoteOptions:
    """Settings of a model of this backend; its ``source`` is the address of a server.

    Attributes:
        context: longest sequence in tokens; None is what the server says, or no limit that is known here.
        urls: addresses of further servers of the same model; each request goes to the one with the least to do.
        model: name of the model there; None is the first one that is listed.
        kind: which server it is; ``auto`` asks it.
        parameters: further request fields that these servers honour, by the names that clients write.
        without: request fields that they do not honour, though others of their kind do.
        images: whether the model there takes images in messages.
        api_key: sent as a bearer token.
        api_key_env: environment variable that holds the key, instead of ``api_key``.
        max_requests: requests that run there at once; one more is answered 429.
        start_timeout_s: seconds in which one of the servers must answer when the model is opened.
        connect_timeout_s: seconds for a connection.
        first_token_timeout_s: seconds from a request to the first sign of its answer.
        idle_timeout_s: seconds between two pieces of an answer.
        health_interval_s: seconds between two questions to a server that does not answer.
    """

    context: int | None = field(default=None, validator=optional(gt(1)))
    urls: tuple[str, ...] = field(default=(), validator=_check_urls)
    model: str | None = None
    kind: Literal["auto", "enginehouse", "vllm", "sglang", "llamacpp", "openai"] = "auto"
    parameters: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    images: bool = False
    api_key: str | None = field(default=None, repr=False)
    api_key_env: str | None = None
    max_requests: int = field(default=256, validator=ge(1))
    start_timeout_s: float = field(default=10.0, validator=gt(0))
    connect_timeout_s: float = field(default=5.0, validator=gt(0))
    first_token_timeout_s: float = field(default=300.0, validator=gt(0))
    idle_timeout_s: float = field(default=120.0, validator=gt(0))
    health_interval_s: float = field(default=5.0, validator=gt(0))

    def headers(self, env: Mapping[str, str] = os.environ) -> dict[str, str]:
        """What every request to a server carries.

        Raises:
            ModelLoadError: the variable that should hold the key does not exist, or the key could not be sent.
        """
        key = self.api_key
        if self.api_key_env is not None:
            if key is not None:
                raise ModelLoadError("api_key and api_key_env: give one of them")
            key = env.get(self.api_key_env)
            if not key:
                raise ModelLoadError(f"api_key_env: there is no environment variable {self.api_key_env!r}")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ModelLoadError("the API key holds characters that no header can carry")
        return {} if key is None else {"authorization": f"Bearer {key}"}


def base_url(url: str) -> str:
    """The address below which ``/chat/completions`` lies; ``/v1`` where only a host is named."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"
