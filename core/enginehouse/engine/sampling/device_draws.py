"""Sampling on the device: tokens that the runner samples itself and the host reads one step later.

A sequence is sampled on the device if the runner's capabilities include everything that its request asks for. The next
forward pass is then launched before the token has reached the host: the runner knows it, core reads it while the device
computes. Sequences whose next step depends on the token (drafts, grammars, penalties, reasoning with a limit) are
sampled on the device as well, but read at once. With drafts, every row is sampled in the same launch: a sampled token
does not depend on whether the draft before it is correct; only its use does.

Called by the loop. Does not know text or scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import cast

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import DeviceSampler, Draw, Drawn, ForwardOutput, Runner, Sampled
from enginehouse.contract.errors import EnginehouseError, GenerationFailed
from enginehouse.contract.types import EngineRequest, SamplingParams
from enginehouse.engine.constraints import TokenMask
from enginehouse.engine.forward import Computed, Fail, Rows, read_exit_layers, read_rows
from enginehouse.engine.sampling.candidates import uniform
from enginehouse.engine.sequence import Sequence
from enginehouse.plugins import Guard

_BAN, _FORCE = -100.0, 100.0  # a bias that forces a token bans all others; only core does this
_DEFAULTS = SamplingParams()
_BY_CORE = ("seed", "repeat_last_n")  # a draw gets the number, and the tokens to penalise


@frozen(eq=False)
class DeviceDraws:
    """Tokens that the device samples for one sequence.

    Attributes:
        rows: of the pass; one, or with drafts one for each token.
        is_checking: True if the tokens verify drafts; the sequence grows only by those that agree.
    """

    sequence: Sequence
    rows: range
    is_checking: bool


@frozen(eq=False)
class InFlightStep:
    """Results of a forward pass that are not processed yet.

    Attributes:
        on_host: rows that the host samples from.
        on_device: tokens sampled on the device, in the order of ``drawn``.
        output: of the pass, which says how many layers were computed for them.
    """

    on_host: Rows = field(factory=list)
    on_device: list[DeviceDraws] = field(factory=list)
    drawn: Drawn | None = None
    output: ForwardOutput | None = None

    @property
    def is_synchronous(self) -> bool:
        """True if the results must be processed before the next forward pass."""
        return bool(self.on_host) or any(draws.sequence.is_sequential for draws in self.on_device)


def can_draw(runner: Runner, request: EngineRequest) -> bool:
    """Return True if sampling on the device supports everything that the request asks for."""
    known, sampling = runner.capabilities.sampling, request.sampling
    if not known or max(sampling.logit_bias.values(), default=0.0) >= _FORCE:
        return False
    if request.constraint is not None and ("mask" not in known or sampling.logit_bias):
        return False  # a grammar takes precedence over a bias, which requires reading the row on the host
    names = (name for name in sampling.__struct_fields__ if name not in _BY_CORE)
    return all(name in known or getattr(sampling, name) == getattr(_DEFAULTS, name) for name in names)


def launch(runner: Runner, computed: Computed, fail: Fail, guard: Guard) -> InFlightStep:
    """Start sampling on the device; return without waiting for the results.

    If the runner fails to sample, its rows are read, and the host samples.
    """
    on_device: list[DeviceDraws] = []
    draws: list[Draw] = []
    for sequence, rows in computed.on_device:
        if sequence.handle is None:
            continue  # it has ended since the pass was launched
        try:
            draws += [_draw(sequence, sequence.handle, row, ahead) for ahead, row in enumerate(rows)]
        except EnginehouseError as error:
            fail(sequence.owner, error)
            continue
        on_device.append(DeviceDraws(sequence, rows, is_checking=sequence.num_surplus > 0))
    if not draws:
        return InFlightStep(computed.on_host)
    assert computed.output is not None
    try:
        drawn = cast(DeviceSampler, runner).sample(computed.output, draws)  # guaranteed by its capabilities
    except EnginehouseError:
        return InFlightStep(computed.on_host + _rows_on_host(computed, fail, guard))
    for part in on_device:
        part.sequence.num_pending += not part.is_checking
    return InFlightStep(computed.on_host, on_device, drawn, computed.output)


def read_drawn(step: InFlightStep, guard: Guard) -> Iterator[tuple[DeviceDraws, list[Sampled], int | None]]:
    """Wait for the tokens of a step; return those of each sequence, and the number of layers computed for them.

    Raises:
        EnginehouseError: the pass failed after it was launched.
    """
    if step.drawn is None or step.output is None:
        return iter(())
    tokens = iter(step.drawn.host())
    exit_layers = read_exit_layers(step.output, [(draws.sequence, draws.rows) for draws in step.on_device], guard)
    found = [list(islice(tokens, len(draws.rows))) for draws in step.on_device]
    return zip(step.on_device, found, exit_layers, strict=True)


def valid(sampled: Sampled) -> Sampled:
    """Return a token that was drawn. Raises GenerationFailed if none could be."""
    if sampled.token_id < 0:
        raise GenerationFailed("No token can be sampled: all logits are -inf or not finite.")
    return sampled


def _rows_on_host(computed: Computed, fail: Fail, guard: Guard) -> Rows:
    """Return the rows that the device was to sample from; if they cannot be read, their requests fail."""
    assert computed.output is not None
    parts = [part for part in computed.on_device if part[0].handle is not None]
    try:
        found = read_rows(computed.output, parts, guard)
        exit_layers = read_exit_layers(computed.output, parts, guard)
    except EnginehouseError as error:
        for sequence, _ in parts:
            fail(sequence.owner, error)
        return []
    for (sequence, _), exit_layer in zip(parts, exit_layers, strict=True):
        sequence.exit_layer = exit_layer
    return found


def _draw(sequence: Sequence, handle: int, row: int, ahead: int) -> Draw:
    """Return the sampling parameters of the token ``ahead`` positions after the next one.

    Raises:
        EnginehouseError: the grammar of the sequence failed.
    """
    sampling = sequence.owner.request.sampling
    number = 0.0
    if sampling.temperature:
        position = sequence.num_generated + sequence.num_pending + ahead
        number = uniform(sampling.seed, sequence.choice, position)
    draw = Draw(row=row, sequence=handle, sampling=sampling, number=number)
    mask, penalties = sequence.mask(), sequence.sampler.penalties
    if mask is None and penalties is None and not sampling.logit_bias:
        return draw
    bias_ids, bias_values = _bias(sampling.logit_bias, mask)
    seen_ids, seen_counts = penalties.seen if penalties is not None else (None, None)
    return evolve(
        draw,
        bias_ids=bias_ids,
        bias_values=bias_values,
        seen_ids=seen_ids,
        seen_counts=seen_counts,
        bitmask=_bitmask(mask),
    )


def _bias(bias: Mapping[int, float], mask: TokenMask | None) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return token ids and the values added to their logits.

    Banned tokens get -inf; if there is a bitmask, :func:`_bitmask` removes them instead, unless nothing else is
    allowed.
    """
    values = {token_id: value if value > _BAN else -np.inf for token_id, value in bias.items()}
    if mask is not None and mask.bitmask is None:
        values |= dict.fromkeys(mask.banned, -np.inf)
    return np.fromiter(values.keys(), np.int64, len(values)), np.fromiter(values.values(), np.float32, len(values))


def _bitmask(mask: TokenMask | None) -> NDArray[np.int32] | None:
    """Return the bitmask without the banned tokens; unchanged if no other token is allowed."""
    if mask is None or mask.bitmask is None or not mask.banned:
        return mask.bitmask if mask is not None else None
    allowed = mask.bitmask.view(np.uint32).copy()
    for token_id in mask.banned:
        allowed[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    return allowed.view(np.int32) if allowed.any() else mask.bitmask
