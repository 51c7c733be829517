"""The tokenizer against llama.cpp's own answers."""

from __future__ import annotations

import ctypes

import pytest

from enginehouse_llamacpp.library import load_library
from enginehouse_llamacpp.runner import LlamaCppRunner
from enginehouse_llamacpp.tokenizer import LlamaCppTokenizer

pytestmark = pytest.mark.llamacpp

TEXTS = (
    "Hello, world!",
    "  spaces\n\n\ttabs ",
    "日本語 🙂 naïve",
    "a" * 3000,
    "\x00 zero",
    "<|im_end|> and <eos>",
    "\ud800",
)


def _vocab_of(runner: LlamaCppRunner) -> int:
    assert isinstance(runner.tokenizer, LlamaCppTokenizer)
    return runner.tokenizer.vocab


@pytest.fixture(params=["smollm", "gemma"])
def runner(request: pytest.FixtureRequest) -> LlamaCppRunner:
    """Both models in turn: BPE over bytes, and SentencePiece."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, LlamaCppRunner)
    return found


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids_are_turned_back_by_llama_cpp(runner: LlamaCppRunner, text: str) -> None:
    """llama.cpp's detokenizer gives the text back; a lone surrogate is replaced."""
    bindings, vocab = load_library().bindings, _vocab_of(runner)
    for special in (False, True):
        token_ids = runner.tokenizer.encode(text, special)
        buffer = ctypes.create_string_buffer(4 * len(text) + 64)
        ids = (ctypes.c_int32 * len(token_ids))(*token_ids)
        length = bindings.llama_detokenize(vocab, ids, len(token_ids), buffer, len(buffer), False, True)

        assert buffer.raw[:length] == text.encode(errors="replace")


def test_token_bytes_equal_llama_cpps_pieces(runner: LlamaCppRunner) -> None:
    """Every hundredth id, and all control ids by name."""
    bindings, tokenizer = load_library().bindings, runner.tokenizer
    buffer = ctypes.create_string_buffer(256)
    for token_id in {*range(0, tokenizer.vocab_size, 100), *tokenizer.control_token_ids}:
        length = bindings.llama_token_to_piece(_vocab_of(runner), token_id, buffer, 256, 0, True)
        assert tokenizer.token_bytes[token_id] == buffer.raw[:length]


def test_control_and_end_tokens(smollm: LlamaCppRunner, gemma: LlamaCppRunner) -> None:
    """Several end tokens each; ordinary tokens are neither."""
    smollm_ids, gemma_ids = smollm.tokenizer.special_tokens, gemma.tokenizer.special_tokens

    assert {smollm_ids["<|im_end|>"], smollm_ids["<|endoftext|>"]} <= smollm.tokenizer.end_token_ids
    assert gemma_ids["<eos>"] in gemma.tokenizer.end_token_ids
    assert gemma_ids["<end_of_turn>"] in gemma.tokenizer.end_token_ids
    assert len(smollm.tokenizer.control_token_ids) < 50
    assert smollm.tokenizer.prefix_token_ids == ()
    assert len(gemma.tokenizer.encode("<end_of_turn>", False)) > 1


def test_user_text_forms_no_control_token(runner: LlamaCppRunner) -> None:
    """Also where the name touches other text."""
    for name in list(runner.tokenizer.special_tokens)[:30]:
        for text in (name, f"a{name}b", f"{name}{name}", f" {name}\n"):
            assert not runner.tokenizer.control_token_ids & set(runner.tokenizer.encode(text, False)), text
