"""Distribution of a model's tensors over devices: the settings as parameters of ``llama_model_load_from_file``.

Called before the weights are loaded. What this build of llama.cpp cannot do is refused here, with the name of the
setting: llama.cpp itself ignores most of these parameters in a build without GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from enginehouse.contract.errors import ModelLoadError
from enginehouse_llamacpp.library import Bindings, Library
from enginehouse_llamacpp.options import LlamaCppOptions

__all__ = ["EXPERTS", "Device", "device_params", "list_devices"]

_CPU = 0
"""ggml's number of the type of CPU devices."""

EXPERTS = r"blk\.{layer}\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Names of the weights of a layer's experts. Source: llama.cpp, ``common.h``."""


class _Override(ctypes.Structure):
    """``llama_model_tensor_buft_override``."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


@frozen
class Device:
    """A device of ggml.

    Attributes:
        address: the ``ggml_backend_dev_t``.
        buffer: name of its memory in ``override_tensor``, such as ``CUDA0`` or ``CPU``.
        buffer_type: address of that.
    """

    name: str
    address: int
    is_cpu: bool
    buffer: str
    buffer_type: int


def list_devices(library: Library, servers: Sequence[str] = ()) -> tuple[Device, ...]:
    """Return the devices of this process, after adding those of RPC servers.

    Raises:
        ModelLoadError: this build has no RPC, or a server does not answer.
    """
    ggml = library.ggml
    for server in servers:
        _add_server(library, server)
    devices = []
    for index in range(_call(ggml, "ggml_backend_dev_count", ctypes.c_size_t)):
        address = _call(ggml, "ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t(index))
        device = ctypes.c_void_p(address)
        buffer_type = _call(ggml, "ggml_backend_dev_buffer_type", ctypes.c_void_p, device)
        devices.append(
            Device(
                name=_call(ggml, "ggml_backend_dev_name", ctypes.c_char_p, device).decode(),
                address=address,
                is_cpu=_call(ggml, "ggml_backend_dev_type", ctypes.c_int, device) == _CPU,
                buffer=_call(ggml, "ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p(buffer_type)).decode(),
                buffer_type=buffer_type,
            )
        )
    return tuple(devices)


def device_params(bindings: Bindings, params: Any, options: LlamaCppOptions, devices: Sequence[Device]) -> list[Any]:
    """Set the parameters of a model that the settings name; others keep llama.cpp's defaults.

    Returns:
        The memory that ``params`` points to, to be kept until the model is loaded.

    Raises:
        ModelLoadError: this build, or this machine, lacks what a setting needs.
    """
    others = [device for device in devices if not device.is_cpu]
    named = {
        "split_mode": options.split_mode,
        "tensor_split": options.tensor_split,
        "main_gpu": options.main_gpu,
        "devices": options.devices,
    }
    for name, value in named.items():
        if value not in (None, ()) and not others:
            raise ModelLoadError(
                f"{name}: this build of llama.cpp has no device besides the CPU; install llama-cpp-python with CUDA, "
                "Vulkan, Metal or ROCm, or remove the setting"
            )
    kept: list[Any] = []
    used = others
    if options.devices:
        by_name = {device.name: device for device in others}
        used = [_named("devices", name, by_name) for name in options.devices]
        kept.append((ctypes.c_void_p * (len(used) + 1))(*(device.address for device in used), None))
        params.devices = ctypes.cast(kept[-1], ctypes.c_void_p)
    if options.split_mode is not None:
        params.split_mode = getattr(bindings, f"LLAMA_SPLIT_MODE_{options.split_mode.upper()}")
    if options.main_gpu is not None:
        if options.main_gpu >= len(used):
            raise ModelLoadError(f"main_gpu: {options.main_gpu}, but there are {len(used)} devices, counted from 0")
        params.main_gpu = options.main_gpu
    if options.tensor_split:
        if len(options.tensor_split) > len(used):
            number = len(options.tensor_split)
            raise ModelLoadError(f"tensor_split: {number} shares, but there are {len(used)} devices: {_names(used)}")
        kept.append((ctypes.c_float * bindings.llama_max_devices())(*options.tensor_split))
        params.tensor_split = ctypes.cast(kept[-1], ctypes.POINTER(ctypes.c_float))
    if overrides := _overrides(options, devices):
        most = bindings.llama_max_tensor_buft_overrides()
        if len(overrides) >= most:
            raise ModelLoadError(f"override_tensor, n_cpu_moe: {len(overrides)} rules; llama.cpp takes {most - 1}")
        kept.append((_Override * (len(overrides) + 1))(*overrides))
        params.tensor_buft_overrides = ctypes.cast(kept[-1], ctypes.c_void_p)
    return kept


def _overrides(options: LlamaCppOptions, devices: Sequence[Device]) -> list[_Override]:
    """Return the rules in the order of their precedence: the first one that matches a tensor's name holds."""
    by_buffer = {device.buffer: device for device in devices}
    rules = [rule.rpartition("=") for rule in options.override_tensor]
    rules += [(EXPERTS.format(layer=layer), "=", "CPU") for layer in range(options.n_cpu_moe)]
    return [
        _Override(pattern.encode(), _named("override_tensor", name, by_buffer).buffer_type)
        for pattern, _, name in rules
    ]


def _named(setting: str, name: str, devices: dict[str, Device]) -> Device:
    if name not in devices:
        raise ModelLoadError(f"{setting}: no device {name!r} here; there are {', '.join(devices) or 'none'}")
    return devices[name]


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(device.name for device in devices)


def _add_server(library: Library, server: str) -> None:
    """Register the devices of an RPC server. Source: ``add_rpc_devices`` in llama.cpp's ``common/arg.cpp``."""
    if not library.bindings.llama_supports_rpc():
        raise ModelLoadError(
            f"rpc: this build of llama.cpp has no RPC, so {server} cannot be used; install llama-cpp-python with "
            "CMAKE_ARGS=-DGGML_RPC=on"
        )
    ggml = library.ggml
    registry = ctypes.c_void_p(_call(ggml, "ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p(b"RPC")))
    address = _call(
        ggml, "ggml_backend_reg_get_proc_address", ctypes.c_void_p, registry, b"ggml_backend_rpc_add_server"
    )
    add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
    library.log.clear()
    if not (added := add(server.encode())):
        raise ModelLoadError(f"rpc: {server} does not answer as an RPC server of llama.cpp: {library.log.reason()}")
    _call(ggml, "ggml_backend_register", None, ctypes.c_void_p(added))


def _call(ggml: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call a function of ggml, which llama-cpp-python does not bind."""
    function = getattr(ggml, name)
    function.restype = result
    return function(*arguments)
