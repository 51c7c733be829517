"""Gemma 3 270M, the same file on llama.cpp and on transformers: sliding windows, 262k tokens, no chat template.

The behaviours of completions run again, with this model behind ``server`` and ``model_server``. On llama.cpp its
kernels round by the size of the batch, so what asks for equal text there is left to ``test_greedy_text``.
"""

import time
from pathlib import Path

import pytest

from enginehouse_testkit.server import started_server

from .client import Server
from .conftest import HF_OPTIONS
from .test_k_lifetime import (
    test_h32_requests_do_not_mix_told_apart_by_bias,
    test_h32_requests_do_not_mix_told_apart_by_forced_text,
    test_h32_requests_do_not_mix_told_apart_by_seed,
    test_h33_leaving_a_stream_frees_the_slot,
    test_h34_a_salt_shares_nothing_with_others,
    test_h34_prefix_cache_changes_only_speed,
)
from .test_l_completions import (
    test_h35_choices_are_prompts_times_n,
    test_h35_each_prompt_gets_its_own_answer,
    test_h35_ids_of_a_text_say_the_same_as_the_text,
    test_h35_string,
    test_h35_the_vocabulary_size_is_no_token_id,
    test_h35_token_ids,
)

__all__ = [
    "test_h32_requests_do_not_mix_told_apart_by_bias",
    "test_h32_requests_do_not_mix_told_apart_by_forced_text",
    "test_h32_requests_do_not_mix_told_apart_by_seed",
    "test_h33_leaving_a_stream_frees_the_slot",
    "test_h34_a_salt_shares_nothing_with_others",
    "test_h34_prefix_cache_changes_only_speed",
    "test_h35_choices_are_prompts_times_n",
    "test_h35_each_prompt_gets_its_own_answer",
    "test_h35_ids_of_a_text_say_the_same_as_the_text",
    "test_h35_string",
    "test_h35_the_vocabulary_size_is_no_token_id",
    "test_h35_token_ids",
]

CONFIG = """
[models.gemma]
source = '{source}'
backend = "{backend}"
context = 1024
{more}
"""


NEED_EQUAL_TEXT = {
    "test_h32_requests_do_not_mix_told_apart_by_seed",
    "test_h34_prefix_cache_changes_only_speed",
    "test_h35_each_prompt_gets_its_own_answer",
    "test_h35_token_ids",
}
ROUNDING = {"llamacpp": 2.5, "hf": 0.05}
"""As in the backends' contracts: llama.cpp's Q5_0 and Q8_0 kernels round by batch, which grows from layer to layer."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in ROUNDING])
def model_server(request: pytest.FixtureRequest, gemma_gguf: Path, tmp_path_factory: pytest.TempPathFactory):
    config = tmp_path_factory.mktemp("gemma") / "enginehouse.toml"
    more = HF_OPTIONS if request.param == "hf" else ""
    config.write_text(CONFIG.format(source=gemma_gguf, backend=request.param, more=more), encoding="utf-8")
    with started_server("--config", config, ready_timeout_s=300) as process:
        server = Server.connect(process.url or "", "gemma")
        server.rounding = ROUNDING[request.param]
        with server.client:
            yield server.wait_ready()


@pytest.fixture(autouse=True)
def _skip_what_rounding_may_change(request: pytest.FixtureRequest, model_server: Server) -> None:
    if model_server.rounding > 1 and request.node.originalname in NEED_EQUAL_TEXT:
        pytest.skip("on llama.cpp this model's text may turn where two tokens are nearly equal")


@pytest.fixture
def server(model_server: Server) -> Server:
    return model_server


def test_h34_a_beginning_longer_than_the_window_is_shared(model_server: Server) -> None:
    """Another question about the same document, after an answer to the first: the document is not computed again."""
    document = "The weather was mild, and the road went on between fields of barley. " * 60
    salt = {"cache_salt": str(time.time_ns())}
    first, second = (
        model_server.complete(prompt=f"{document}{question}", max_tokens=8, **salt)["usage"]
        for question in ("Then it began to rain, and", "In the evening")
    )

    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens"] - 20 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
    assert second["prompt_tokens"] > 600


def test_a_text_much_longer_than_the_window_is_remembered(model_server: Server) -> None:
    """Layers with windows see 512 tokens; the others see the whole prompt, in which a name stands far away."""
    filler = "The weather was mild, and the road went on between fields of barley. " * 45
    prompt = f"The captain of the ship was called Zebulon Quark. {filler}The captain of the ship was called Zebulon"
    answer = model_server.complete(prompt=prompt, max_tokens=3)

    assert answer["usage"]["prompt_tokens"] > 600
    assert answer["choices"][0]["text"].startswith(" Quark")
