"""The numpy sampler beside llama.cpp's C samplers: microseconds for one row of logits.

Both get the same rows. ``peaked`` rows resemble a model that knows what comes next; ``flat`` rows are the
worst case for a sampler that avoids sorting. For the C chain, filling its array of candidates counts, as
llama.cpp fills it for every token too.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import llama_cpp.llama_cpp as library
import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from rich.console import Console

from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.plugin_steps import build_steps
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings

from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_sampling"]

_METRIC = "µs/row"
_OURS, _THEIRS = "numpy", "llama.cpp"
_VOCAB_SIZES = (49_152, 151_936, 262_144)
_NUM_ROWS = 8
_SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top-k 40, top-p 0.95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05, seed=1),
    "typical-p 0.9": SamplingParams(temperature=0.8, extensions={"typical_p": {"typical_p": 0.9}}, seed=1),
    "top-k 40, typical-p 0.9": SamplingParams(
        temperature=0.8, top_k=40, extensions={"typical_p": {"typical_p": 0.9}}, seed=1
    ),
    "min-p 0.05, XTC": SamplingParams(
        temperature=0.8, min_p=0.05, extensions={"xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1}}, seed=1
    ),
    "top-n-sigma 1": SamplingParams(temperature=0.8, extensions={"top_n_sigma": {"top_n_sigma": 1.0}}, seed=1),
    "dynatemp 0.5": SamplingParams(temperature=0.8, extensions={"dynatemp": {"dynatemp_range": 0.5}}, seed=1),
    "mirostat 2": SamplingParams(temperature=0.8, extensions={"mirostat": {"mirostat": 2}}, seed=1),
    "DRY": SamplingParams(temperature=0.8, extensions={"dry": {"dry_multiplier": 0.8}}, seed=1),
}
_ONLY_OURS = frozenset({"DRY"})
"""llama.cpp's DRY wants a loaded vocabulary, which a row has not."""
_NUM_HISTORY_TOKENS = 4000
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

_Draw = Callable[[NDArray[np.float32], int], int]


@frozen
class _Subject:
    name: str
    make_draw: Callable[[SamplingParams, int], _Draw]


def measure_sampling(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Time per row at three vocabulary sizes and two shapes of rows."""
    record, comparisons = Record(), []
    repeats = 2 if plan.quick else 20
    subjects = [_Subject(_OURS, _numpy_draw), _Subject(_THEIRS, _chain_draw)]
    for vocab_size in _VOCAB_SIZES:
        for shape in ("peaked", "flat"):
            rows = _rows(vocab_size, shape)
            for setting, params in _SETTINGS.items():
                scenario = f"{vocab_size // 1000}k {shape}, {setting}"
                able = subjects[:1] if setting in _ONLY_OURS else subjects
                draws = {subject.name: subject.make_draw(params, vocab_size) for subject in able}
                for _, name in plan.interleave(list(draws)):
                    record.add(Key(scenario, name, _METRIC), 1e6 * _time_row(draws[name], rows, repeats))
                if len(able) > 1:
                    comparisons.append(Comparison(Key(scenario, _OURS, _METRIC), Key(scenario, _THEIRS, _METRIC)))
            console.print(f"vocabulary {vocab_size}, {shape} rows: done")
    return record, comparisons


def _rows(vocab_size: int, shape: str) -> NDArray[np.float32]:
    """``(_NUM_ROWS, vocab_size)`` float32."""
    generator = np.random.default_rng(vocab_size)
    rows = generator.normal(0.0, 2.0, (_NUM_ROWS, vocab_size)).astype(np.float32)
    if shape == "peaked":
        for row in rows:
            row[generator.choice(vocab_size, 60, replace=False)] += np.linspace(14.0, 2.0, 60, dtype=np.float32)
    return rows


def _time_row(draw: _Draw, rows: NDArray[np.float32], repeats: int) -> float:
    """Seconds per row. Every draw gets a fresh copy, as samplers may write into theirs; copying is not timed."""
    total_s = 0.0
    for position in range(repeats):
        for row in rows.copy():
            began_s = time.perf_counter()
            draw(row, position)
            total_s += time.perf_counter() - began_s
    return total_s / (repeats * len(rows))


def _numpy_draw(params: SamplingParams, vocab_size: int) -> _Draw:
    samplers = PluginRegistry.load(PluginsSettings(allow=("samplers",))).samplers
    history = np.random.default_rng(1).integers(0, 200, _NUM_HISTORY_TOKENS)
    sampler = SequenceSampler(
        params,
        choice=0,
        vocab_size=vocab_size,
        prompt_token_ids=np.concatenate([history, history[:20]]),  # the end repeats the beginning
        steps=build_steps(params, samplers),
        token_bytes=tuple(b"%d" % token_id for token_id in range(vocab_size)),
    )
    return lambda row, position: sampler.sample(row, position).token_id


def _chain_draw(params: SamplingParams, vocab_size: int) -> _Draw:
    """llama.cpp's samplers in an order that means the same as core's and costs least: top-k first."""
    chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
    for sampler in _chain_members(params):
        library.llama_sampler_chain_add(chain, sampler)
    candidates = np.zeros(vocab_size, _CANDIDATE)
    token_ids = np.arange(vocab_size, dtype=np.int32)
    array = library.llama_token_data_array()

    def draw(row: NDArray[np.float32], position: int) -> int:
        candidates["id"], candidates["logit"] = token_ids, row
        array.data = ctypes.cast(candidates.ctypes.data, library.llama_token_data_p)
        array.size, array.selected, array.sorted = vocab_size, -1, False
        library.llama_sampler_apply(chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    return draw


def _chain_members(params: SamplingParams) -> list[ctypes.c_void_p]:
    if params.temperature == 0:
        return [library.llama_sampler_init_greedy()]
    fields = {name: value for plugin in params.extensions.values() for name, value in plugin.items()}
    members = [library.llama_sampler_init_top_k(params.top_k)] if params.top_k else []
    span = fields.get("dynatemp_range", 0.0)
    members.append(library.llama_sampler_init_temp_ext(params.temperature, span, 1.0))
    if "mirostat" in fields:
        return [*members, library.llama_sampler_init_mirostat_v2(params.seed, 5.0, 0.1)]
    if "typical_p" in fields:
        members.append(library.llama_sampler_init_typical(fields["typical_p"], 1))
    if params.top_p < 1:
        members.append(library.llama_sampler_init_top_p(params.top_p, 1))
    if params.min_p:
        members.append(library.llama_sampler_init_min_p(params.min_p, 1))
    if "xtc_probability" in fields:
        xtc = fields["xtc_probability"], fields["xtc_threshold"]
        members.append(library.llama_sampler_init_xtc(*xtc, 1, params.seed))
    if "top_n_sigma" in fields:
        members.append(library.llama_sampler_init_top_n_sigma(fields["top_n_sigma"]))
    return [*members, library.llama_sampler_init_dist(params.seed)]
