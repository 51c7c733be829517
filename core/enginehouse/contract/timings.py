"""Times of a request as other servers write them, all from one :class:`~enginehouse.contract.usage.Usage`.

Used by the surfaces. Before the end of a stream, the usage is measured in the server.
"""

from __future__ import annotations

from typing import Any

from enginehouse.contract.types import PromptProgress
from enginehouse.contract.usage import Usage

__all__ = ["progress_object", "timings", "usage_times"]


def timings(usage: Usage) -> dict[str, Any]:
    """Return llama-server's object ``timings``: counts, milliseconds and rates.

    Source: https://github.com/ggml-org/llama.cpp, ``result_timings`` in ``tools/server``.
    """
    drafted = {"draft_n": usage.drafted_tokens, "draft_n_accepted": usage.accepted_draft_tokens}
    return {
        "cache_n": usage.cached_tokens,
        **_rates("prompt", usage.prompt_tokens - usage.cached_tokens, usage.prefill_s),
        **_rates("predicted", usage.completion_tokens, usage.decode_s),
        **(drafted if usage.drafted_tokens else {}),
    }


def _rates(name: str, number: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": number,
        f"{name}_ms": round(1000 * seconds, 3),
        f"{name}_per_token_ms": round(1000 * seconds / number, 3) if number else 0.0,
        f"{name}_per_second": _per_second(number, seconds),
    }


def usage_times(usage: Usage) -> dict[str, float]:
    """Return the times that oMLX adds to ``usage``: seconds, and tokens per second.

    Source: https://github.com/jundot/omlx, ``Usage`` in ``omlx/api/openai_models.py``.
    """
    return {
        "model_load_duration": round(usage.load_s, 4),
        "time_to_first_token": round(usage.first_token_s, 4),
        "total_time": round(usage.total_s, 4),
        "prompt_eval_duration": round(usage.prefill_s, 4),
        "generation_duration": round(usage.decode_s, 4),
        "prompt_tokens_per_second": _per_second(usage.prompt_tokens - usage.cached_tokens, usage.prefill_s),
        "generation_tokens_per_second": _per_second(usage.completion_tokens, usage.decode_s),
    }


def _per_second(number: int, seconds: float) -> float:
    return round(number / seconds, 3) if seconds > 0 else 0.0


def progress_object(progress: PromptProgress) -> dict[str, Any]:
    """Return the progress of a prefill, as llama-server writes it; ``time_ms`` counts from its start."""
    return {
        "total": progress.num_tokens,
        "cache": progress.num_cached,
        "processed": progress.num_done,
        "time_ms": round(1000 * progress.seconds),
    }
