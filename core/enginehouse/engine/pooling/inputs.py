"""Texts of a pooling request to the inputs of its model: prompts, layout, length, and equal inputs only once.

Called on the worker's intake threads, before a request enters the queue, so that what can be refused is refused there.
Does not know passes or rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.errors import InvalidRequest, UnsupportedTask, quoted
from enginehouse.contract.pooler import PoolerCapabilities, PoolerInput, TextLayout
from enginehouse.contract.types import ModelInfo, PoolingRequest, PoolText, Segment
from enginehouse.engine.text.segments import encode_segments, min_tokens

_MAX_RESULT_BYTES = 48 * 1024 * 1024
"""A result is one message to the server, whose size is limited."""

Truncate = Literal["none", "start", "end"]


@frozen(eq=False)
class PoolInputs:
    """The inputs of one request.

    Attributes:
        request: the request.
        inputs: different ones.
        keys: bytes that identify each of them.
        places: index in ``inputs`` of each row of the result, ``(num_rows,)``; of both texts of a pair whose
            embeddings are compared, ``(num_rows, 2)``.
        num_tokens: tokens of each of the request's texts or pairs.
        num_truncated: number of these that were shortened.
        accepted_s: time at which the request was accepted.
        prompt: name of the prompt before the texts; empty: none.
    """

    request: PoolingRequest
    inputs: Sequence[PoolerInput]
    keys: Sequence[bytes]
    places: NDArray[np.intp]
    num_tokens: tuple[int, ...]
    num_truncated: int
    accepted_s: float = 0.0
    prompt: str = ""


class Arrangement(Protocol):
    """Makes the input of one text or pair; several threads use it at once."""

    def make(
        self, text: PoolText, prompt: str, truncate: Truncate, max_tokens: int | None = None
    ) -> tuple[PoolerInput, int]:
        """Return the input and the number of tokens before it was shortened.

        The input is longer than the model's limit only with ``truncate`` "none".

        Args:
            max_tokens: as in :class:`enginehouse.contract.types.PoolingRequest`; None with ``truncate`` "none".
        """


@frozen(eq=False)
class LayoutArrangement:
    """Puts a model's ids around the ids of texts."""

    tokenizer: Tokenizer
    capabilities: PoolerCapabilities

    def make(
        self, text: PoolText, prompt: str, truncate: Truncate, max_tokens: int | None = None
    ) -> tuple[PoolerInput, int]:
        """See :class:`Arrangement`."""
        limits = self.capabilities
        if text.second is None or limits.pair is None:
            layout, second = limits.text, None
        else:
            layout, second = limits.pair, self.tokenizer.encode(text.second, False)
        first = self._encode(text.text, prompt)
        num_added = layout.num_added(is_pair=second is not None)
        num_tokens = len(first) + len(second or ()) + num_added
        if truncate != "none":
            if second is not None and max_tokens is not None:
                second, max_tokens = _cut(second, max_tokens, truncate), None
            room = max(0, min(limits.max_tokens, max_tokens or limits.max_tokens) - num_added)
            if len(first) + len(second or ()) > room:
                first, second = _shortened(first, second, room, truncate)
        num_prompt = 0
        if prompt and not limits.include_prompt:
            num_prompt = min(len(self.tokenizer.encode(prompt, True)), len(first))
        return layout.arrange(first, second, num_prompt=num_prompt), num_tokens

    def _encode(self, text: str, prompt: str) -> list[int]:
        return _token_ids(self.tokenizer, text, prompt)


def _token_ids(tokenizer: Tokenizer, text: str, prompt: str) -> list[int]:
    """Return the ids of a text after a prompt, without those of a layout."""
    if not prompt:
        return tokenizer.encode(text, False)
    return encode_segments(tokenizer, (Segment(prompt, trusted=True), Segment(text)), add_special=False)


