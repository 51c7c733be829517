"""Information about an opened model, its engine's capabilities, settings and statistics, and pooling requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from enginehouse.contract.adapters import AdapterMixing
from enginehouse.contract.types.requests import ConstraintKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "EngineCapabilities",
    "EngineSettings",
    "EngineStats",
    "ModelInfo",
    "PoolTask",
    "PoolText",
    "PoolingInfo",
    "PoolingRequest",
    "PoolingResult",
    "ScoreKind",
    "Task",
]


PoolTask = Literal["embed", "rerank", "classify"]
"""Tasks of pooling models."""

ScoreKind = Literal["embedding", "logit", "sigmoid", "softmax", "cosine"]
"""Meanings of the numbers of a row."""


class PoolText(msgspec.Struct, frozen=True, array_like=True):
    """One input: a text, its token ids, or a pair of texts.

    Attributes:
        text: the text; ignored if ``token_ids`` is given.
        token_ids: the input as ids; no prompt is added, and ids of the layout only with ``add_special_tokens``.
        second: second text of a pair, for the task ``rerank``: the document.
    """

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    second: str | None = None


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One API call to a pooling model, before the model is chosen.

    Attributes:
        request_id: shown to the client and in the log; empty: core makes one.
        model: name of the model; None is the server's first one.
        task: what is asked for; a model for another task refuses it.
        inputs: at least one.
        truncate: part at which a text that is too long is shortened; ``none`` refuses it. Of a pair the longer text is
            shortened first.
        max_tokens: length to which an input is shortened instead of the model's limit, unless ``truncate`` is ``none``:
            the whole input, the ids of the layout included; of a pair, the second text alone.
        add_special_tokens: put the ids of the layout around inputs; None: around texts, not around token ids.
        prompt_name: prompt of the model that is put before each text; None is its default, empty is none.
        prompt_hints: the first of these names that the model has a prompt of is used if ``prompt_name`` is None.
        dimensions: size to which embeddings are cut, and normalised again; None is the model's own.
        normalize: scale embeddings to length 1; False leaves them as the model gives them.
        raw_scores: return logits of ``rerank`` and ``classify`` as they are.
        priority: lower numbers are computed earlier.
        path: the body's field with the inputs, for errors: ``input`` gives ``input[3]``.
        is_list: that field is a list of inputs; otherwise it is the input, and errors name the field alone.
        number_bytes: bytes that a number takes in the response, for the account of memory: 13 as text, 6 in base64.
        caller: name of the caller; set by core.
        namespace: cached rows are shared only inside one namespace; set by core.
        allowed_models: names of the models that the caller may use; None is all; set by core.
        queue_timeout_s: maximum time in the queue; None means no limit; set by core.
    """

    request_id: str = ""
    model: str | None = None
    task: PoolTask
    inputs: tuple[PoolText, ...]
    truncate: Literal["none", "start", "end"] = "none"
    max_tokens: int | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    prompt_hints: tuple[str, ...] = ()
    dimensions: int | None = None
    normalize: bool = True
    raw_scores: bool = False
    priority: int = 0
    path: str = "input"
    is_list: bool = True
    number_bytes: int = 13
    caller: str = ""
    namespace: str = ""
    allowed_models: frozenset[str] | None = None
    queue_timeout_s: float | None = None


class PoolingResult(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a request, in the order of its inputs.

    Attributes:
        rows: little-endian float32, ``(num_inputs, width)`` in C order.
        width: numbers per row.
        num_tokens: tokens of each input, the ids of the layout included, after shortening; equal inputs count each.
        num_truncated: number of inputs that were shortened.
        score_kind: what the numbers are.
        labels: names of the columns, if the model has them.
        model: name of the model that computed them.
        prompt: name of the prompt that was put before the texts; empty: none.
    """

    rows: bytes
    width: int
    num_tokens: tuple[int, ...]
    num_truncated: int = 0
    score_kind: ScoreKind = "embedding"
    labels: tuple[str, ...] = ()
    model: str = ""
    prompt: str = ""

    @property
    def array(self) -> NDArray[np.float32]:
        """View of the rows, ``(num_inputs, width)`` float32, read-only."""
        import numpy as np  # noqa: PLC0415 - see above

        return np.frombuffer(self.rows, "<f4").reshape(-1, self.width)


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a pooling model, as its own files state them and as they are applied.

    The attributes are those of :class:`enginehouse.contract.pooler.PoolerCapabilities` with the same names.
    """

    max_tokens: int
    dimensions: int
    pooling: str = ""
    is_normalized: bool = True
    dimension_choices: tuple[int, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    labels: tuple[str, ...] = ()
    activation: Literal["none", "sigmoid", "softmax"] = "none"


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
