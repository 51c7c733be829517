"""States in pools: rows of sequences and checkpoints, and modules that read one row and write the one beside it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attrs import frozen  # noqa: E402
from torch import Tensor  # noqa: E402

from enginehouse_hf.cuda.mixers import PooledMixers  # noqa: E402
from enginehouse_hf.cuda.packing import Segment  # noqa: E402
from enginehouse_hf.cuda.state_pools import SequenceStates, StatePools  # noqa: E402
from enginehouse_hf.facts import StateForm  # noqa: E402
from enginehouse_hf.recurrent import Mixers  # noqa: E402

pytestmark = pytest.mark.hf

_CPU = torch.device("cpu")
_FORMS = (
    StateForm((0, "recurrent", 0), (1, 2, 3), torch.float32),
    StateForm((2, "recurrent", 0), (1, 2, 3), torch.float32),
    StateForm((0, "conv", 0), (1, 4), torch.bfloat16),
)


class _Sequences:
    """Sequences whose state after n tokens is the sum of these tokens."""

    def __init__(self, num_checkpoints: int = 8, max_tokens: int = 1) -> None:
        self.pools = StatePools(_FORMS, 4, _CPU, max_tokens)
        self.states = SequenceStates(self.pools, num_checkpoints * self.pools.bytes_per_state)
        self.tokens: dict[int, list[int]] = {}

    def open(self, sequence: int) -> None:
        self.states.open(sequence)
        self.tokens[sequence] = []

    def append(self, *parts: tuple[int, list[int]]) -> None:
        """A pass over several sequences."""
        around = self.states.rows([sequence for sequence, _ in parts])
        for source, target, (_, tokens) in zip(*around, parts, strict=True):
            for form in _FORMS:
                rows = self.pools.layer(form.key[0])[form.key[1:]]
                rows[target] = rows[source] + sum(tokens)
        for sequence, tokens in parts:
            self.states.advance(sequence, len(self.tokens[sequence]))
            self.tokens[sequence] += tokens

    def verify(self, *parts: tuple[int, list[int]]) -> None:
        """A pass that keeps the state after each token; that of a shorter part is padded with tokens of any value."""
        most = max(len(tokens) for _, tokens in parts)
        around = self.states.rows([sequence for sequence, _ in parts], most)
        for place, (sources, targets) in enumerate(pairwise(around)):
            for source, target, (_, tokens) in zip(sources, targets, parts, strict=True):
                for form in _FORMS:
                    rows = self.pools.layer(form.key[0])[form.key[1:]]
                    rows[target] = rows[source] + (tokens[place] if place < len(tokens) else 50)
        for sequence, tokens in parts:
            self.states.advance(sequence, len(self.tokens[sequence]), len(tokens))
            self.tokens[sequence] += tokens

    def truncate(self, sequence: int, length: int) -> int:
        num_held = len(self.tokens[sequence])
        kept = self.states.kept_length(sequence, length, num_held)
        self.states.cut(sequence, kept, num_held)
        del self.tokens[sequence][kept:]
        return kept

    def fork(self, source: int, sequence: int, length: int) -> int:
        num_held = len(self.tokens[source])
        kept = self.states.kept_length(source, length, num_held)
        self.states.fork(source, sequence, kept, num_held)
        self.tokens[sequence] = self.tokens[source][:kept]
        return kept

    def check(self, *sequences: int) -> None:
        """Every part of the state is the sum of the tokens."""
        for sequence in sequences:
            row = int(self.states.rows([sequence])[0, 0])
            for part in self.pools.parts(self.pools.read(row)):
                assert (part == sum(self.tokens[sequence])).all()


def test_a_sequence_goes_back_by_its_last_pass_or_to_a_checkpoint() -> None:
    sequences = _Sequences()
    sequences.open(0)
    sequences.append((0, [1, 2, 3]))
    sequences.states.keep(0, 3)
    sequences.append((0, [4, 5]))
    sequences.append((0, [6]))
    sequences.check(0)

    assert [sequences.states.kept_length(0, length, 6) for length in (6, 5, 4, 3, 2)] == [6, 5, 3, 3, 0]
    assert sequences.truncate(0, 5) == 5
    sequences.check(0)
    assert sequences.states.kept_length(0, 4, 5) == 3  # the other row is of tokens that were taken back
    sequences.append((0, [9, 9]))
    assert sequences.truncate(0, 6) == 5
    sequences.append((0, [7]))
    assert sequences.truncate(0, 4) == 3
    sequences.check(0)
    sequences.append((0, [8]))
    sequences.check(0)
    assert sequences.truncate(0, 2) == 0
    sequences.check(0)


def test_a_sequence_goes_back_into_a_pass_that_kept_its_states() -> None:
    """As often as its rows go round, beside another one whose part is shorter; other passes keep one state."""
    sequences = _Sequences(max_tokens=3)
    sequences.open(0)
    sequences.open(2)
    sequences.append((0, [1, 2, 3, 4, 5]), (2, [6]))
    for turn in range(9):
        num_held = len(sequences.tokens[0])
        sequences.verify((0, [7, 8, 9][: 1 + turn % 3]), (2, [3, 2]))
        sequences.check(0, 2)
        kept = num_held + 1 + turn // 3 % (1 + turn % 3)
        assert sequences.truncate(0, kept) == kept
        assert sequences.fork(2, 3, 1 + turn) == 1 + turn
        assert sequences.truncate(2, 2 + turn) == 2 + turn
        sequences.check(0, 2, 3)
        sequences.states.free(3)
    sequences.append((0, [4, 4]))
    sequences.check(0)
    num_held = len(sequences.tokens[0])

    found = [sequences.states.kept_length(0, num_held - back, num_held) for back in (0, 1, 2, 3)]
    assert found == [num_held, num_held - 2, num_held - 2, 0]


def test_a_fork_is_independent_of_its_source() -> None:
    sequences = _Sequences()
    sequences.open(0)
    sequences.append((0, [1, 2]))
    sequences.states.keep(0, 2)
    sequences.append((0, [3]))
    sequences.append((0, [4]))

    assert [sequences.fork(0, 1 + index, length) for index, length in enumerate((9, 3, 2))] == [4, 3, 2]
    sequences.check(0, 1, 2, 3)
    sequences.append((0, [5]), (1, [6, 7]), (3, [8]))
    sequences.states.free(0)
    sequences.open(0)
    sequences.append((0, [10]), (2, [11]))
    sequences.check(0, 1, 2, 3)
    assert [sequences.truncate(sequence, 3) for sequence in (0, 1, 2, 3)] == [1, 2, 3, 3]
    sequences.check(0, 1, 2, 3)


def test_a_saved_state_has_its_checkpoints() -> None:
    first, second = _Sequences(), _Sequences()
    first.open(1)
    first.append((1, [1]))
    first.append((1, [2, 3]))
    first.states.keep(1, 3)
    first.append((1, [4]))
    lengths, parts = first.states.saved(1, 4)
    second.states.load(0, lengths, iter([part.clone() for part in parts]))
    second.tokens[0] = list(first.tokens[1])

    assert lengths == [3]
    second.check(0)
    second.append((0, [5, 6]))
    assert second.truncate(0, 5) == 4
    assert second.truncate(0, 3) == 3
    second.check(0)


def test_checkpoints_are_limited_by_their_bytes() -> None:
    sequences = _Sequences(num_checkpoints=2)
    sequences.open(0)
    for token in range(4):
        sequences.append((0, [token]))
        sequences.states.keep(0, token + 1)

    assert [sequences.states.kept_length(0, length, 4) for length in (1, 2, 3)] == [0, 0, 3]


@frozen
class _Step:
    """A step without attention: single tokens of some rows, then longer spans of others."""

    num_decodes: int
    segments: list[Segment]
    query_ends: Tensor
    state_rows: Tensor
    pools: StatePools


def _step(pools: StatePools, *spans: tuple[int, int, int], device: torch.device = _CPU) -> _Step:
    """Spans as row, number of tokens, and number of tokens before."""
    segments, begin = [], 0
    for _, size, start in spans:
        segments.append(Segment(begin, begin + size, start))
        begin += size
    num_decodes = sum(size == 1 for _, size, _ in spans)
    rows = [[row for row, _, _ in spans], [row ^ 1 for row, _, _ in spans]]
    ends = [0, *(segment.end - num_decodes for segment in segments[num_decodes:])]
    return _Step(
        num_decodes,
        segments[num_decodes:],
        torch.tensor(ends, dtype=torch.int32, device=device),
        torch.tensor(rows, dtype=torch.int32, device=device),
        pools,
    )


@pytest.mark.parametrize("name", ["qwen3_5_text", "jamba", "nemotron_h", "lfm2"])
def test_modules_give_the_same_in_any_split_and_batch(random_model: Callable[[str], Path], name: str) -> None:
    """Of the text at once, in parts beside another sequence, and single tokens, also at the beginning."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(random_model(name), dtype=torch.float32)
    mixers = Mixers(model)
    (mixer, *_), hidden_size = mixers.all, model.config.hidden_size
    with torch.inference_mode():
        hidden = torch.randn(9, hidden_size, generator=torch.Generator().manual_seed(1))
        forms = _forms_of(mixer, hidden)
        pooled, pools = PooledMixers(mixers.all, forms, _CPU), StatePools(forms, 3, _CPU)

        def run(rows: list[tuple[int, int, int]], *parts: Tensor) -> tuple[Tensor, ...]:
            pooled.begin(_step(pools, *rows))
            return pooled.run(mixer.layer, torch.cat(parts)).split([len(part) for part in parts])

        (whole,) = run([(0, 9, 0)], hidden)
        (first,) = run([(2, 4, 0)], hidden[:4])
        single, second, other = run([(4, 1, 0), (3, 3, 4), (6, 3, 0)], hidden[:1], hidden[4:7], hidden[:3])
        singles = run([(2, 1, 7), (5, 1, 1)], hidden[7:8], hidden[1:2])
        (again,) = run([(2, 2, 7)], hidden[7:])  # as if the pass before had been taken back
        rows, cells = torch.tensor([[2, 7], [0, 1], [4, 5]]), torch.stack([hidden[7:], hidden[3:5]], 1)
        pooled.begin(_Step(4, [], torch.zeros(1, dtype=torch.int32), rows, pools))
        both = pooled.run(mixer.layer, cells.flatten(0, 1)).view(2, 2, -1)

    checked = (first, second, singles[0]), (single, singles[1]), (other,), (again,), (both[:, 0],)
    for found, begin in zip(checked, (0, 0, 0, 7, 7), strict=True):
        part = torch.cat(found)
        expected = whole[begin : begin + len(part)]
        assert float((part - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "lfm2"])
