"""What only a model with sliding windows can get wrong; the behaviours of completions run on Gemma where they are."""

import time

import pytest

from .client import Server
from .conftest import gemma_kinds

pytestmark = pytest.mark.parametrize("model_server", gemma_kinds(), indirect=True)


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
    """Layers with windows see 512 tokens; the others see the whole prompt, in which a name is far away."""
    filler = "The weather was mild, and the road went on between fields of barley. " * 45
    prompt = f"The captain of the ship was called Zebulon Quark. {filler}The captain of the ship was called Zebulon"
    answer = model_server.complete(prompt=prompt, max_tokens=3)

    assert answer["usage"]["prompt_tokens"] > 600
    assert answer["choices"][0]["text"].startswith(" Quark")
