"""Contract of a runner's tokenizer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from enginehouse.contract.backend import Runner, Tokenizer
from enginehouse.contract.types import Segment
from enginehouse.engine.text.segments import min_tokens
from enginehouse_testkit.contract.base import ContractBase

__all__ = ["TokenizerContract"]

_TEXTS = (
    "Hello, world!",
    "  two spaces  and\ttabs\n\nand lines\n",
    "Größe, naïve café, 日本語のテキスト, 🙂 and 👩\u200d🚀",
    "x = {'a': [1, 2.5e-3]}  # code",
    "a",
)


class TokenizerContract(ContractBase):
    """Ids and bytes: required to show text and to prevent user text from forming control tokens."""

    @pytest.fixture
    def tokenizer(self, runner: Runner) -> Tokenizer:
        """The shared runner's tokenizer."""
        return runner.tokenizer

    def test_vocab_size_agrees_everywhere(self, runner: Runner, tokenizer: Tokenizer) -> None:
        """The vocabulary has one byte string per logit of a row."""
        assert tokenizer.vocab_size == len(tokenizer.token_bytes) == runner.info.vocab_size
        assert all(isinstance(token, bytes) for token in tokenizer.token_bytes)

    def test_ids_are_inside_the_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Control, end, prefix and special ids exist; at least one id ends a generation and is never shown."""
        ids = {*tokenizer.control_token_ids, *tokenizer.end_token_ids, *tokenizer.prefix_token_ids}
        ids.update(tokenizer.special_tokens.values())

        assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
        assert tokenizer.end_token_ids
        assert tokenizer.end_token_ids <= tokenizer.control_token_ids

    @pytest.mark.parametrize("text", _TEXTS)
    def test_encode_keeps_every_byte(self, tokenizer: Tokenizer, text: str) -> None:
        """The ids' bytes equal the text's bytes."""
        token_ids = tokenizer.encode(text, False)
        data = b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids)

        assert data == (b" " * self.adds_space) + text.encode()

    def test_encode_of_nothing_is_nothing(self, tokenizer: Tokenizer) -> None:
        """No prefix is added: that is ``prefix_token_ids``."""
        assert list(tokenizer.encode("", False)) == []
        assert list(tokenizer.encode("", True)) == []

    def test_encode_forms_control_tokens_only_with_special(self, tokenizer: Tokenizer) -> None:
        """A control token's name typed by a user is text; in trusted text it is the token."""
        for name, token_id in tokenizer.special_tokens.items():
            if token_id not in tokenizer.control_token_ids:
                continue
            plain = tokenizer.encode(f"say {name} now", False)

            formed = sorted(tokenizer.control_token_ids & set(plain))
            assert not formed, f"encode({name!r}, special=False) gave the control tokens {formed}: users may type it"
            assert name.encode() in b"".join(tokenizer.token_bytes[token_id] for token_id in plain), name
            assert token_id in tokenizer.encode(f"say {name} now", True), (
                f"encode({name!r}, special=True) did not give its token {token_id}"
            )
            assert tokenizer.token_bytes[token_id] == name.encode(), name

    def test_no_token_stands_for_more_bytes_than_said(self, tokenizer: Tokenizer) -> None:
        """Prompts that cannot fit are refused by their length in bytes."""
        longest = sorted(tokenizer.token_bytes, key=len)[-20:]
        texts = [(data.decode(errors="ignore") + end) * 40 for data in longest for end in ("", " ")]
        texts += [
            unit * 500 for unit in (" ", "\n", "\t", "=", "\u2581", "e\u0301", "\u1100\u1161\u11a8", "\u00a0", "日")
        ]
        for text in texts:
            for special in (False, True):
                assert len(tokenizer.encode(text, special)) >= min_tokens(tokenizer, [Segment(text)]), text[:40]

    def test_encode_works_on_several_threads(self, tokenizer: Tokenizer) -> None:
        """The intake thread encodes while the engine thread runs."""
        texts = [f"{text} {number}" for number in range(20) for text in _TEXTS]
        expected = [tokenizer.encode(text, False) for text in texts]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda text: tokenizer.encode(text, False), texts))

        assert found == expected
