"""Settings of a llama.cpp model, configured in ``[models.<name>]``."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import attrs
from attrs import field, frozen, validators

__all__ = ["KvType", "LlamaCppOptions"]

KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]

_positive = validators.optional(validators.ge(1))


def _check_shares(_: Any, attribute: attrs.Attribute[Any], value: tuple[float, ...]) -> None:
    if value and not (all(0 <= share < math.inf for share in value) and sum(value) > 0):
        raise ValueError(f"tensor_split: {list(value)}; give one share per device, 0 or more, not all of them 0")


def _check_servers(_: Any, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for server in value:
        host, _colon, port = server.rpartition(":")
        if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536) or "/" in host:
            raise ValueError(f"rpc: {server!r} is not the address of an RPC server; write host:port")


def _check_rules(_: Any, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for rule in value:
        pattern, _equals, buffer = rule.rpartition("=")
        if not pattern or not buffer:
            raise ValueError(f"override_tensor: {rule!r} is not a rule; write REGEX=BUFFER, such as 'ffn_.*=CPU'")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"override_tensor: {pattern!r} is not a regular expression: {error}") from error


def _check_image_tokens(options: LlamaCppOptions, attribute: attrs.Attribute[Any], value: int | None) -> None:
    least = options.image_min_tokens
    if value is not None and least is not None and value < least:
        raise ValueError(f"image_max_tokens: {value} is less than image_min_tokens, {least}")


@frozen(kw_only=True)
class LlamaCppOptions:
    """Settings of a model of this backend.

    Attributes:
        context: longest sequence in tokens; None is the model's training context, at most 4096, and for a pooling model
            at most what 1 GiB of llama.cpp's output buffer holds.
        slots: number of sequences that decode concurrently.
        cache_tokens: KV positions over all sequences, both running and cached for reuse; None is the larger of
            ``context`` and 4096. Positions of other sequences slow down every token slightly, so larger is not faster.
        max_sequences: number of sequences that may hold KV positions; None is ``slots`` plus up to 56 cached prefixes,
            or as many again as ``slots`` if sequences carry a recurrent state.
            Of a pooling model: texts per pass, None is 128.
        n_gpu_layers: layers on the GPU if this build supports one; -1 is all.
        split_mode: how weights are divided between several devices: whole layers (``layer``), rows of matrices
            (``row``), every tensor (``tensor``), or all on ``main_gpu`` (``none``). None is ``layer``.
        tensor_split: shares of the model by device, in proportion; empty: by their free memory.
        main_gpu: number of the device with ``split_mode = "none"``, or of intermediate results with ``row``.
        devices: names of the devices to use, such as ``CUDA0``; empty: all.
        rpc: ``host:port`` of llama.cpp's RPC servers, whose devices are used as if they were here; unencrypted and
            without authentication, so only in a trusted network.
        n_cpu_moe: number of layers, from the first, whose experts stay in the memory of the CPU.
        override_tensor: ``REGEX=BUFFER``: tensors whose names match go to that device's memory; the first match holds.
        rope_scaling: scaling of positions, for contexts longer than the trained one; None is as the file states.
        rope_freq_base: base frequency of the rotation of positions; None is as the file states.
        rope_freq_scale: factor of positions, such as 0.5 for twice the trained context; None is as the file states.
        yarn_orig_ctx: trained context of ``yarn``; None is as the file states.
        threads: CPU threads of a step; None adapts them to the measured time of each kind of step.
        n_batch: maximum tokens per forward pass; a pooling model computes a longer text in a pass of its own.
        n_ubatch: number of tokens that llama.cpp computes at once; None is ``n_batch``.
        flash_attn: use flash attention; None lets llama.cpp choose.
        batch_invariant: make greedy text independent of concurrent requests, if the model's kernels allow it (tested
            when it is loaded). Costs KV memory and, on long prompts, speed; see docs/llamacpp.md.
        type_k: data type of the keys in the KV cache.
        type_v: data type of the values; quantised types need flash attention. None is f16, or bf16 if batch invariance
            needs a type other than that of the keys.
        checkpoints: copies of the states of sequences that are kept, of models with recurrent layers; the least
            recently used ones are dropped first. Each takes as much memory as the state of a sequence.
        use_mmap: map the file instead of reading it.
        use_mlock: prevent the weights from being swapped out.
        extra_buffers: repack weights for faster CPU kernels. None is yes, except in builds with AMX kernels: some
            compilers break these, which terminates the process, and they round differently for one row and many.
        swa_full: keep more than the window of sliding-window layers, so that most cached prefixes can be cut anywhere;
            False saves memory.
        mmproj: file of the projector, for models that read images; relative to the folder of the model. None finds the
            one beside the model (docs/llamacpp.md); empty is none, and the model reads text only.
        image_min_tokens: tokens that an image has at least, in models that take images of any size; None is as the
            file states.
        image_max_tokens: tokens that it has at most, in such models; None is as the file states, which may be more than
            ``context``.
        pooling: how an embedding is made of token states, instead of what the file states; for a model that generates
            text, it makes an embedding model of it. None is as the file states.
        normalize: scale embeddings to length 1; no file states whether its model was trained so.
        prompts: texts put before inputs, by name, such as ``query``; files do not contain them.
        default_prompt: name of the prompt of requests that name none; empty: none.
        dimension_choices: smaller sizes of an embedding that the model was trained for (Matryoshka).
        num_layers: run only this number of the model's first layers, from a shortened copy of its file that is made
            once; None is all. Set by the drafter ``layers``; the text that such a model generates by itself is not
            usable.
    """

    context: int | None = field(default=None, validator=validators.optional(validators.ge(32)))
    slots: int = field(default=8, validator=[validators.ge(1), validators.le(128)])
    cache_tokens: int | None = field(default=None, validator=validators.optional(validators.ge(32)))
    max_sequences: int | None = field(
        default=None, validator=validators.optional([validators.ge(1), validators.le(254)])
    )
    n_gpu_layers: int = field(default=-1, validator=validators.ge(-1))
    split_mode: Literal["none", "layer", "row", "tensor"] | None = None
    tensor_split: tuple[float, ...] = field(default=(), validator=_check_shares)
    main_gpu: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    devices: tuple[str, ...] = ()
    rpc: tuple[str, ...] = field(default=(), validator=_check_servers)
    n_cpu_moe: int = field(default=0, validator=[validators.ge(0), validators.le(1000)])
    override_tensor: tuple[str, ...] = field(default=(), validator=_check_rules)
    rope_scaling: Literal["none", "linear", "yarn", "longrope"] | None = None
    rope_freq_base: float | None = field(default=None, validator=validators.optional(validators.gt(0)))
    rope_freq_scale: float | None = field(default=None, validator=validators.optional(validators.gt(0)))
    yarn_orig_ctx: int | None = field(default=None, validator=_positive)
    threads: int | None = field(default=None, validator=_positive)
    n_batch: int = field(default=512, validator=validators.ge(32))
    n_ubatch: int | None = field(default=None, validator=_positive)
    flash_attn: bool | None = None
    batch_invariant: bool = True
    type_k: KvType = "f16"
    type_v: KvType | None = None
    checkpoints: int = field(default=32, validator=[validators.ge(1), validators.le(4096)])
    use_mmap: bool = True
    use_mlock: bool = False
    extra_buffers: bool | None = None
    swa_full: bool = True
    mmproj: str | None = None
    image_min_tokens: int | None = field(default=None, validator=_positive)
    image_max_tokens: int | None = field(default=None, validator=[_positive, _check_image_tokens])
    pooling: Literal["mean", "cls", "last"] | None = None
    normalize: bool = True
    prompts: dict[str, str] = field(factory=dict)
    default_prompt: str = ""
    dimension_choices: tuple[int, ...] = ()
    num_layers: int | None = field(default=None, validator=_positive)
