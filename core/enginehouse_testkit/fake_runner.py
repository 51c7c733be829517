"""A runner and a backend without a model library, for tests of all components above them.

The runner is as strict as a real one: positions are cells of a pool that forked sequences share, every span is checked
before anything changes, and a state that was not computed cannot be read. Options select the difficult kinds of runner
(sliding window, recurrent, no fork, small cache, slow) and inject faults.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import (
    DRAW_FIELDS,
    Draw,
    ForwardOutput,
    LastSampled,
    Match,
    MemoryEstimate,
    ModelSource,
    Probe,
    Progress,
    RunnerCapabilities,
    Span,
    Tokenizer,
)
from enginehouse.contract.errors import CacheFull, InvalidSpan, ModelLoadError, StepAborted
from enginehouse.contract.exit_policy import BoundExitPolicy
from enginehouse.contract.media import DecodedAudio, DecodedImage, MediaChunk, MediaInput, MediaKind, whole_chunks
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.checkpoints import Checkpoints
from enginehouse_testkit.fake_adapters import FakeAdapters, read_fake_adapter, salt_of
from enginehouse_testkit.fake_exits import FakeExits
from enginehouse_testkit.fake_heads import FakeHead, check_fake_head
from enginehouse_testkit.fake_media import AUDIO_RATE, IMAGE_TEMPLATE, encode_fake, prepare_fake, prepare_fake_audio
from enginehouse_testkit.fake_model import FakeModel, State
from enginehouse_testkit.fake_options import FakeFaults, FakeOptions
from enginehouse_testkit.fake_sampling import FakeDrawn, draw_token
from enginehouse_testkit.fake_states import pack_cells, unpack_cells
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

__all__ = ["FakeBackend", "FakeFaults", "FakeOptions", "FakeRunner"]

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _Rows:
    """The rows of one forward pass."""

    def __init__(
        self,
        rows: Sequence[NDArray[np.float32]] | NDArray[np.float32],
        vocab_size: int,
        exit_layers: Sequence[int] | None = None,
    ) -> None:
        self.num_rows = len(rows)
        if exit_layers is not None:
            self.exit_layers = exit_layers
        self._rows = np.array(rows, np.float32).reshape(self.num_rows, vocab_size)

    def host(self) -> NDArray[np.float32]:
        """Return (num_rows, vocab_size) float32."""
        return self._rows

    def select(self, rows: Sequence[int]) -> _Rows:
        """Return only these rows."""
        return _Rows(self._rows[list(rows)], self._rows.shape[1])


class _Cell:
    """One KV position: a token and the state after it, computed by a number of layers. ``owners`` counts sequences."""

    __slots__ = ("num_layers", "owners", "state", "token_id")

    def __init__(self, token_id: int, state: State, num_layers: int) -> None:
        self.token_id, self.state, self.num_layers, self.owners = token_id, state, num_layers, 1


def _kinds(options: FakeOptions) -> tuple[MediaKind, ...]:
    """Return the kinds of media that the model takes."""
    images: tuple[MediaKind, ...] = ("image",) if options.image_tokens else ()
    return (*images, "audio") if options.audio_tokens else images


class FakeRunner:
    """See :class:`enginehouse.contract.backend.Runner`; counts its forward passes, and the chunks that it encodes."""

    max_image_pixels = 256 * 256
    audio_rate = AUDIO_RATE

    def __init__(self, options: FakeOptions | None = None) -> None:
        self.options = options = options or FakeOptions()
        context = options.context or 4096
        if options.window and options.num_checkpoints:
            raise ModelLoadError("a fake model has a window or checkpoints, not both")
        try:
            self.tokenizer: Tokenizer = FakeTokenizer(options.vocab_size, options.faults.abort_at_text)
        except ValueError as error:
            raise ModelLoadError(str(error)) from error
        self.capabilities = RunnerCapabilities(
            exit_layers=tuple(range(1, options.num_layers)),
            max_sequences=options.max_sequences or 4 * options.slots,
            max_batch_tokens=options.max_batch_tokens,
            max_context=context,
            cache_tokens=options.cache_tokens or context * options.slots,
            mixed_batch=options.mixed_batch,
            truncate="bounded" if options.window else "checkpoint" if options.num_checkpoints else "any",
            fork=options.fork,
            batch_invariant=True,
            abort=True,
            sampling=DRAW_FIELDS if options.device_sampling else frozenset(),
            states=options.states,
            adapters=options.mixing,
            media=_kinds(options),
        )
        self.state_format = (
            f"fake {options.vocab_size} {options.window} {options.num_layers} {bool(options.num_checkpoints)}"
        )
        self.info = ModelInfo(
            backend="fake",
            max_context=context,
            vocab_size=self.tokenizer.vocab_size,
            chat_templates={"default": IMAGE_TEMPLATE if _kinds(options) else _CHATML},
            special_tokens=dict(self.tokenizer.special_tokens),
            bos_token="<|bos|>",
            eos_token="<|im_end|>",
            infill_tokens=options.infill_tokens,
            generation_defaults=options.recommends,
            metadata={"architecture": "hash"},
        )
        self.num_steps = self.num_encoded = 0
        self.num_layers = options.num_layers
        self._model = FakeModel(self.tokenizer, options.end_logit)
        self._adapters = FakeAdapters()
        self._salt = salt_of((read_fake_adapter(Path(name))[0], scale) for name, scale in options.merged.items())
        self._exits = FakeExits(self._model, options.num_layers)
        self._sequences: dict[int, list[_Cell]] = {}
        self._num_lost: dict[int, int] = {}  # number of first positions that are lost, with a window
        self._states: dict[int, State] = {}  # with checkpoints: the state of each sequence, of which there is only one
        self._checkpoints = Checkpoints[State](options.num_checkpoints)
        self._next_handle = 0
        self._num_cells = 0
        self._aborted = threading.Event()
        self._last_sampled: dict[int, int] = {}

    @property
    def sequences(self) -> dict[int, list[int]]:
        """Token ids of the open sequences by handle."""
        return {handle: [cell.token_id for cell in cells] for handle, cells in self._sequences.items()}

    def open_sequence(self) -> int:
        """See :class:`enginehouse.contract.backend.Runner`."""
        if len(self._sequences) >= self.capabilities.max_sequences:
            raise CacheFull(1, self.free_tokens())
        self._next_handle += 1
        self._sequences[self._next_handle] = []
        self._num_lost[self._next_handle] = 0
        self._states[self._next_handle] = self._model.start()
        return self._next_handle

    def free_sequence(self, sequence: int) -> None:
        """See :class:`enginehouse.contract.backend.Runner`."""
        self._release(self._cells(sequence))
        del self._sequences[sequence], self._num_lost[sequence], self._states[sequence]
        self._checkpoints.free(sequence)
        self._last_sampled.pop(sequence, None)

    def length(self, sequence: int) -> int:
        """See :class:`enginehouse.contract.backend.Runner`."""
        return len(self._cells(sequence))

    def truncate(self, sequence: int, length: int) -> int:
        """See :class:`enginehouse.contract.backend.Runner`."""
        cells = self._cells(sequence)
        if length < 0:
            raise InvalidSpan(f"a sequence cannot be truncated to {length} tokens")
        kept = self._kept(sequence, length)
        if kept < len(cells):
            self._go_back(sequence, sequence, kept)
        self._release(cells[kept:])
        del cells[kept:]
        if not kept:
            self._num_lost[sequence] = 0
        return kept

    def kept_length(self, sequence: int, length: int) -> int:
        """See :class:`enginehouse.contract.backend.CutPlanner`."""
        return self._kept(sequence, length)

    def keep_checkpoint(self, sequence: int) -> None:
        """See :class:`enginehouse.contract.checkpoints.CheckpointKeeper`; each state counts as one byte."""
        length = len(self._cells(sequence))
        if length and not self._checkpoints.has(sequence, length):
            self._checkpoints.keep(sequence, length, self._states[sequence], 1)

    def _go_back(self, source: int, sequence: int, length: int) -> None:
        """Give a sequence, which may be the source itself, the state of the source at a shorter length."""
        if not self.options.num_checkpoints:
            return
        self._states[sequence] = self._checkpoints.state(source, length) if length else self._model.start()
        self._checkpoints.cut(sequence, length)

    def _kept(self, sequence: int, length: int) -> int:
        """Return the length that can be kept: not before a window, and where there is a copy of the state."""
        cells = self._cells(sequence)
        if length >= len(cells):
            return len(cells)
        if self.capabilities.media:
            length = whole_chunks(np.array([cell.token_id for cell in cells], np.int32), length)
        if self.options.num_checkpoints:
            return self._checkpoints.last_length(sequence, length)
        if self.options.window is None:
            return length
        return length if max(0, length - self.options.window) >= self._num_lost[sequence] else 0

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """See :class:`enginehouse.contract.backend.Runner`."""
        cells = self._cells(source)
        shared = 0 if self.capabilities.fork == "none" else self._kept(source, length)
        copied = shared if self.capabilities.fork == "copy" else 0
        if copied > self.free_tokens():
            raise CacheFull(copied, self.free_tokens())
        handle = self.open_sequence()
        if copied:
            self._sequences[handle] = [_Cell(cell.token_id, cell.state, cell.num_layers) for cell in cells[:shared]]
            self._num_cells += copied
        else:
            for cell in cells[:shared]:
                cell.owners += 1
            self._sequences[handle] = cells[:shared]
        self._num_lost[handle] = self._num_lost[source] if shared else 0
        self._checkpoints.share(source, handle, shared)
        self._states[handle] = self._states[source]
        if shared < len(cells):
            self._go_back(source, handle, shared)
        return handle, shared

    def save(self, sequence: int) -> memoryview:
        """See :class:`enginehouse.contract.backend.StateKeeper`."""
        cells = [(cell.token_id, cell.state, cell.num_layers) for cell in self._cells(sequence)]
        return pack_cells(cells, [length for length, _ in self._checkpoints.saved(sequence, len(cells))])

    def load(self, data: memoryview) -> int:
        """See :class:`enginehouse.contract.backend.StateKeeper`."""
        saved, lengths = unpack_cells(data)
        cells = [_Cell(token_id, state, num_layers) for token_id, state, num_layers in saved]
        if len(cells) > self.free_tokens():
            raise CacheFull(len(cells), self.free_tokens())
        handle = self.open_sequence()
        self._sequences[handle] = cells
        self._num_lost[handle] = max(0, len(cells) - (self.options.window or len(cells)))
        self._num_cells += len(cells)
        self._states[handle] = cells[-1].state if cells else self._model.start()
        for length in lengths:
            self._checkpoints.keep(handle, length, cells[length - 1].state, 1)
        return handle

    def invocation_tokens(self, path: Path) -> tuple[int, ...]:
        """See :class:`enginehouse.contract.adapters.AdapterKeeper`."""
        return read_fake_adapter(path)[1]

    def load_adapter(self, path: Path) -> int:
        """See :class:`enginehouse.contract.adapters.AdapterKeeper`."""
        return self._adapters.load(path)

    def unload_adapter(self, adapter: int) -> None:
        """See :class:`enginehouse.contract.adapters.AdapterKeeper`."""
        self._adapters.unload(adapter)

    def prepare_image(self, image: DecodedImage) -> Sequence[Sequence[int] | MediaChunk]:
        """See :class:`enginehouse.contract.media.MediaRunner`."""
        return prepare_fake(image, self.options.image_tokens)

    def prepare_audio(self, audio: DecodedAudio) -> Sequence[Sequence[int] | MediaChunk]:
        """See :class:`enginehouse.contract.media.AudioRunner`."""
        return prepare_fake_audio(audio, self.options.audio_tokens)

    def encode(self, chunk: MediaChunk) -> NDArray[np.uint64]:
        """See :class:`enginehouse.contract.media.MediaRunner`."""
        self._aborted.clear()
        self.num_encoded += 1
        self.options.faults.happen_at_encode(self.num_encoded)
        if self._aborted.wait(self.options.step_delay_s):
            raise StepAborted({})
        return encode_fake(chunk)

    def free_tokens(self) -> int:
        """See :class:`enginehouse.contract.backend.Runner`."""
        return self.capabilities.cache_tokens - self._num_cells

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        """See :class:`enginehouse.contract.backend.Runner`."""
        inputs = [self._checked(span) for span in spans]
        self._check_batch(spans, inputs)
        self._aborted.clear()
        self.num_steps += 1
        self.options.faults.happen(self.num_steps, inputs)
        rows: list[NDArray[np.float32]] = []
        exit_layers: list[int] = []
        for span, token_ids in zip(spans, inputs, strict=True):
            if self._aborted.wait(self.options.step_delay_s / len(spans)):
                raise StepAborted({span.sequence: self.length(span.sequence) for span in spans})
            for row, num_layers in self._append(span, token_ids):
                rows.append(row)
                exit_layers.append(num_layers)
            if self.options.faults.nan_at_token in token_ids and span.outputs != "none":
                rows[-1] = np.full_like(rows[-1], np.nan)
        if self.num_steps == self.options.faults.nan_at_step and rows:
            rows[0] = np.full_like(rows[0], np.nan)
        return _Rows(rows, self.tokenizer.vocab_size, exit_layers if self._exits.policy is not None else None)

    def use_exit_policy(self, policy: BoundExitPolicy | None) -> None:
        """See :class:`enginehouse.contract.exit_policy.LayerAccess`."""
        if not self.capabilities.exit_layers and policy is not None:
            raise ModelLoadError("this fake model has no layers; set num_layers")
        self._exits.policy = policy

    def open_head(self, source: ModelSource | None, *, max_tokens: int, min_probability: float) -> FakeHead:
        """See :class:`enginehouse.contract.drafter.HeadKeeper`."""
        if not self.options.draft_head or self.capabilities.truncate != "any":
            raise ModelLoadError("this fake model has no draft head; set draft_head, without window or num_checkpoints")
        if source is not None:
            check_fake_head(source)
        return FakeHead(
            model=self._model, state_of=self._last_state, max_tokens=max_tokens, min_probability=min_probability
        )

    def _last_state(self, sequence: int) -> State:
        cells = self._cells(sequence)
        return cells[-1].state if cells else self._model.start()

    def sample(self, output: ForwardOutput, draws: Sequence[Draw]) -> FakeDrawn:
        """See :class:`enginehouse.contract.backend.DeviceSampler`; tokens are available at once, but read later."""
        drawn = FakeDrawn([draw_token(output.host()[draw.row], draw) for draw in draws])
        for draw, sampled in zip(draws, drawn.sampled, strict=True):
            self._last_sampled[draw.sequence] = max(sampled.token_id, 0)
        return drawn

    def abort(self) -> None:
        """See :class:`enginehouse.contract.backend.Runner`."""
        self._aborted.set()

    def close(self) -> None:
        """See :class:`enginehouse.contract.backend.Runner`; idempotent."""
        self._sequences.clear()
        self._num_lost.clear()
        self._states.clear()
        self._checkpoints.clear()
        self._num_cells = 0

    def _cells(self, sequence: int) -> list[_Cell]:
        try:
            return self._sequences[sequence]
        except KeyError:
            raise InvalidSpan(f"sequence {sequence} is not open") from None

    def _release(self, cells: Sequence[_Cell]) -> None:
        for cell in cells:
            cell.owners -= 1
            self._num_cells -= cell.owners == 0

    def _checked(self, span: Span) -> list[int]:
        length = self.length(span.sequence)
        if span.adapter and self.capabilities.adapters == "none":
            raise InvalidSpan("this runner takes no adapters")
        self._adapters.salt(span.adapter)
        if isinstance(span.input, LastSampled):
            if span.sequence not in self._last_sampled or span.start != length:
                raise InvalidSpan(f"no token was sampled for sequence {span.sequence} at {span.start}")
            return [self._last_sampled[span.sequence]]
        if isinstance(span.input, MediaInput):
            return self._checked_chunk(span, span.input)
        if span.input.ndim != 1 or not span.input.size:
            raise InvalidSpan(f"a span needs at least one token; sequence {span.sequence} has none")
        if span.start != length:
            raise InvalidSpan(f"sequence {span.sequence} holds {length} tokens, but the span starts at {span.start}")
        if span.num_layers is not None and span.num_layers not in self.capabilities.exit_layers:
            raise InvalidSpan(f"a pass cannot be left after {span.num_layers} layers")
        num_layers = span.num_layers or self.options.num_layers
        if any(cell.num_layers < num_layers for cell in self._cells(span.sequence)):
            raise InvalidSpan(f"sequence {span.sequence} holds tokens that fewer than {num_layers} layers have seen")
        if span.outputs not in ("none", "last", "all"):
            raise InvalidSpan(f"unknown outputs {span.outputs!r}")
        if span.input.min() < 0 or span.input.max() >= self.tokenizer.vocab_size:
            raise InvalidSpan(f"sequence {span.sequence} has token ids outside the vocabulary")
        if length + span.input.size > self.capabilities.max_context:
            raise InvalidSpan(f"sequence {span.sequence} would grow beyond the context")
        token_ids: list[int] = span.input.tolist()
        return token_ids

    def _checked_chunk(self, span: Span, media: MediaInput) -> list[int]:
        """Return the pseudo-tokens of a chunk."""
        length, num_tokens = self.length(span.sequence), media.chunk.num_tokens
        if media.chunk.kind not in self.capabilities.media or span.outputs != "none" or span.num_layers is not None:
            raise InvalidSpan("a chunk needs a runner that takes its kind, and gives no logits")
        if span.start != length or length + num_tokens > self.capabilities.max_context:
            raise InvalidSpan(
                f"sequence {span.sequence} holds {length} tokens; {num_tokens} cannot start at {span.start}"
            )
        if not len(media.token_ids) == len(np.asarray(media.embedding)) == num_tokens or media.token_ids.max() >= 0:
            raise InvalidSpan(f"a chunk of {num_tokens} tokens has other ids or another embedding")
        return list(media.token_ids.tolist())

    def _check_batch(self, spans: Sequence[Span], inputs: Sequence[list[int]]) -> None:
        if not spans:
            raise InvalidSpan("a forward pass needs at least one span")
        if len({span.sequence for span in spans}) < len(spans):
            raise InvalidSpan("a sequence has two spans in one forward pass")
        if self.capabilities.adapters == "per_pass" and len({span.adapter for span in spans}) > 1:
            raise InvalidSpan("this runner takes spans with other adapters in separate passes")
        sizes = [len(token_ids) for token_ids in inputs]
        has_chunk = any(isinstance(span.input, MediaInput) for span in spans)
        if has_chunk and len(spans) > 1:
            raise InvalidSpan("a pass with a chunk of an image has no other span")
        if not has_chunk and sum(sizes) > self.capabilities.max_batch_tokens:
            raise InvalidSpan(f"{sum(sizes)} tokens do not fit {self.capabilities.max_batch_tokens} of one pass")
        if not self.capabilities.mixed_batch and 1 in sizes and max(sizes) > 1:
            raise InvalidSpan("this runner takes long and one-token spans in separate passes")
        if sum(sizes) > self.free_tokens():
            raise CacheFull(sum(sizes), self.free_tokens())

    def _append(self, span: Span, token_ids: list[int]) -> list[tuple[NDArray[np.float32], int]]:
        """Extend one sequence; return the rows of logits that its span requests, and the number of layers of each."""
        cells = self._sequences[span.sequence]
        states, salt = [], self._salt ^ self._adapters.salt(span.adapter)
        is_chunk = isinstance(span.input, MediaInput)
        numbers = np.asarray(span.input.embedding).tolist() if isinstance(span.input, MediaInput) else token_ids
        for token_id, number in zip(token_ids, numbers, strict=True):
            states.append(self._next_state(span.sequence, -1 - number if is_chunk else number, salt))
            cells.append(_Cell(token_id, states[-1], span.num_layers or self.options.num_layers))
            self._forget(span.sequence)
        self._num_cells += len(token_ids)
        wanted = {"none": [], "last": states[-1:], "all": states}[span.outputs]
        if span.num_layers is not None:
            return [(self._exits.logits(state, span.num_layers), span.num_layers) for state in wanted]
        if span.may_exit and len(token_ids) == 1:
            return [self._exits.leave(state) for state in wanted]
        return [(self._model.logits(state), self.num_layers) for state in wanted]

    def _next_state(self, sequence: int, token_id: int, salt: int) -> State:
        cells, window = self._sequences[sequence], self.options.window
        if self.options.num_checkpoints:
            self._states[sequence] = self._model.advance(self._states[sequence], token_id, salt)
            return self._states[sequence]
        if window is None:
            return self._model.advance(cells[-1].state if cells else self._model.start(), token_id, salt)
        first = max(0, len(cells) + 1 - window)
        assert first >= self._num_lost[sequence], "a cut kept less than it said"
        return self._model.window_state([*(cell.token_id for cell in cells[first:]), token_id], len(cells) + 1, salt)

    def _forget(self, sequence: int) -> None:
        """Drop the positions before the window and its slack."""
        if self.options.window is not None:
            num_kept = self.options.window + self.options.window_slack
            self._num_lost[sequence] = max(self._num_lost[sequence], len(self._sequences[sequence]) - num_kept)


class FakeBackend:
    """Opens :class:`FakeRunner`. Its only source is the word ``fake``."""

    name = "fake"
    api_version = 1
    options = FakeOptions
    opens: Literal["model"] = "model"

    def probe(self) -> Probe:
        """See :class:`enginehouse.contract.backend.Backend`."""
        return Probe(available=True, devices=("cpu",))

    def match(self, source: ModelSource) -> Match:
        """See :class:`enginehouse.contract.backend.Backend`."""
        if source.text == "fake":
            return Match(1.0, "the built-in fake model")
        return Match(0.0, "the fake backend only opens the source 'fake'")

    def estimate(self, source: ModelSource, options: FakeOptions) -> MemoryEstimate:
        """See :class:`enginehouse.contract.backend.Backend`."""
        bytes_per_token = 200
        return MemoryEstimate(0, bytes_per_token, bytes_per_token * (options.context or 4096) * options.slots)

    def open(self, source: ModelSource, options: FakeOptions, progress: Progress) -> FakeRunner:
        """See :class:`enginehouse.contract.backend.Backend`."""
        if options.faults.refuse_to_open is not None:
            raise ModelLoadError(options.faults.refuse_to_open)
        num_parts = 10
        for part in range(num_parts):
            progress(part / num_parts, "imagining weights")
            time.sleep(options.open_delay_s / num_parts)
        progress(1.0, "ready")
        return FakeRunner(options)
