"""Fields that have llama.cpp's names do what llama.cpp's own samplers do, on its vocabulary and logits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.sampler import History
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings
from enginehouse_samplers.adaptive_p import AdaptivePFields, AdaptivePSampler
from enginehouse_samplers.dry import DryFields, DrySampler
from enginehouse_samplers.dynatemp import DynatempFields, DynatempSampler
from enginehouse_samplers.mirostat import MirostatFields, MirostatSampler

from .drawing import sampler_for

pytestmark = pytest.mark.llamacpp

WORDS = 'the cat sat on a mat . \n He said : "hello there" * and then the dog said hello there again \n\n### User: hi'
BREAKERS = [["\n", ":", '"', "*"], ["hello there"], ["the"], ["\n\n###", " cat sat"]]
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Library:
    """llama.cpp's samplers over a vocabulary that is loaded without its model."""

    def __init__(self, path: Path) -> None:
        self.c = pytest.importorskip("llama_cpp.llama_cpp")
        self.c.llama_backend_init()
        params = self.c.llama_model_default_params()
        params.vocab_only = True
        self.model = self.c.llama_model_load_from_file(str(path).encode(), params)
        self.vocab = self.c.llama_model_get_vocab(self.model)
        self.token_bytes = tuple(map(self._piece, range(self.c.llama_vocab_n_tokens(self.vocab))))

    def _piece(self, token_id: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        length = self.c.llama_token_to_piece(self.vocab, token_id, buffer, 256, 0, True)
        return buffer.raw[:length]

    def tokenize(self, text: str) -> list[int]:
        buffer = (self.c.llama_token * 4000)()
        raw = text.encode()
        return list(buffer[: self.c.llama_tokenize(self.vocab, raw, len(raw), buffer, 4000, False, True)])

    def apply(self, sampler: Any, row: np.ndarray) -> tuple[np.ndarray, int]:
        """The candidates that a sampler leaves, in its order, and the place of the one that it picked."""
        possible = np.flatnonzero(row > -np.inf)
        candidates = np.zeros(possible.size, _CANDIDATE)
        candidates["id"], candidates["logit"] = possible, row[possible]
        array = self.c.llama_token_data_array()
        array.data = ctypes.cast(candidates.ctypes.data, self.c.llama_token_data_p)
        array.size, array.selected, array.sorted = possible.size, -1, False
        self.c.llama_sampler_apply(sampler, ctypes.byref(array))
        first = (ctypes.cast(array.data, ctypes.c_void_p).value - candidates.ctypes.data) // _CANDIDATE.itemsize
        return candidates[first : first + array.size], array.selected

    def dry(self, token_ids: list[int], fields: DryFields) -> dict[int, float]:
        """Penalty by token."""
        strings = [text.encode() for text in fields.dry_sequence_breakers]
        last_n = fields.dry_penalty_last_n if fields.dry_penalty_last_n >= 0 else len(token_ids) + 1
        sampler = self.c.llama_sampler_init_dry(
            self.vocab,
            fields.dry_multiplier,
            fields.dry_base,
            fields.dry_allowed_length,
            last_n,
            (ctypes.c_char_p * len(strings))(*strings),
            len(strings),
        )
        for token_id in token_ids:
            self.c.llama_sampler_accept(sampler, token_id)
        candidates, _ = self.apply(sampler, np.zeros(len(self.token_bytes), np.float32))
        self.c.llama_sampler_free(sampler)
        return {int(item["id"]): -float(item["logit"]) for item in candidates if item["logit"]}


@pytest.fixture(scope="module")
def library(smollm2_gguf: Path) -> Iterator[Library]:
    opened = Library(smollm2_gguf)
    yield opened
    opened.c.llama_model_free(opened.model)


@pytest.mark.parametrize("breakers", BREAKERS, ids=str)
def test_dry_penalises_what_llama_cpp_penalises(library: Library, breakers: list[str]) -> None:
    random = np.random.default_rng(len(breakers))
    plugin = DrySampler()
    num_penalised = 0
    for _ in range(25):
        token_ids = library.tokenize(" ".join(random.choice(WORDS.split(" "), random.integers(10, 80))))
        fields = DryFields(
            dry_multiplier=0.8,
            dry_allowed_length=int(random.integers(1, 4)),
            dry_penalty_last_n=int(random.choice([-1, 20])),
            dry_sequence_breakers=tuple(breakers),
        )
        step = plugin.create(fields)
        assert step is not None
        found = step.penalties(History(np.array(token_ids, np.int32), library.token_bytes))
        ours = {} if found is None else dict(zip(found.token_ids.tolist(), found.amounts.tolist(), strict=True))

        assert ours == pytest.approx(library.dry(token_ids, fields), rel=1e-3)
        num_penalised += len(ours)
    assert num_penalised >= 5


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_dynamic_temperature_is_that_of_llama_cpp(library: Library, exponent: float) -> None:
    for seed, spread in enumerate((0.5, 2.0, 6.0)):
        row = np.random.default_rng(seed).normal(0, spread, 500).astype(np.float32)
        sampler = library.c.llama_sampler_init_temp_ext(0.9, 0.6, exponent)
        candidates, _ = library.apply(sampler, row)
        library.c.llama_sampler_free(sampler)
        step = DynatempSampler().create(DynatempFields(dynatemp_range=0.6, dynatemp_exponent=exponent))
        assert step is not None
        best = candidates[candidates["logit"].argmax()]

        assert row.max() / best["logit"] == pytest.approx(step.temperature(row, 0.9), rel=1e-3)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_leaves_and_learns_what_llama_cpp_does(library: Library, version: int) -> None:
    """Our step is told what llama.cpp drew, so both must go on from the same state."""
    if version == 1:
        sampler = library.c.llama_sampler_init_mirostat(400, 7, 2.5, 0.3, 100)
    else:
        sampler = library.c.llama_sampler_init_mirostat_v2(7, 2.5, 0.3)
    step = MirostatSampler().create(MirostatFields(mirostat=version, mirostat_tau=2.5, mirostat_eta=0.3))
    assert step is not None
    random = np.random.default_rng(5)
    for _ in range(40):
        row = random.normal(0, 2, 400).astype(np.float32)
        candidates, place = library.apply(sampler, row)
        ordered = np.argsort(-row, kind="stable")
        kept = step(SimpleNamespace(logits=row[ordered], row=row))  # type: ignore[arg-type]  # all that it looks at

        assert sorted(candidates["id"]) == sorted(ordered[kept])
        weights = np.exp(row[candidates["id"]].astype(np.float64))
        step.accept(int(candidates["id"][place]), float(weights[place] / weights.sum()))
    library.c.llama_sampler_free(sampler)


def test_adaptive_p_weighs_and_learns_as_llama_cpp_does(library: Library) -> None:
    """Its probabilities before the draw; our step is told what it drew."""
    sampler = library.c.llama_sampler_init_adaptive_p(0.25, 0.8, 7)
    step = AdaptivePSampler().create(AdaptivePFields(adaptive_target=0.25, adaptive_decay=0.8))
    assert step is not None
    random = np.random.default_rng(5)
    for _ in range(40):
        row = random.normal(0, 2, 50).astype(np.float32)
        candidates, place = library.apply(sampler, row)
        ordered = np.argsort(-row, kind="stable")
        weights = step.weights(SimpleNamespace(logits=row[ordered]))  # type: ignore[arg-type]  # all that it looks at
        ours = np.zeros(row.size)
        ours[ordered] = weights / weights.sum()

        assert ours[candidates["id"]] == pytest.approx(candidates["p"], rel=1e-3, abs=1e-6)
        drawn = int(candidates["id"][place])
        library.c.llama_sampler_accept(sampler, drawn)
        powers = np.exp(row.astype(np.float64))
        step.accept(drawn, float(powers[drawn] / powers.sum()))
    library.c.llama_sampler_free(sampler)


@pytest.mark.parametrize(
    ("fields", "order", "chain"),
    [
        ({"typical_p": 0.7, "temperature": 0.8}, ["typical_p", "temperature"], ["typical"]),
        ({"top_n_sigma": 1.2}, ["top_n_sigma"], ["top_n_sigma"]),
        ({"top_k": 30, "typical_p": 0.6, "top_p": 0.9}, ["top_k", "typical_p", "top_p"], ["top_k", "typical", "top_p"]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.05}, ["xtc"], ["xtc"]),
        ({"top_p": 0.9, "min_p": 0.1}, ["min_p", "top_p"], ["min_p", "top_p"]),
    ],
    ids=str,
)
def test_truncations_keep_what_llama_cpp_keeps(
    library: Library, fields: dict[str, float], order: list[str], chain: list[str]
) -> None:
    """What many draws of ours can reach are the tokens that its chain leaves."""
    c = library.c
    make = {
        "typical": lambda: c.llama_sampler_init_typical(fields["typical_p"], 1),
        "top_n_sigma": lambda: c.llama_sampler_init_top_n_sigma(fields["top_n_sigma"]),
        "top_k": lambda: c.llama_sampler_init_top_k(int(fields["top_k"])),
        "top_p": lambda: c.llama_sampler_init_top_p(fields["top_p"], 1),
        "min_p": lambda: c.llama_sampler_init_min_p(fields["min_p"], 1),
        "xtc": lambda: c.llama_sampler_init_xtc(fields["xtc_probability"], fields["xtc_threshold"], 1, 1),
    }
    row = np.random.default_rng(8).normal(0, 0.9, 60).astype(np.float32)
    left = row.copy()
    for name in chain:
        sampler = make[name]()
        candidates, _ = library.apply(sampler, left)
        c.llama_sampler_free(sampler)
        left = np.full_like(row, -np.inf)
        left[candidates["id"]] = candidates["logit"]
    samplers = PluginRegistry.load(PluginsSettings(allow=("samplers",))).samplers
    ours = sampler_for({"temperature": 1.0, **fields}, samplers, vocab_size=row.size, order=order)
    drawn = {ours.sample(row.copy(), position).token_id for position in range(4000)}

    assert drawn == set(np.flatnonzero(left > -np.inf).tolist())
