"""Information about an opened model, and its engine's capabilities, settings and statistics."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from enginehouse.contract.adapters import AdapterMixing
from enginehouse.contract.types.pooling import PoolingInfo
from enginehouse.contract.types.requests import ConstraintKind

__all__ = ["EngineCapabilities", "EngineSettings", "EngineStats", "ModelInfo", "Task"]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Current statistics of an engine; counts, and KV positions in tokens. ``num_adapters`` are those loaded."""

    num_waiting: int = 0
    num_running: int = 0
    max_sequences: int = 0
    free_tokens: int = 0
    cached_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_adapters: int = 0


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Request parameters that an engine supports, reported by the process that runs the model.

    Attributes:
        takes_messages: chats are passed as :class:`.Chat` instead of rendered prompts; the engine handles templates,
            tool calls and reasoning. It then lists every parameter about these in ``native`` or ``refused``.
        native: parameters that the model's library applies itself: fields of :class:`.SamplingParams` and
            :class:`.StopParams`, or any other by its name in requests.
        refused: unsupported parameter to the reason.
        samplers: active sampler plugins; None is all of the server's.
        constraint_kinds: kinds of constraints that it enforces.
        constraint_problem: why it enforces no others.
        media: content types of messages besides text.
        max_image_pixels: pixels to which larger images are shrunk; 0 for an engine that takes messages.
        audio_rate: samples of a second to which recordings are resampled; 0 for an engine that takes none.
        adapters: how requests with different adapters share its passes.
    """

    takes_messages: bool = False
    native: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    samplers: tuple[str, ...] | None = None
    constraint_kinds: tuple[ConstraintKind, ...] = ()
    constraint_problem: str = ""
    media: tuple[Literal["image", "audio"], ...] = ()
    max_image_pixels: int = 0
    audio_rate: int = 0
    adapters: AdapterMixing = "none"


Task = Literal["generate", "embed", "rerank", "classify"]
"""Tasks of models."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Information about an opened model for the parent process.

    Attributes:
        backend: name of the backend that opened it.
        task: what the model does; requests for another task are refused.
        max_context: longest sequence (prompt plus answer) in tokens.
        vocab_size: number of logits in a row.
        chat_templates: Jinja sources by name; ``default`` is the usual one. Empty: the fallback is used.
        special_tokens: control-token string to id; user text never becomes one of these.
        bos_token: text of the begin-of-sequence token, "" if there is none.
        eos_token: text of the end-of-sequence token, "" if there is none.
        infill_tokens: control tokens before the prefix, before the suffix and at the end of an infill prompt, if the
            model's file names them; else empty.
        engine: capabilities of its engine; filled in by core if core's engine runs it.
        generation_defaults: request fields that the model's own files recommend, such as ``temperature``.
        metadata: descriptive values (architecture, quantisation, parameter count), as strings.
        pooling: what a pooling model's rows are; filled in by core from the capabilities of its pooler.
    """

    backend: str
    max_context: int
    vocab_size: int
    chat_templates: dict[str, str] = {}
    special_tokens: dict[str, int] = {}
    bos_token: str = ""
    eos_token: str = ""
    infill_tokens: tuple[str, ...] = ()
    engine: EngineCapabilities = EngineCapabilities()
    generation_defaults: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    task: Task = "generate"
    pooling: PoolingInfo | None = None


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler settings of ``enginehouse.engine.loop.StepEngine``.

    Attributes:
        slots: sequences that decode concurrently.
        prefill_chunk_tokens: maximum prompt tokens in a step in which other sequences decode; None is the runner's
            choice.
        max_prefill_tokens: maximum prompt tokens in a step without decoding; None is twice the runner's chunk.
        prefix_cache: keep finished sequences for requests with the same prefix.
        max_adapters: adapters that are loaded at once; then the least recently used one is unloaded.
        embedding_cache_bytes: memory for embeddings of images that are kept for later requests.
    """

    slots: int = 8
    prefill_chunk_tokens: int | None = None
    max_prefill_tokens: int | None = None
    prefix_cache: bool = True
    max_adapters: int = 8
    embedding_cache_bytes: int = 256 * 2**20
