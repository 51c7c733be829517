"""Token ids of a WordPiece vocabulary, as of BERT, with the words that the model was trained on.

llama.cpp's own tokenizer drops vowel signs (Hindi, Thai) and the vowels of Korean, which BERT keeps, and cuts words of
more than 100 characters in pieces, which are unknown to BERT; rows of such texts would be wrong.

Source: ``BertNormalizer``, ``BertPreTokenizer`` and ``WordPiece`` of https://github.com/huggingface/tokenizers; the
form of the vocabulary in a GGUF file from llama.cpp (``conversion/bert.py``).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from attrs import frozen

from enginehouse_llamacpp.library import Bindings
from enginehouse_llamacpp.pre_tokenizers import PreTokenizer
from enginehouse_llamacpp.tokenizer import LlamaCppTokenizer

__all__ = ["WordPieceTokenizer", "WordRules"]

_BEGIN = "▁"
"""Marks pieces that begin a word in a GGUF file; the others continue one."""

_MAX_WORD = 100
"""Longer words are unknown."""

_NO_PIECE = -1
_CACHED_WORDS = 20_000
_IS_ALONE = re.compile(
    "[!-/:-@\\[-`{-~\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f]"
)
"""Punctuation of ASCII, which Unicode partly calls symbols, and the ideographs of Chinese and Japanese."""

_NOT_KEPT = {"Cc", "Cf", "Co"}


@frozen
class WordRules:
    """Rules of a vocabulary.

    Attributes:
        unknown_id: token of words that it does not contain.
        is_lowercase: letters are changed to lower case.
        strips_accents: combining marks that are not spacing are dropped.
    """

    unknown_id: int
    is_lowercase: bool
    strips_accents: bool


class WordPieceTokenizer(LlamaCppTokenizer):
    """Implements :class:`enginehouse.contract.backend.Tokenizer` for WordPiece vocabularies.

    ``encode`` has no limit for the length of a text: time and memory grow linearly.
    """

    def __init__(self, bindings: Bindings, vocab: int, pre_tokenizer: PreTokenizer, rules: WordRules) -> None:
        super().__init__(bindings, vocab, pre_tokenizer)
        self._rules = rules
        self._unknown = [rules.unknown_id] if rules.unknown_id < self.vocab_size else []
        self._begins, self._continues = self._read_pieces()
        self._characters = _Characters(rules)
        self._cache: dict[str, list[int]] = {}
        names = sorted(self.special_tokens, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"(?!)")

    def encode_here(self, text: str, special: bool) -> list[int]:
        """See :meth:`LlamaCppTokenizer.encode`."""
        token_ids = list[int]()
        for part in self._special.split(text) if special else (text,):
            if special and part in self.special_tokens:
                token_ids.append(self.special_tokens[part])
                continue
            for word in self._words(part):
                token_ids += self._cache.get(word) or self._encode_word(word)
        return token_ids

    def _read_pieces(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Pieces that begin a word, and pieces that continue one; beginnings of them that are not pieces have -1."""
        begins, continues = dict[str, int](), dict[str, int]()
        for token_id in range(self.vocab_size):
            piece = self._bindings.llama_vocab_get_text(self.vocab, token_id).decode(errors="replace")
            if token_id in self.control_token_ids or not piece:
                continue
            if piece.startswith(_BEGIN):
                begins[piece.removeprefix(_BEGIN)] = token_id
            else:
                continues[piece] = token_id
        for pieces in (begins, continues):
            for piece in list(pieces):
                for end in range(1, len(piece)):
                    pieces.setdefault(piece[:end], _NO_PIECE)
        return begins, continues

    def _words(self, text: str) -> list[str]:
        """Words, normalised; each punctuation mark and each ideograph is one."""
        if self._rules.strips_accents and not text.isascii():
            text = unicodedata.normalize("NFD", text)
        return text.translate(self._characters).split()

    def _encode_word(self, word: str) -> list[int]:
        """Return the longest pieces from the left; the unknown token if a part of the word has none."""
        token_ids = list[int]()
        start, length = 0, len(word)
        while start < length <= _MAX_WORD:
            pieces = self._continues if start else self._begins
            longest, stop, end = _NO_PIECE, start, start + 1
            while end <= length and (token_id := pieces.get(word[start:end])) is not None:
                if token_id != _NO_PIECE:
                    longest, stop = token_id, end
                end += 1
            if longest == _NO_PIECE:
                break
            token_ids.append(longest)
            start = stop
        if start < length:
            token_ids = self._unknown
        if len(self._cache) >= _CACHED_WORDS:
            self._cache = {}
        self._cache[word] = token_ids
        return token_ids


class _Characters(dict[int, str]):
    """Replacement of each character, found when it first occurs; a word of its own gets spaces around it."""

    def __init__(self, rules: WordRules) -> None:
        super().__init__()
        self._rules = rules

    def __missing__(self, code: int) -> str:
        found = self[code] = self._find(chr(code))
        return found

    def _find(self, character: str) -> str:
        category = unicodedata.category(character)
        if character in "\t\n\r" or category == "Zs":
            return " "
        if category in _NOT_KEPT or character == "\ufffd" or (category == "Mn" and self._rules.strips_accents):
            return ""
        if _IS_ALONE.match(character) or category.startswith("P"):
            return f" {character} "
        return character.lower() if self._rules.is_lowercase else character
