"""What is known about an opened model and its engine, and how that schedules."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from enginehouse.contract.types.parameters import ConstraintKind

__all__ = ["EngineCapabilities", "EngineSettings", "EngineStats", "ModelInfo"]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is doing now; counts, and KV positions in tokens."""

    num_waiting: int = 0
    num_running: int = 0
    max_sequences: int = 0
    free_tokens: int = 0
    cached_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine makes of request parameters. Said by the process that runs the model, which alone knows.

    Attributes:
        takes_messages: chats come as :class:`Chat` instead of rendered prompts; templates, tool calls and reasoning are
            the engine's. It then names every parameter about these in ``native`` or ``refused``.
        native: parameters that the model's library applies by itself: fields of :class:`SamplingParams` and
            :class:`StopParams`, or any other by the name that clients write.
        refused: such a parameter to why this engine cannot apply it.
        samplers: sampler plugins at work; None is all that the server has.
        constraint_kinds: what kinds of constraints it enforces.
        constraint_problem: why it enforces no others.
        media: what messages may hold besides text; only where ``takes_messages``.
    """

    takes_messages: bool = False
    native: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    samplers: tuple[str, ...] | None = None
    constraint_kinds: tuple[ConstraintKind, ...] = ()
    constraint_problem: str = ""
    media: tuple[Literal["image"], ...] = ()


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent process must know about an opened model.

    Attributes:
        backend: name of the backend that opened it.
        max_context: longest sequence (prompt plus answer) in tokens.
        vocab_size: number of logits in a row.
        chat_templates: Jinja sources by name; ``default`` is the usual one. Empty: the fallback is used.
        special_tokens: control-token string to id; user text never forms these.
        bos_token: text of the begin-of-sequence token, "" when there is none.
        eos_token: text of the end-of-sequence token, "" when there is none.
        infill_tokens: control tokens before the text before a gap, before the text after it, and at the end, where
            the model's file names them; else empty.
        engine: what its engine makes of request parameters; filled in by core where core's engine runs it.
        generation_defaults: request fields that the model's own files recommend, such as ``temperature``.
        metadata: anything worth showing (architecture, quantisation, parameter count), as strings.
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


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How :class:`enginehouse.engine.loop.StepEngine` schedules.

    Attributes:
        slots: sequences that decode at once.
        max_queue: requests that wait; one more is refused.
        max_queue_tokens: tokens of their prompts; a request that brings more is refused, unless none waits.
        max_queue_per_caller: requests of one named caller that wait; None is a share of ``max_queue``.
        prefill_chunk_tokens: most prompt tokens in a step that other sequences decode in; None is the runner's choice.
        max_prefill_tokens: most prompt tokens in a step that nothing decodes in; None is twice the runner's chunk.
        prefix_cache: keep finished sequences for requests that share a beginning.
    """

    slots: int = 8
    max_queue: int = 128
    max_queue_tokens: int = 1_000_000
    max_queue_per_caller: int | None = None
    prefill_chunk_tokens: int | None = None
    max_prefill_tokens: int | None = None
    prefix_cache: bool = True