def test_kernels_give_what_the_module_gives(name: str, dtype: str) -> None:
    """Heads of the usual sizes; single tokens of many sequences, and spans of many lengths, from random states."""
    from functools import partial

    from transformers import AutoConfig, AutoModelForCausalLM

    from enginehouse_hf.cuda.recurrent_parts import find_part

    config = AutoConfig.for_model(
        name, hidden_size=256, intermediate_size=64, num_hidden_layers=2, vocab_size=32, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=128, linear_value_head_dim=128, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        layer_types=["conv" if name == "lfm2" else "linear_attention", "full_attention"],
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).cuda()
    device, near = model.device, 1e-4 if dtype == "float32" else 0.02
    spans = [*((2 * place, 1, 5) for place in range(40)), *((80 + 2 * place, size, place) for place, size in _SIZES)]
    num_tokens = sum(size for _, size, _ in spans)
    with torch.inference_mode():
        mixers = Mixers(model)
        mixer = mixers.all[0]
        hidden = torch.randn(num_tokens, 256, generator=torch.Generator().manual_seed(1)).to(device, model.dtype)
        forms = _forms_of(mixer, hidden)
        pooled, pools = PooledMixers(mixers.all, forms, device), [StatePools(forms, 60, device) for _ in range(2)]
        for states, others in zip(pools[0].layer(0).values(), pools[1].layer(0).values(), strict=True):
            states[:80].normal_(generator=torch.Generator(device).manual_seed(2))
            states[82:].normal_(generator=torch.Generator(device).manual_seed(3))  # row 80 is of an empty sequence
            others.copy_(states)
        results, ends = [], torch.zeros(1, dtype=torch.int32, device=device)
        rows = torch.arange(80, device=device).view(20, 4).T.contiguous()  # three tokens of each of 20 sequences
        for one in pools:
            pooled.begin(_step(one, *spans, device=device))
            result = pooled.run(0, hidden).float()
            results.append([result.sum(1) if result.dim() == 3 else result])
            pooled.begin(_Step(60, [], ends, rows, one))
            result = pooled.run(0, hidden[:60]).float()
            results[-1].append(result.sum(1) if result.dim() == 3 else result)
            pooled.use_kernels(partial(find_part, hidden_size=256))

    assert pooled.has_kernels
    parts = [*zip(*results, strict=True), *zip(pools[1].layer(0).values(), pools[0].layer(0).values(), strict=True)]
    for expected, found in parts:
        assert float((found.float() - expected.float()).norm() / expected.float().norm()) < near


_SIZES = tuple(enumerate((2, 3, 4, 15, 16, 17, 31, 64, 100)))


def _forms_of(mixer: Any, hidden: Tensor) -> tuple[StateForm, ...]:
    from enginehouse_hf.recurrent import LayerCache

    cache = LayerCache({})
    mixer.run(hidden[None, :2], cache)
    return tuple(StateForm((mixer.layer, *key), tuple(state.shape), state.dtype) for key, state in cache.states.items())
