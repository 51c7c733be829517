"""Settings of a remote model, configured in ``[models.<name>]``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import attrs
from attrs import field, frozen
from attrs.validators import ge, gt, optional

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.types import Task

__all__ = ["Kind", "RemoteOptions", "base_url"]

Kind = Literal["enginehouse", "vllm", "sglang", "llamacpp", "tei", "openai"]
"""Kind of server; ``tei`` is Text Embeddings Inference, ``openai`` any server that supports OpenAI's API."""


def _check_urls(_: Any, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for url in value:
        if not url.startswith(("http://", "https://")) or not urlsplit(url).hostname:
            raise ValueError(f"{url!r} is not an address of a server; write http://host:port/v1")


@frozen(kw_only=True)
class RemoteOptions:
    """Settings of a model of this backend; its ``source`` is the URL of a server.

    Attributes:
        context: longest sequence in tokens; None uses the server's value, or no known limit.
        urls: URLs of further servers of the same model; see ``routing``.
        routing: ``prefix`` sends a request to the server that was sent most of its prompt before, unless it is much
            busier than others; ``load`` sends each request to the least busy one.
        model: name of the model on the server; None is the first one that is listed.
        kind: kind of server; ``auto`` detects it.
        task: what the remote model does; None is what an Enginehouse server reports, else ``generate``.
        parameters: further request fields that these servers support, by the names that clients use.
        without: request fields that these servers do not support, although others of their kind do.
        images: the remote model accepts images in messages.
        api_key: sent as a bearer token.
        api_key_env: environment variable that contains the key, instead of ``api_key``.
        max_requests: maximum number of concurrent requests to the servers; further ones are answered with 429.
        start_timeout_s: seconds within which one of the servers must answer when the model is opened.
        connect_timeout_s: seconds for a connection.
        first_token_timeout_s: seconds from a request to the first piece of its answer.
        idle_timeout_s: seconds between two pieces of an answer.
        health_interval_s: seconds between two health checks of a server that does not answer.
    """

    context: int | None = field(default=None, validator=optional(gt(1)))
    urls: tuple[str, ...] = field(default=(), validator=_check_urls)
    routing: Literal["prefix", "load"] = "prefix"
    model: str | None = None
    kind: Literal["auto", "enginehouse", "vllm", "sglang", "llamacpp", "tei", "openai"] = "auto"
    task: Task | None = None
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
        """Return the headers of every request to a server.

        Raises:
            ModelLoadError: the variable with the key does not exist, or the key is not a valid header value.
        """
        key = self.api_key
        if self.api_key_env is not None:
            if key is not None:
                raise ModelLoadError("api_key and api_key_env: give one of them")
            key = env.get(self.api_key_env)
            if not key:
                raise ModelLoadError(f"api_key_env: the environment variable {self.api_key_env!r} is not set")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ModelLoadError("the API key holds characters that no header can carry")
        return {} if key is None else {"authorization": f"Bearer {key}"}


def base_url(url: str) -> str:
    """Return the base URL of ``/chat/completions``; adds ``/v1`` if only a host is given."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"