def _shortened(
    first: list[int], second: list[int] | None, room: int, truncate: Truncate
) -> tuple[list[int], list[int] | None]:
    """Return one or two texts that have ``room`` tokens together: of two, the longer one is shortened first.

    Source: the strategy ``longest_first`` of Hugging Face tokenizers.
    """
    if second is None:
        return _cut(first, room, truncate), None
    lengths = len(first), len(second)
    half, longer_half = room // 2, room - room // 2
    if min(lengths) > half:
        keeps = (half, longer_half) if lengths[0] <= lengths[1] else (longer_half, half)
    elif lengths[0] <= lengths[1]:
        keeps = lengths[0], room - lengths[0]
    else:
        keeps = room - lengths[1], lengths[1]
    return _cut(first, keeps[0], truncate), _cut(second, keeps[1], truncate)


def _cut(token_ids: list[int], length: int, truncate: Truncate) -> list[int]:
    return token_ids[:length] if truncate == "end" else token_ids[len(token_ids) - min(length, len(token_ids)) :]


@frozen(eq=False)
class InputMaker:
    """Checks requests and makes their inputs. Any thread.

    Attributes:
        compares: embeddings are compared for the task ``rerank`` (setting ``rerank = "cosine"``).
    """

    tokenizer: Tokenizer
    capabilities: PoolerCapabilities
    info: ModelInfo
    arrangement: Arrangement
    compares: bool = False
    _dimensions: frozenset[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        limits = self.capabilities
        object.__setattr__(self, "_dimensions", frozenset({limits.dimensions, *limits.dimension_choices}))

    def make(self, request: PoolingRequest) -> PoolInputs:
        """Return the inputs of a request.

        Raises:
            UnsupportedTask: the model is for another task.
            InvalidRequest: a text is empty, too long or of the wrong form, or the model does not offer what is asked.
        """
        self._check(request)
        is_comparison = request.task == "rerank" and self.info.task == "embed"
        found: dict[bytes, int] = {}
        inputs: list[PoolerInput] = []
        places: list[int] = []
        num_tokens: list[int] = []
        num_truncated = 0
        for index, one in enumerate(request.inputs):
            total, was_cut = 0, False
            for text, prompt in self._texts(request, one, is_comparison=is_comparison):
                made, num_before = self._input(request, text, prompt, index)
                total += len(made.token_ids)
                was_cut |= num_before > len(made.token_ids)
                place = found.setdefault(_key(made), len(inputs))
                if place == len(inputs):
                    inputs.append(made)
                places.append(place)
            num_tokens.append(total)
            num_truncated += was_cut
        rows = np.array(places, np.intp).reshape((-1, 2) if is_comparison else -1)
        name = "" if is_comparison else self._prompt_of(request)
        return PoolInputs(request, inputs, list(found), rows, tuple(num_tokens), num_truncated, prompt=name)

    def _prompt_of(self, request: PoolingRequest) -> str:
        """Return the name of the prompt for a request; empty: none."""
        prompts = self.capabilities.prompts
        if request.prompt_name is not None:
            return request.prompt_name
        return next((name for name in request.prompt_hints if name in prompts), self.capabilities.default_prompt)

    def _check(self, request: PoolingRequest) -> None:
        limits, task = self.capabilities, self.info.task
        is_comparison = self.compares and request.task == "rerank" and task == "embed"
        if request.task != task and not is_comparison:
            raise UnsupportedTask(request.model or self.info.backend, task, request.task)
        if not request.inputs:
            raise InvalidRequest(f"{request.path}: must have at least one text", request.path)
        if request.dimensions is not None and (request.task != "embed" or request.dimensions not in self._dimensions):
            offered = ", ".join(map(str, sorted(self._dimensions))) if request.task == "embed" else "none"
            message = f"dimensions: this model offers {offered}, not {request.dimensions}"
            raise InvalidRequest(message, "dimensions")
        if request.prompt_name and request.prompt_name not in limits.prompts:
            offered = ", ".join(sorted(limits.prompts)) or "no prompts"
            message = f"prompt_name: this model has {offered}, not {quoted(request.prompt_name)}"
            raise InvalidRequest(message, "prompt_name")
        most = _MAX_RESULT_BYTES // (4 * limits.dimensions)
        if len(request.inputs) > most:
            message = f"{request.path}: has {len(request.inputs)} texts; with {limits.dimensions} numbers for each"
            raise InvalidRequest(f"{message}, a request may have {most}", request.path)

    def _texts(self, request: PoolingRequest, one: PoolText, *, is_comparison: bool) -> Iterator[tuple[PoolText, str]]:
        """Yield the text or texts of an input, each with its prompt."""
        prompts, name = self.capabilities.prompts, request.prompt_name
        usual = self._prompt_of(request)
        if not is_comparison:
            yield one, prompts.get(usual, "")
            return
        roles = ("query",), ("document", "passage", "corpus")
        for text, names in zip((one.text, one.second or ""), roles, strict=True):
            known = next((role for role in names if role in prompts), usual) if name is None else usual
            yield PoolText(text), prompts.get(known, "")

    def _input(self, request: PoolingRequest, text: PoolText, prompt: str, index: int) -> tuple[PoolerInput, int]:
        path, most = f"{request.path}[{index}]" if request.is_list else request.path, self.capabilities.max_tokens
        if text.token_ids is not None:
            made, num_tokens = self._given(request, text.token_ids, path, has_layout=bool(request.add_special_tokens))
        elif request.add_special_tokens is False and text.second is None:
            token_ids = _token_ids(self.tokenizer, text.text, prompt)
            made, num_tokens = self._given(request, tuple(token_ids), path, has_layout=False)
        else:
            self._check_form(text, path)
            if request.truncate == "none":  # a text that cannot fit need not be tokenized
                texts = (Segment(text.text), Segment(text.second or ""))
                self._check_length(min_tokens(self.tokenizer, texts), path, is_lower_bound=True)
            cut_at = None if request.truncate == "none" else request.max_tokens
            made, num_tokens = self.arrangement.make(text, prompt, request.truncate, cut_at)
        if len(made.token_ids) > most:
            self._check_length(num_tokens, path)
        if not len(made.token_ids):
            raise InvalidRequest(f"{path}: the text is empty", path)
        return made, num_tokens

    def _check_form(self, text: PoolText, path: str) -> None:
        """Check that a text of a pair comes with the other one, and a text for one with no second."""
        if self.info.task == "rerank" and text.second is None:
            raise InvalidRequest(f"{path}: this model needs two texts", path)
        if text.second is not None and self.capabilities.pair is None:
            raise InvalidRequest(f"{path}: this model takes one text, not two", path)

    def _check_length(self, num_tokens: int, path: str, *, is_lower_bound: bool = False) -> None:
        most = self.capabilities.max_tokens
        if num_tokens > most:
            about = "at least " if is_lower_bound else ""
            message = f"{path}: has {about}{num_tokens} tokens, but this model takes {most}"
            raise InvalidRequest(f"{message}; shorten the text, or set truncate", path)

    def _given(
        self, request: PoolingRequest, token_ids: tuple[int, ...], path: str, *, has_layout: bool
    ) -> tuple[PoolerInput, int]:
        """Return the input for the ids of a text, and its number of tokens before it was shortened."""
        limits, vocab_size = self.capabilities, self.info.vocab_size
        layout = limits.text if has_layout else TextLayout()
        num_added = layout.num_added(is_pair=False)
        num_tokens = len(token_ids) + num_added
        if self.info.task == "rerank":
            raise InvalidRequest(f"{path}: this model needs two texts, not token ids", path)
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            place = next(place for place, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
            where = f"{path}[{place}]"
            message = f"{where}: {token_ids[place]} is not a token id of this model, which are 0 to {vocab_size - 1}"
            raise InvalidRequest(message, where)
        if request.truncate != "none":
            room = max(0, min(limits.max_tokens, request.max_tokens or limits.max_tokens) - num_added)
            token_ids = tuple(_cut(list(token_ids), room, request.truncate))
        return layout.arrange(token_ids), num_tokens


def _key(one: PoolerInput) -> bytes:
    """Return bytes that are equal for equal inputs only."""
    return b"%d %d " % (one.num_prompt, -1 if one.second_from is None else one.second_from) + one.token_ids.tobytes()
