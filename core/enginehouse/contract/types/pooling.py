"""Requests to pooling models, their results, and what such a model's rows are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:  # NumPy would be half of the start-up time of a rendering process
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["PoolTask", "PoolText", "PoolingInfo", "PoolingRequest", "PoolingResult", "ScoreKind"]

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
