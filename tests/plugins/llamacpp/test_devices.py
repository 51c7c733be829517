"""Settings about devices and positions: they reach llama.cpp, or are refused with what this build lacks."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.devices import Device, device_params, list_devices
from enginehouse_llamacpp.library import load_library
from enginehouse_llamacpp.options import LlamaCppOptions

pytestmark = pytest.mark.llamacpp


@pytest.fixture(scope="module")
def open_smollm(smollm_path: Path, open_runner: Any) -> Any:
    return partial(open_runner, smollm_path, context=256, cache_tokens=512, slots=1, threads=1)


GPUS = (Device("GPU0", 16, False, "GPU0", 160), Device("GPU1", 32, False, "GPU1", 320))


def with_gpus(**options: Any) -> tuple[Any, list[Any]]:
    """Parameters for a machine with two GPUs beside the real CPU."""
    library = load_library()
    params = library.bindings.llama_model_default_params()
    devices = (*GPUS, *(device for device in list_devices(library) if device.is_cpu))
    return params, device_params(library.bindings, params, LlamaCppOptions(**options), devices)


def test_settings_reach_the_parameters_of_the_model() -> None:
    bindings = load_library().bindings
    default, _ = with_gpus()
    params, kept = with_gpus(
        split_mode="row",
        tensor_split=(3, 1),
        main_gpu=1,
        devices=("GPU1", "GPU0"),
        override_tensor=("attn=GPU1",),
        n_cpu_moe=2,
    )

    assert (default.devices, default.tensor_buft_overrides, bool(default.tensor_split)) == (None, None, False)
    assert (params.split_mode, params.main_gpu) == (bindings.LLAMA_SPLIT_MODE_ROW, 1)
    assert params.tensor_split[:3] == [3, 1, 0]
    assert (ctypes.c_void_p * 3).from_address(params.devices)[:] == [32, 16, None]
    rules = [(rule.pattern, rule.buffer_type) for rule in kept[-1]]
    assert rules[0] == (b"attn", 320)
    assert [pattern for pattern, _ in rules[1:3]] == [
        rb"blk\.%d\.ffn_(up|down|gate|gate_up)_(ch|)exps" % layer for layer in (0, 1)
    ]
    assert rules[1][1] == next(device.buffer_type for device in list_devices(load_library()) if device.is_cpu)
    assert rules[3] == (None, None)
    assert params.tensor_buft_overrides == ctypes.addressof(kept[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"main_gpu": 2}, "main_gpu: 2, but there are 2 devices"),
        ({"tensor_split": (1, 1, 1)}, "tensor_split: 3 shares, but there are 2 devices: GPU0, GPU1"),
        ({"devices": ("CUDA7",)}, "devices: no device 'CUDA7' here; there are GPU0, GPU1"),
        ({"override_tensor": ("ffn=CUDA7",)}, "override_tensor: no device 'CUDA7' here; there are GPU0, GPU1, CPU"),
    ],
)
def test_devices_that_are_not_there_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        with_gpus(**options)


@pytest.mark.parametrize(
    "options", [{"split_mode": "row"}, {"tensor_split": (1.0,)}, {"main_gpu": 0}, {"devices": ("CUDA0",)}]
)
@pytest.mark.skipif(load_library().has_gpu, reason="this build has GPUs")
def test_builds_without_gpus_refuse_settings_about_them(open_smollm: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=f"{next(iter(options))}: this build of llama.cpp has no device besides"):
        open_smollm(**options)


@pytest.mark.skipif(load_library().bindings.llama_supports_rpc(), reason="this build has RPC")
def test_builds_without_rpc_refuse_servers(open_smollm: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"rpc: this build of llama.cpp has no RPC.*-DGGML_RPC=on"):
        open_smollm(rpc=("10.0.0.5:50052",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_split": (-1, 2)}, "tensor_split"),
        ({"tensor_split": (0, 0)}, "tensor_split"),
        ({"rpc": ("http://a:1",)}, "rpc: 'http://a:1' is not the address"),
        ({"rpc": ("host",)}, "host:port"),
        ({"override_tensor": ("ffn",)}, "override_tensor: 'ffn' is not a rule"),
        ({"override_tensor": ("ffn(=CPU",)}, "override_tensor: 'ffn.' is not a regular expression"),
        ({"n_cpu_moe": -1}, "n_cpu_moe"),
        ({"main_gpu": -1}, "main_gpu"),
        ({"rope_freq_scale": 0}, "rope_freq_scale"),
        ({"rope_freq_base": -1}, "rope_freq_base"),
        ({"yarn_orig_ctx": 0}, "yarn_orig_ctx"),
    ],
)
def test_wrong_values_name_their_setting(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaCppOptions(**options)


def last_logits(runner: Any) -> Any:
    sequence = runner.open_sequence()
    row = runner.forward([Span(sequence, 0, np.arange(100, 160, dtype=np.int32), "last")]).host().copy()
    runner.close()
    return row


@pytest.fixture(scope="module")
def plain(open_smollm: Any) -> Any:
    return last_logits(open_smollm(batch_invariant=False, extra_buffers=False))


@pytest.mark.parametrize(
    "options",
    [
        {"rope_scaling": "linear", "rope_freq_scale": 0.5},
        {"rope_freq_base": 500.0},
        {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 64},
    ],
)
def test_positions_are_scaled(open_smollm: Any, plain: Any, options: dict[str, Any]) -> None:
    scaled = last_logits(open_smollm(batch_invariant=False, extra_buffers=False, **options))

    assert not np.allclose(plain, scaled, atol=0.1)


def test_tensors_in_the_memory_of_the_cpu_compute_the_same(open_smollm: Any, plain: Any) -> None:
    placed = last_logits(open_smollm(batch_invariant=False, extra_buffers=False, override_tensor=("ffn_.*=CPU",)))

    assert np.allclose(plain, placed, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({}, {}),
        ({"tensor_split": (3, 1)}, {"CPU": 0.38, "device 0": 0.66, "device 1": 0.52}),
        ({"tensor_split": (3, 1), "n_gpu_layers": 0}, {"CPU": 1.11, "device 0": 0.0, "device 1": 0.0}),
        ({"rpc": ("a:1", "b:1"), "split_mode": "row"}, {"CPU": 0.38, "a:1": 0.59, "b:1": 0.59}),
        ({"devices": ("A", "B"), "split_mode": "none", "main_gpu": 1}, {"CPU": 0.38, "B": 1.11}),
        ({"devices": ("A",), "override_tensor": ("ffn=CPU",)}, {"CPU": 0.89, "A": 0.61}),
    ],
)
def test_estimate_says_what_each_device_needs(
    smollm_path: Path, options: dict[str, Any], where: dict[str, float]
) -> None:
    """As shares of the file: 31 % of it are embeddings, which are the output, too; 7 % more are intermediate values."""
    chosen = LlamaCppOptions(context=32, cache_tokens=32, slots=1, max_sequences=1, n_batch=32, **options)
    estimate = LlamaCppBackend().estimate(ModelSource(str(smollm_path), smollm_path), chosen)

    assert {name: num_bytes / estimate.weights_bytes for name, num_bytes in estimate.by_device.items()} == (
        pytest.approx(where, abs=0.02)
    )
