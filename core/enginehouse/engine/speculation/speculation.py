"""Speculation: gets drafts for sequences from drafters, and decides how many of their tokens to compute.

Called by the loop before each step, on the engine thread. The draft of a sequence is in ``Sequence.drafts``; the
scheduler appends it to the last token, the loop verifies it. This module samples nothing and cannot change any text.

Drafts of drafters without cost are compared with the generated tokens even while they are not used, to detect when they
begin to pay off. A drafter that costs model time is asked only if it is expected to pay off, and occasionally to update
its estimate.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field

from enginehouse.contract.backend import Runner
from enginehouse.contract.drafter import NUM_GRADES, BoundDrafter, Draft, DraftTask
from enginehouse.contract.errors import PluginFailed
from enginehouse.engine.scheduler import Batch
from enginehouse.engine.sequence import Sequence as EngineSequence
from enginehouse.engine.speculation.draft_length import (
    MAX_DRAFT_TOKENS,
    AcceptanceRates,
    Candidate,
    DrafterBudget,
    StepCosts,
    choose_lengths,
)
from enginehouse.plugins import Guard, guard_of, guarded

_LOOK_EVERY = 48  # steps after which a costly drafter that did not pay off is asked again
_LOOK_TOKENS = 2
_READ_AT_ONCE_STEPS = 16  # steps without a draft after which tokens may stay on the device again


@define(eq=False)
class _Bound:
    """One drafter bound to this model, with its statistics."""

    name: str
    drafter: BoundDrafter
    rates: AcceptanceRates
    drafter_budget: DrafterBudget = field(factory=DrafterBudget)
    seconds_per_token: float = 0.0
    has_drafted: bool = False


@define(eq=False)
class _Session:
    bound: _Bound
    session: Any
    rates: AcceptanceRates
    num_steps_unasked: int = 0


@define(eq=False)
class SequenceDrafts:
    """Speculation state of one sequence.

    Attributes:
        draft: the last draft, not yet compared with the generated tokens; it begins at index ``start``.
        num_used: number of its tokens computed in a step.
        num_idle_steps: steps since a draft was used, or a drafter waited for the last token.
    """

    sessions: list[_Session] = field(factory=list)
    draft: Draft | None = None
    drafted_by: _Session | None = None
    start: int = 0
    num_used: int = 0
    num_idle_steps: int = _READ_AT_ONCE_STEPS

    @property
    def drafter(self) -> str | None:
        """Name of the drafter of the last draft."""
        return self.drafted_by.bound.name if self.drafted_by is not None else None


class Speculation:
    """The drafters of one model.

    Args:
        drafters: drafters by name, in order of preference: a sequence takes the first draft available.
        runner: runner of the model; used only for its limits and vocabulary size.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        drafters: Mapping[str, BoundDrafter],
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafters = [
            _Bound(name, guarded(one, BoundDrafter, guard_of(one, "drafter", name)), AcceptanceRates(prior=one.prior))
            for name, one in drafters.items()
        ]
        self._runner = runner
        self._clock = clock
        self._costs = StepCosts()
        self._at_work: list[tuple[EngineSequence, _Bound]] = []  # owners of the drafts computed in this step

    # -- sequences ---------------------------------------------------------------------------------

    def open(self, sequence: EngineSequence) -> None:
        """Open drafter sessions of a starting sequence; waiting ones have none, as draft models have few slots."""
        if sequence.speculation is not None:
            return  # it was preempted and resumes
        owner, drafts = sequence.owner, SequenceDrafts()
        prompt = sequence.text_token_ids[: len(owner.prompt)]
        for bound in self._drafters:
            session = None
            with contextlib.suppress(PluginFailed):  # the sequence continues without it
                session = bound.drafter.open(prompt, owner.request.prediction_token_ids)
            if session is not None:
                drafts.sessions.append(_Session(bound, session, AcceptanceRates(above=bound.rates)))
        sequence.speculation = drafts if drafts.sessions else None

    def close(self, sequence: EngineSequence) -> None:
        """Close the sessions of a sequence that has ended or continues without drafts; idempotent."""
        if sequence.speculation is not None:
            sessions, sequence.speculation = sequence.speculation.sessions, None
            sequence.reads_at_once = False
            for session in sessions:
                self._close(session)

    def reopen(self, sequence: EngineSequence) -> None:
        """Open the sessions of a sequence anew: they follow a text that only grows, and some of it was taken back."""
        if sequence.speculation is not None:
            self.close(sequence)
            self.open(sequence)

    def shutdown(self) -> None:
        """Shut down all drafters; called when the model is closed."""
        for bound in self._drafters:
            with contextlib.suppress(PluginFailed):
                bound.drafter.shutdown()

    @staticmethod
    def _close(session: _Session) -> None:
        with contextlib.suppress(PluginFailed):
            session.bound.drafter.close(session.session)

    # -- one step ----------------------------------------------------------------------------------

    def prepare(self, running: Sequence[EngineSequence]) -> None:
        """Choose the drafts that the next step computes."""
        if not self._drafters:
            return
        self._at_work = []
        for sequence in running:
            sequence.drafts, sequence.num_confirmed = (), 0
        if any(sequence.num_remaining > 1 for sequence in running):
            return  # the budget belongs to the prompt; drafts would delay running streams further
        if len(running) > 1 and not self._runner.capabilities.mixed_batch:
            return  # drafts and single tokens would need separate passes
        drafting = [sequence for sequence in running if sequence.speculation is not None]
        for sequence in drafting:
            self._compare(sequence)
        wanting = [sequence for sequence in drafting if _room_in(sequence) > 0]
        if wanting:
            self._propose(wanting)
            self._choose(wanting, len(running))

    def observe(self, batch: Batch, seconds: float) -> None:
        """Record the duration of a step; steps with prompt tokens are ignored."""
        if not self._drafters or not batch.spans:
            return
        sizes = [1 + len(sequence.drafts) for sequence in batch.sequences]
        if sizes == [span.num_tokens for span in batch.spans]:
            self._settle(sizes, seconds)
            self._costs.observe(sum(sizes), seconds)

    def _settle(self, sizes: Sequence[int], seconds: float) -> None:
        """Update the drafters' ledgers with the gain and cost of this step."""
        num_drafted = sum(sizes) - len(sizes)
        usual_s, plain_s = self._costs.estimate(sum(sizes)), self._costs.estimate(len(sizes))
        for bound in self._drafters:
            own = [sequence for sequence, its in self._at_work if its is bound]
            if not own or not num_drafted:
                bound.drafter_budget.add_plain()
            elif self._costs.is_known:
                saved = sum(sequence.num_confirmed for sequence in own) / len(sizes)
                share = sum(len(sequence.drafts) for sequence in own) / num_drafted
                bound.drafter_budget.add_drafted(saved, share, seconds, usual_s, plain_s)

    def _compare(self, sequence: EngineSequence) -> None:
        """Compare the last draft with the generated tokens and update the acceptance rates."""
        drafts = sequence.speculation
        assert drafts is not None
        written = sequence.token_ids[drafts.start :]
        if drafts.draft is None or drafts.drafted_by is None or not len(written):
            return
        compared = min(max(1, drafts.num_used), len(written))
        expected = np.asarray(drafts.draft.token_ids[:compared], np.int32)
        agreed = int(np.cumprod(expected == written[: len(expected)]).sum())
        drafts.drafted_by.rates.observe(drafts.draft.grade, agreed, agreed < len(expected))
        drafts.draft = None

    def _propose(self, sequences: Sequence[EngineSequence]) -> None:
        """Get a draft for each sequence, from the first of its drafters that has one."""
        waiting = [sequence for sequence in sequences if sequence.speculation is not None]
        for bound in self._drafters:
            asked = [(sequence, session) for sequence in waiting if (session := self._asks(sequence, bound))]
            if not asked:
                continue
            tasks = [_task(sequence, session) for sequence, session in asked]
            began, cpu_began = self._clock(), time.thread_time()
            checked = None
            with contextlib.suppress(PluginFailed):
                checked = self._check(bound, bound.drafter.propose(tasks), tasks)
            if checked is None:
                self._abandon(asked)
                continue
            self._note_proposing(bound, checked, self._clock() - began, time.thread_time() - cpu_began)
            for (sequence, session), draft in zip(asked, checked, strict=True):
                drafts = sequence.speculation
                assert drafts is not None
                if draft is not None:
                    drafts.draft, drafts.drafted_by = draft, session
                    drafts.start, drafts.num_used = sequence.length, 0
                    waiting.remove(sequence)

    def _asks(self, sequence: EngineSequence, bound: _Bound) -> _Session | None:
        """Return the session of the drafter if it should be asked now."""
        drafts = sequence.speculation
        session = next((s for s in drafts.sessions if s.bound is bound), None) if drafts is not None else None
        if session is None or bound.drafter.is_free:
            return session
        assert drafts is not None
        if not bound.drafter_budget.is_open:
            return None
        session.num_steps_unasked += 1
        candidate = Candidate(session.rates.rate(NUM_GRADES // 2), MAX_DRAFT_TOKENS, bound.seconds_per_token)
        pays = choose_lengths([candidate], 0, MAX_DRAFT_TOKENS, self._costs)[0] > 0
        if not pays and session.num_steps_unasked < _LOOK_EVERY:
            return None
        if sequence.num_pending:  # the draft would start a token too early; the next step will not
            drafts.num_idle_steps = 0 if pays else _READ_AT_ONCE_STEPS - 1
            return None
        session.num_steps_unasked = 0
        return session

    def _check(self, bound: _Bound, drafts: Sequence[Draft | None], tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """Return the drafts in a valid form; invalid ones must not reach the runner.

        Raises:
            PluginFailed: their number is wrong, or one contains something else than token ids of the vocabulary.
        """
        guard = guard_of(bound.drafter, "drafter")
        if len(drafts) != len(tasks):
            raise guard.mistake("propose", f"gave {len(drafts)} drafts for {len(tasks)} tasks")
        with guard.calling("propose"):
            return [self._checked(draft, task, guard) for draft, task in zip(drafts, tasks, strict=True)]

    def _checked(self, draft: Draft | None, task: DraftTask, guard: Guard) -> Draft | None:
        if draft is None:
            return None
        token_ids = [int(token_id) for token_id in draft.token_ids[: task.max_tokens]]
        if not all(0 <= token_id < self._runner.tokenizer.vocab_size for token_id in token_ids):
            raise guard.mistake("propose", "gave a draft with token ids outside the vocabulary")
        return Draft(token_ids, _grade(draft)) if token_ids else None

    def _note_proposing(self, bound: _Bound, drafts: Sequence[Draft | None], seconds: float, cpu_s: float) -> None:
        guard = guard_of(bound.drafter, "drafter")
        if self._costs.is_known and not guard.is_own and seconds > (step_s := self._costs.estimate(len(drafts))):
            consequence = "as long as a step without drafts, and all sequences wait for it"
            guard.failures.slow(guard, "propose", seconds, max_s=step_s, consequence=consequence, cpu_s=cpu_s)
        num_tokens = sum(len(draft.token_ids) for draft in drafts if draft is not None)
        if num_tokens and not bound.drafter.is_free:
            if not bound.has_drafted:
                bound.has_drafted = True
                return  # kernels and libraries may be loaded by the first draft
            if self._costs.is_known:
                usual_s = bound.seconds_per_token * num_tokens or seconds
                bound.drafter_budget.add_proposing(seconds, usual_s, self._costs.estimate(len(drafts)))
            measured = seconds / num_tokens
            bound.seconds_per_token += (measured - bound.seconds_per_token) * (0.2 if bound.seconds_per_token else 1.0)

    def _abandon(self, asked: Sequence[tuple[EngineSequence, _Session]]) -> None:
        """Close this drafter's sessions of these sequences."""
        for sequence, session in asked:
            assert sequence.speculation is not None
            sequence.speculation.sessions.remove(session)
            self._close(session)

    def _choose(self, sequences: Sequence[EngineSequence], num_running: int) -> None:
        """Assign to each sequence the part of its draft that pays off."""
        proposed = [(s, s.speculation) for s in sequences if s.speculation is not None and _may_use(s.speculation)]
        candidates = [_candidate(drafts) for _, drafts in proposed]
        room = self._runner.capabilities.max_batch_tokens - num_running
        lengths = choose_lengths(candidates, num_running - len(proposed), room, self._costs)
        if sum(lengths) and self._runner.free_tokens() < sum(lengths) + num_running:
            lengths = [0] * len(lengths)  # no sequence is preempted for a draft
        for (sequence, drafts), length in zip(proposed, lengths, strict=True):
            if length:
                drafts.num_idle_steps = 0
            if length and not sequence.num_pending:
                assert drafts.draft is not None and drafts.drafted_by is not None
                drafts.num_used = length
                sequence.drafts = drafts.draft.token_ids[:length]
                self._at_work.append((sequence, drafts.drafted_by.bound))
        for sequence in sequences:
            if sequence.speculation is not None:
                sequence.reads_at_once = sequence.speculation.num_idle_steps < _READ_AT_ONCE_STEPS
                sequence.speculation.num_idle_steps += 1


def _may_use(drafts: SequenceDrafts) -> bool:
    return drafts.draft is not None and drafts.drafted_by is not None and drafts.drafted_by.bound.drafter_budget.is_open


def _candidate(drafts: SequenceDrafts) -> Candidate:
    assert drafts.draft is not None and drafts.drafted_by is not None
    session = drafts.drafted_by
    rate = session.rates.rate(drafts.draft.grade)
    return Candidate(rate, len(drafts.draft.token_ids))  # already proposed: the cost is spent


def _room_in(sequence: EngineSequence) -> int:
    """Return the maximum number of draft tokens: the last token of a sequence is never computed."""
    return sequence.max_length - sequence.length - sequence.num_pending - 1


def _task(sequence: EngineSequence, session: _Session) -> DraftTask:
    assert sequence.handle is not None
    longest = MAX_DRAFT_TOKENS if session.bound.drafter.is_free else _paid_length(session.bound)
    limit = max(1, min(longest, _room_in(sequence)))
    return DraftTask(session.session, sequence.text_token_ids, sequence.handle, limit)


def _paid_length(bound: _Bound) -> int:
    """Return the draft length for a costly drafter: up to the first token with a chance below 0.5."""
    rate, length, likely = bound.rates.rate(NUM_GRADES // 2), 0, 1.0
    while length < MAX_DRAFT_TOKENS and likely >= 0.5:
        likely *= rate
        length += 1
    return max(_LOOK_TOKENS, length)


def _grade(draft: Draft) -> int:
    return min(max(int(draft.grade), 0), NUM_GRADES - 1)
