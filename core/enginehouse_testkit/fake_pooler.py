"""A pooler and a backend without a model library: rows are hashes of token ids.

Each token and each pair of neighbours has a fixed random direction, and an embedding is their sum: texts with common
words are near each other, word order matters a little, and one wrong or missing token changes the row. The logit of a
pair of texts is the cosine of their embeddings, times a factor; logits of a classifier are the first numbers of the
embedding. Options inject faults, hold passes while a file exists, and record passes in a file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Progress, Tokenizer
from enginehouse.contract.errors import ModelLoadError, StepAborted
from enginehouse.contract.pooler import PoolerCapabilities, PoolerInput, TextLayout
from enginehouse.contract.types import ModelInfo, PoolTask
from enginehouse_testkit.fake_options import FakeFaults
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

__all__ = ["FakePooler", "FakePoolerBackend", "FakePoolerOptions"]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_LOGIT_SCALE = 8.0
_POLL_S = 0.002


@frozen(kw_only=True)
class FakePoolerOptions:
    """Settings of the fake pooler.

    Attributes:
        task: what the model does.
        context: longest input in tokens, four of them around the text or less; None is 512.
        slots: accepted, without effect.
        max_batch_tokens: tokens of one pass; None is four inputs of the longest.
        max_batch_texts: inputs of one pass.
        pass_tokens: as in :class:`PoolerCapabilities`.
        dimensions: width of an embedding.
        is_normalized: embeddings have length 1.
        dimension_choices: as in :class:`PoolerCapabilities`; so are ``prompts``, ``default_prompt``,
            ``include_prompt`` and ``labels``. ``rerank`` has one label without a name if there are none.
        weights_bytes: what the model is said to need.
        pass_s: duration of each pass.
        open_delay_s: duration of loading.
        hold: a file; while it exists, passes wait, and heed ``abort``.
        log: a file, to which each pass appends a line: JSON list of the token ids of its inputs.
        faults: injected faults, by pass or by token.
    """

    task: PoolTask = "embed"
    context: int | None = field(default=None, validator=validators.optional(validators.ge(8)))
    slots: int = field(default=8, validator=validators.ge(1))
    max_batch_tokens: int | None = None
    max_batch_texts: int = field(default=64, validator=validators.ge(1))
    pass_tokens: int | None = None
    dimensions: int = field(default=32, validator=validators.ge(1))
    is_normalized: bool = True
    dimension_choices: tuple[int, ...] = ()
    prompts: dict[str, str] = field(factory=dict)
    default_prompt: str = ""
    include_prompt: bool = True
    labels: tuple[str, ...] = ()
    weights_bytes: int = 1_000_000
    pass_s: float = field(default=0.0, validator=validators.ge(0.0))
    open_delay_s: float = field(default=0.0, validator=validators.ge(0.0))
    hold: str | None = None
    log: str | None = None
    faults: FakeFaults = field(factory=FakeFaults)


class FakePooler:
    """See :class:`enginehouse.contract.pooler.Pooler`; counts its passes in ``num_passes``."""

    def __init__(self, options: FakePoolerOptions | None = None) -> None:
        self.options = options = options or FakePoolerOptions()
        self.tokenizer: Tokenizer = FakeTokenizer(abort_at_text=options.faults.abort_at_text)
        special = self.tokenizer.special_tokens
        begin, end, between = special["<|bos|>"], special["<|eos|>"], special["<|im_end|>"]
        max_tokens = options.context or 512
        labels = options.labels or (("negative", "positive") if options.task == "classify" else ())
        self.capabilities = PoolerCapabilities(
            max_tokens=max_tokens,
            max_batch_tokens=options.max_batch_tokens or 4 * max_tokens,
            max_batch_texts=options.max_batch_texts,
            pass_tokens=options.pass_tokens,
            dimensions=options.dimensions if options.task == "embed" else max(1, len(labels)),
            text=TextLayout(before=(begin,), after=(end,)),
            pair=TextLayout((begin,), (between, between), (end,), types=True) if options.task == "rerank" else None,
            pooling="mean" if options.task == "embed" else "rank",
            is_normalized=options.is_normalized,
            dimension_choices=options.dimension_choices,
            prompts=options.prompts,
            default_prompt=options.default_prompt,
            include_prompt=options.include_prompt,
            labels=labels,
            activation="none" if options.task == "embed" else "sigmoid" if len(labels) < 2 else "softmax",
            batch_invariant=True,
        )
        self.info = ModelInfo(
            backend="fake-pooler",
            max_context=max_tokens,
            vocab_size=self.tokenizer.vocab_size,
            special_tokens=dict(special),
            bos_token="<|bos|>",
            eos_token="<|eos|>",
            metadata={"architecture": "hash"},
            task=options.task,
        )
        self.num_passes = 0
        self._aborted = threading.Event()

    def pool(self, inputs: Sequence[PoolerInput]) -> NDArray[np.float32]:
        """See :class:`enginehouse.contract.pooler.Pooler`."""
        self._aborted.clear()
        self._check(inputs)
        self.num_passes += 1
        token_ids = [one.token_ids.tolist() for one in inputs]
        if self.options.log is not None:
            with open(self.options.log, "ab") as file:
                file.write(msgspec.json.encode(token_ids) + b"\n")
        self.options.faults.happen(self.num_passes, token_ids)
        self._wait()
        rows = np.array([self._row(one) for one in inputs], np.float32).reshape(-1, self.capabilities.dimensions)
        for row, ids in zip(rows, token_ids, strict=True):
            if self.options.faults.nan_at_token in ids:
                row[:] = np.nan
        return rows

    def abort(self) -> None:
        """See :class:`enginehouse.contract.pooler.Pooler`."""
        self._aborted.set()

    def close(self) -> None:
        """See :class:`enginehouse.contract.pooler.Pooler`; idempotent."""

    def _check(self, inputs: Sequence[PoolerInput]) -> None:
        """Refuse what core must never send; a library would crash."""
        sizes, limits = [len(one.token_ids) for one in inputs], self.capabilities
        assert inputs, "a pass needs an input"
        assert len(inputs) <= limits.max_batch_texts, f"{len(inputs)} inputs in one pass"
        assert min(sizes) > 0, "an input is empty"
        assert max(sizes) <= limits.max_tokens, f"an input of {max(sizes)} tokens"
        assert sum(sizes) <= limits.max_batch_tokens, f"{sum(sizes)} tokens in one pass"
        assert all(one.token_ids.min() >= 0 and one.token_ids.max() < self.info.vocab_size for one in inputs)

    def _wait(self) -> None:
        """Wait as long as a pass takes, and while passes are held."""
        is_aborted = self.options.pass_s > 0 and self._aborted.wait(self.options.pass_s)
        while not is_aborted and self.options.hold is not None and Path(self.options.hold).exists():
            is_aborted = self._aborted.wait(_POLL_S)
        if is_aborted:
            raise StepAborted({})

    def _row(self, one: PoolerInput) -> NDArray[np.float32]:
        token_ids = one.token_ids[one.num_prompt :]
        if self.options.task == "rerank" and one.second_from is not None:
            first, second = token_ids[: one.second_from], token_ids[one.second_from :]
            logit = float(_embedding(first, 64) @ _embedding(second, 64)) * _LOGIT_SCALE
            row: NDArray[np.float32] = np.full(self.capabilities.dimensions, logit, np.float32)
            row /= np.arange(1, 1 + len(row), dtype=np.float32)
            return row
        row = _embedding(token_ids, self.capabilities.dimensions)
        if self.options.task == "embed" and not self.options.is_normalized:
            row *= len(token_ids)
        elif self.options.task == "classify":
            row *= _LOGIT_SCALE
        return row


def _embedding(token_ids: NDArray[np.int32], dimensions: int) -> NDArray[np.float32]:
    """Return the sum of the directions of tokens and of pairs of neighbours, of length 1."""
    ids = token_ids.astype(np.uint64) + np.uint64(1)
    pairs = ids[:-1] * np.uint64(1 << 20) + ids[1:]
    total = _directions(np.concatenate([ids, pairs]), dimensions).sum(axis=0)
    length = np.linalg.norm(total)
    row: NDArray[np.float32] = (total / length if length else total).astype(np.float32)
    return row


def _directions(numbers: NDArray[np.uint64], dimensions: int) -> NDArray[np.float64]:
    """Return a random vector for each number, (num_numbers, dimensions), by splitmix64's finaliser; from -1 to 1."""
    mixed = numbers[:, None] * _GAMMA + np.arange(1, dimensions + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    uniform: NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    return uniform


class FakePoolerBackend:
    """Opens :class:`FakePooler`. Its only source is the word ``fake-pooler``; the option ``task`` says what it does."""

    name = "fake-pooler"
    api_version = 1
    options = FakePoolerOptions
    opens: Literal["model"] = "model"

    def probe(self) -> Probe:
        """See :class:`enginehouse.contract.backend.Backend`."""
        return Probe(available=True, devices=("cpu",))

    def match(self, source: ModelSource) -> Match:
        """See :class:`enginehouse.contract.backend.Backend`."""
        if source.text == "fake-pooler":
            return Match(1.0, "the built-in fake pooling model")
        return Match(0.0, "the fake pooler only opens the source 'fake-pooler'")

    def estimate(self, source: ModelSource, options: FakePoolerOptions) -> MemoryEstimate:
        """See :class:`enginehouse.contract.backend.Backend`."""
        return MemoryEstimate(options.weights_bytes, 0, options.weights_bytes + 1000)

    def open(self, source: ModelSource, options: FakePoolerOptions, progress: Progress) -> FakePooler:
        """See :class:`enginehouse.contract.backend.Backend`."""
        if options.faults.refuse_to_open is not None:
            raise ModelLoadError(options.faults.refuse_to_open)
        progress(0.0, "imagining weights")
        time.sleep(options.open_delay_s)
        progress(1.0, "ready")
        return FakePooler(options)
