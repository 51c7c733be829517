"""Request bodies of ``/completion``, ``/infill`` and ``/v1/chat/completions/control``.

Source: https://github.com/ggml-org/llama.cpp, ``tools/server/server-schema.cpp``. Fields of sampler plugins
(``mirostat``, ``dry_multiplier``, ``typical_p``, ...) have llama-server's names and are read by core. Members that are
not here have no effect and are listed as ignored.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

__all__ = ["CompletionBody", "ControlBody", "ExtraFile", "InfillBody"]


@frozen(kw_only=True)
class _GenerationBody:
    """Members of both generating bodies. ``Any``: checked with the parameters, or by hand."""

    model: str | None = None
    stream: bool = False
    cache_prompt: bool = True
    return_tokens: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    post_sampling_probs: Any = None
    response_fields: tuple[str, ...] = ()
    n_cmpl: int | None = None
    n: int | None = None
    n_probs: int | None = None
    logprobs: int | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repeat_penalty: Any = None
    repeat_last_n: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    seed: Any = None
    stop: Any = None
    stop_regex: Any = None
    ignore_eos: Any = None
    samplers: Any = None
    logit_bias: Any = None
    grammar: str = ""
    json_schema: Any = None
    lora: Any = None


@frozen(kw_only=True)
class CompletionBody(_GenerationBody):
    """The body of ``/completion``."""

    prompt: Any


@frozen(kw_only=True)
class ExtraFile:
    """A file that an infill request has beside the gap."""

    text: str
    filename: str | None = None


@frozen(kw_only=True)
class InfillBody(_GenerationBody):
    """The body of ``/infill``."""

    input_prefix: str
    input_suffix: str
    input_extra: tuple[ExtraFile, ...] = ()
    prompt: str = ""


@frozen(kw_only=True)
class ControlBody:
    """The body of ``/v1/chat/completions/control``."""

    id: str
    action: str
