"""Settings of a llama.cpp model: what users write in ``[models.<name>]``."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen, validators

__all__ = ["KvType", "LlamaCppOptions"]

KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]

_positive = validators.optional(validators.ge(1))


@frozen(kw_only=True)
class LlamaCppOptions:
    """Settings of a model of this backend.

    Attributes:
        context: longest sequence in tokens; None is what the model was trained for, at most 4096.
        slots: sequences that decode at once.
        cache_tokens: KV positions over all sequences, running and kept for reuse; None is ``context`` or 4096,
            whichever is more. Positions that others hold cost every token a little time, so larger is not faster.
        max_sequences: sequences that hold KV positions at once; None is ``slots`` and up to 56 kept prefixes.
        n_gpu_layers: layers on the GPU where this build has one; -1 is all.
        threads: CPU threads of a step; None adapts them to the measured time of each kind of step.
        n_batch: most tokens in a forward pass.
        n_ubatch: tokens that llama.cpp computes at once; None is ``n_batch``.
        flash_attn: None lets llama.cpp choose.
        batch_invariant: make greedy text independent of what else is served, where the model's kernels allow (tested
            when it is loaded). Costs KV memory and, on long prompts, speed; see docs/llamacpp.md.
        type_k: type of the K half of the KV cache.
        type_v: type of the V half; quantised types need flash attention. None is f16, or bf16 where batch invariance
            needs another type than K's.
        use_mmap: map the file instead of reading it.
        use_mlock: keep the weights from being swapped out.
        extra_buffers: repack weights for faster CPU kernels. None is yes, except in builds with AMX kernels: some
            compilers break these, which ends the process, and they round differently for one row and many.
        swa_full: keep more than the window of sliding-window layers, so that most kept prefixes can be cut anywhere;
            False saves memory.
        num_layers: run only so many of the model's first layers, from a shortened copy of its file that is made once;
            None is all. The drafter ``layers`` sets it; what such a model writes by itself is of no use.
    """

    context: int | None = field(default=None, validator=validators.optional(validators.ge(32)))
    slots: int = field(default=8, validator=[validators.ge(1), validators.le(128)])
    cache_tokens: int | None = field(default=None, validator=validators.optional(validators.ge(32)))
    max_sequences: int | None = field(
        default=None, validator=validators.optional([validators.ge(1), validators.le(254)])
    )
    n_gpu_layers: int = field(default=-1, validator=validators.ge(-1))
    threads: int | None = field(default=None, validator=_positive)
    n_batch: int = field(default=512, validator=validators.ge(32))
    n_ubatch: int | None = field(default=None, validator=_positive)
    flash_attn: bool | None = None
    batch_invariant: bool = True
    type_k: KvType = "f16"
    type_v: KvType | None = None
    use_mmap: bool = True
    use_mlock: bool = False
    extra_buffers: bool | None = None
    swa_full: bool = True
    num_layers: int | None = field(default=None, validator=_positive)
