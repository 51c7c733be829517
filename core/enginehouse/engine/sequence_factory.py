"""Makes the sequences of a request after checking it, and restores the state of resumed ones.

Called by the loop when a request is added. A resumed sequence replays its known tokens through text, penalties,
grammar, reasoning and samplers; outputs reported before are not reported again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from enginehouse.contract.backend import Runner
from enginehouse.contract.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from enginehouse.contract.media import MAX_IMAGE_PIXELS
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.structured import BacktrackingMatcher, Grammar, StructuredDecoder
from enginehouse.contract.types import EngineCapabilities, EngineRequest, Resume, ResumedChoice
from enginehouse.engine.checkpoints import choose_places
from enginehouse.engine.constraints import Constraints, ConstraintState, ReasoningGate
from enginehouse.engine.media import PlacedChunk, chunk_makers_of, without_media
from enginehouse.engine.sampling.device_draws import can_draw
from enginehouse.engine.sampling.plugin_steps import build_steps
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse.engine.sequence import ActiveRequest, Sequence
from enginehouse.engine.text.text_stream import Detokenizer, TextStream
from enginehouse.plugins import guard_of, guarded, plain


def restore(owner: ActiveRequest, resume: Resume) -> None:
    """Replay the tokens in ``resume`` into a request's new sequences, one sequence per resumed choice.

    Raises:
        Exception: any exception of a grammar or sampler for a token that it allowed before.
    """
    for sequence, told in zip(owner.sequences, resume.choices, strict=True):
        _restore(sequence, told, is_thinking_stopped=resume.is_thinking_stopped)
        if sequence.choice == 0:
            sequence.num_scored = resume.num_scored
        if resume.is_thinking_stopped and sequence.reasoning is not None:
            sequence.reasoning.close_now()


def _restore(sequence: Sequence, told: ResumedChoice, *, is_thinking_stopped: bool) -> None:
    forced: deque[int] = deque()
    reasoning = sequence.reasoning if is_thinking_stopped else None
    probabilities = told.probabilities or (None,) * len(told.token_ids)
    for index, (token_id, probability) in enumerate(zip(told.token_ids, probabilities, strict=True)):
        if reasoning is not None and reasoning.is_closed_by(told.token_ids[index:]):
            reasoning.close_now()  # reasoning was stopped by request at this point
        if not forced:
            forced.extend(sequence.forced_token_ids())
        is_forced = bool(forced)  # then it was forced originally, and counts as forced again
        if is_forced:
            forced.popleft()
        sequence.sampler.recall(token_id, probability)
        sequence.append(token_id, is_forced=is_forced)
    sequence.settle()
    sequence.num_reported = len(sequence.probabilities)
    sequence.pending_logprobs.extend(told.held_logprobs)


class SequenceFactory:
    """Validates requests and creates their sequences, with samplers, text streams and constraints.

    Args:
        runner: used only for its tokenizer and capabilities.
        samplers: plugins whose fields requests may set in ``sampling.extensions``, by name.
        decoders: plugins that enforce ``EngineRequest.constraint``.
    """

    def __init__(
        self, runner: Runner, samplers: Mapping[str, SamplerPlugin], decoders: Iterable[StructuredDecoder]
    ) -> None:
        self._runner = runner
        self._tokenizer = runner.tokenizer
        self._samplers = samplers
        self._constraints = Constraints(decoders, runner.tokenizer)

    @property
    def capabilities(self) -> EngineCapabilities:
        """Supported request features: sampling fields of the runner, sampler plugins, constraint kinds."""
        runner: Any = self._runner
        media = tuple(chunk_makers_of(self._runner))
        return EngineCapabilities(
            native=tuple(sorted(self._runner.capabilities.sampling)),
            samplers=tuple(sorted(self._samplers)),
            constraint_kinds=self._constraints.kinds,
            constraint_problem=self._constraints.problem,
            adapters=self._runner.capabilities.adapters,
            media=media,
            max_image_pixels=min(runner.max_image_pixels, MAX_IMAGE_PIXELS) if "image" in media else 0,
            audio_rate=runner.audio_rate if "audio" in media else 0,
        )

    def check_length(self, num_prompt_tokens: int, is_lower_bound: bool = False) -> None:
        """Reject a prompt that does not fit the context. Any thread.

        Raises:
            ContextLengthExceeded: the prompt and one more token do not fit.
        """
        max_context = self._runner.capabilities.max_context
        if num_prompt_tokens + 1 > max_context:
            raise ContextLengthExceeded(num_prompt_tokens, max_context, is_lower_bound=is_lower_bound)

    def check(self, request: EngineRequest, num_prompt_tokens: int, chunks: tuple[PlacedChunk, ...] = ()) -> None:
        """Reject a request that cannot be served. Any thread.

        Raises:
            ContextLengthExceeded: the prompt and one more token do not fit.
            InvalidRequest: empty prompt, or one that ends with media, token ids outside the vocabulary, or a constraint
                that cannot be enforced.
            UnsupportedParameter: log-probabilities of a prompt with images or recordings.
        """
        vocab_size = self._tokenizer.vocab_size
        if num_prompt_tokens < 1:
            raise InvalidRequest("The prompt is empty: it has no tokens.", "prompt")
        self.check_length(num_prompt_tokens)
        if chunks and chunks[-1].end == num_prompt_tokens:
            raise InvalidRequest(
                "messages: the prompt ends with an image or a recording; the chat template must end with text"
            )
        if chunks and request.num_prompt_logprobs is not None:
            message = "prompt_logprobs: log-probabilities of a prompt with images or recordings are not computed"
            raise UnsupportedParameter(message, "prompt_logprobs")
        for token_ids, param in ((request.token_ids, "prompt"), (request.stopping.stop_token_ids, "stop_token_ids")):
            bad_ids = [token_id for token_id in token_ids or () if not 0 <= token_id < vocab_size]
            if bad_ids:
                message = f"Token ids must be in [0, {vocab_size}); got {', '.join(map(str, bad_ids[:8]))}."
                raise InvalidRequest(message, param)
        bad_keys = [key for key in request.sampling.logit_bias if not 0 <= key < vocab_size]
        if bad_keys:
            message = f"logit_bias keys must be token ids in [0, {vocab_size}); got {', '.join(map(str, bad_keys))}."
            raise InvalidRequest(message, f"logit_bias.{bad_keys[0]}")
        build_steps(request.sampling, self._samplers, request.request_id)
        if request.constraint is not None:
            grammar = self._constraints.compile(request.constraint)
            if self._runner.capabilities.truncate == "none" and isinstance(grammar.start(), BacktrackingMatcher):
                message = "cannot be enforced with this model: its answers would have to be taken back in part"
                raise InvalidRequest(f"{request.constraint.param}: {message}.", request.constraint.param)

    def make(
        self,
        request: EngineRequest,
        prompt_token_ids: list[int],
        arrival: int,
        now_s: float,
        *,
        resume: Resume | None = None,
        chunks: tuple[PlacedChunk, ...] = (),
    ) -> ActiveRequest:
        """Create a checked request with its sequences; ``resume`` restores the state where they continue.

        Raises:
            Exception: any exception of a plugin.
        """
        prompt = np.array(prompt_token_ids, np.int32)
        room = self._runner.capabilities.max_context - len(prompt)
        limit = request.stopping.max_tokens
        max_length = len(prompt) + (room if limit is None else min(limit, room))
        places = choose_places(prompt, self._tokenizer) if self._runner.capabilities.truncate == "checkpoint" else ()
        owner = ActiveRequest(request, prompt, arrival, now_s, chunks, places, is_resumed=resume is not None)
        choices = range(request.num_choices) if resume is None else [told.choice for told in resume.choices]
        owner.sequences = [self._make_sequence(owner, choice, max_length) for choice in choices]
        owner.num_unfinished = len(owner.sequences)
        if resume is not None:
            restore(owner, resume)
        return owner

    def _make_sequence(self, owner: ActiveRequest, choice: int, max_length: int) -> Sequence:
        request, tokenizer = owner.request, self._tokenizer
        buffer = np.empty(max_length, np.int32)
        buffer[: len(owner.prompt)] = owner.prompt
        make_sampler = partial(self._make_sampler, owner, choice)
        stopping = request.stopping
        hidden = self._hidden_token_ids(request)
        text = TextStream(tokenizer.token_bytes, hidden, stopping.stop, stopping.stop_regex)
        sequence = Sequence(owner, choice, buffer, len(owner.prompt), make_sampler(), text, make_sampler)
        # A prompt that is only scored leaves no space for a sampled token.
        sequence.on_device = max_length > len(owner.prompt) and can_draw(self._runner, request)
        own = frozenset() if stopping.ignore_eos else tokenizer.end_token_ids
        sequence.end_token_ids = own | frozenset(stopping.stop_token_ids)
        if request.reasoning is not None:
            closing = tokenizer.encode(request.reasoning.end, special=True)
            detokenizer = Detokenizer(tokenizer.token_bytes, self._hidden_token_ids(request))
            sequence.reasoning = ReasoningGate(request.reasoning, tuple(closing), detokenizer)
        if request.constraint is not None:
            grammar = self._constraints.compile(request.constraint)
            guard = guard_of(grammar, "structured decoder").of_request(request.request_id)
            matcher = guarded(plain(grammar), Grammar, guard).start()
            sequence.constraint = ConstraintState(matcher, tokenizer.vocab_size, guard)
        return sequence

    def _make_sampler(self, owner: ActiveRequest, choice: int) -> SequenceSampler:
        request, tokenizer = owner.request, self._tokenizer
        return SequenceSampler(
            request.sampling,
            choice=choice,
            vocab_size=tokenizer.vocab_size,
            prompt_token_ids=without_media(owner.prompt) if owner.chunks else owner.prompt,
            steps=build_steps(request.sampling, self._samplers, request.request_id),
            token_bytes=tokenizer.token_bytes,
        )

    def _hidden_token_ids(self, request: EngineRequest) -> frozenset[int]:
        """Return the control tokens, except reasoning and call markers, which must be visible in the output."""
        markers = request.shown_tokens
        if request.reasoning is not None:
            markers = (*markers, request.reasoning.start, request.reasoning.end)
        if not markers:
            return self._tokenizer.control_token_ids
        special = self._tokenizer.special_tokens
        shown = {special.get(marker, -1) for marker in markers}
        joined = [marker for marker in markers if marker not in special]  # may hold several control tokens
        shown |= {token_id for token, token_id in special.items() if any(token in marker for marker in joined)}
        return self._tokenizer.control_token_ids - shown
