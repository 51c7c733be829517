r"""Pre-tokenizers of llama.cpp: those that recurse on the stack, and those with quadratic run time.

A BPE vocabulary names the expressions that split a text into words before merging. llama.cpp implements some of them
itself; the others run through ``std::regex``, which in GNU's library recurses once per character of a match. Measured
(llama-cpp-python 0.3, GCC 12; letters, spaces, digits, punctuation, CJK, combining marks, emoji): 321 bytes of stack
per character with each of them, so a word of 26,000 characters ends a process whose threads have 8 MiB.

Three are quadratic in the length of a run that one of their expressions rescans from each character: 20 to 30 ns times
the square of its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from attrs import frozen

from enginehouse.contract.errors import InvalidRequest

__all__ = ["MAX_MATCH_CHARACTERS", "WITHOUT_REGEX", "PreTokenizer"]

WITHOUT_REGEX = frozenset(
    """
    a.x-4.0 chatglm-bpe codeshell command-r dbrx deepseek-r1-qwen exaone exaone4 f2llmv2 falcon-h1 falcon3 gemma4
    gigachat glm4 glm5 gpt-2 granite-docling granite-embed-multi-311m grok-2 hunyuan jais jina-de jina-es jina-v1-en
    jina-v2-code jina-v2-de jina-v2-es jina-v5-nano kimi-k2 kormo laguna lfm2 llama-bpe llama-v3 llama3 megrez mellum
    mellum2 midm-2.0 minerva-7b modern-bert mpt olmo phi-2 pixtral qwen2 qwen35 refact roberta-bpe sarvam-moe smaug-bpe
    smollm solar-open stablelm2 starcoder trillion
    """.split()  # noqa: SIM905 - a list of fifty lines says no more
)
"""Values of ``tokenizer.ggml.pre`` whose unbounded matches llama.cpp implements itself; a test checks each."""

_WORDS = re.compile(r"[^ \t\n\v\f\r]+")
_LINES = re.compile(r"[^\r\n]+")
_SPACES = re.compile(r"\s{2,}")
_DIGITS = re.compile(r"\d{2,}")

_OF_WORDS = frozenset({"exaone-moe"})
"""Pre-tokenizers with an expression that matches several words at once, so only a line end surely ends a match."""

_QUADRATIC: Mapping[str, re.Pattern[str]] = {"deepseek-llm": _SPACES, "jais-2": _SPACES, "superbpe": _DIGITS}

MAX_MATCH_CHARACTERS = 2**18
_MAX_SPECIAL_TOKENS = 50_000
"""llama.cpp recompiles the expressions after each special token, which takes up to a millisecond."""

_MAX_SQUARES = 10**8
"""Limit of the sum of squared lengths of quadratic runs: about three seconds."""


@frozen
class PreTokenizer:
    """Pre-tokenizer of one vocabulary.

    Attributes:
        name: value of ``tokenizer.ggml.pre``, "default" if the file has none.
        recurses: stack use grows with each character of a match.
    """

    name: str
    recurses: bool

    @classmethod
    def of(cls, is_bpe: bool, model: str, pre: str) -> PreTokenizer:
        """Return the pre-tokenizer that llama.cpp selects.

        Args:
            is_bpe: other kinds of vocabularies have none.
            model: value of ``tokenizer.ggml.model``.
            pre: value of ``tokenizer.ggml.pre``, "" if the file has none.
        """
        name = "gemma4" if model == "gemma4" else pre or "default"
        return cls(name, is_bpe and name not in WITHOUT_REGEX)

    def longest_match(self, text: str) -> int:
        """Upper bound, in characters, of the stack that one match in ``text`` may use.

        Raises:
            InvalidRequest: a match may be too long, or the text would take quadratic time.
        """
        if not self.recurses:
            return 0
        is_of_words = self.name in _OF_WORDS
        longest = _longest((_LINES if is_of_words else _WORDS).finditer(text))
        # A match is one optional character, a word, and the white space after it.
        length = longest + _longest(_SPACES.finditer(text)) + 2
        if length > MAX_MATCH_CHARACTERS:
            end = "end of a line" if is_of_words else "white space"
            raise InvalidRequest(
                f"The text goes on for {length} characters without {end}, or has that much white space in one place; "
                f"the tokenizer of this model ({self.name}) takes at most {MAX_MATCH_CHARACTERS} characters. "
                "Break the text up, or send token ids."
            )
        self._check_time(text)
        return length

    def check_pieces(self, num_special_tokens: int) -> None:
        """Refuse a text with too many special tokens, as recompiling the expressions for each would take minutes.

        Raises:
            InvalidRequest: there are too many.
        """
        if self.recurses and num_special_tokens > _MAX_SPECIAL_TOKENS:
            raise InvalidRequest(
                f"The text has about {num_special_tokens} special tokens; the tokenizer of this model ({self.name}) "
                f"takes at most {_MAX_SPECIAL_TOKENS} in one text. Send fewer, or token ids."
            )

    def _check_time(self, text: str) -> None:
        slow = _QUADRATIC.get(self.name)
        if slow is not None and sum((match.end() - match.start()) ** 2 for match in slow.finditer(text)) > _MAX_SQUARES:
            what = "digits" if slow is _DIGITS else "white space"
            raise InvalidRequest(
                f"The text has too much {what} in long runs: the time of this model's tokenizer ({self.name}) grows "
                f"with the square of their lengths, and these add up to more than {_MAX_SQUARES}. Shorten the runs, "
                "or send token ids."
            )


def _longest(matches: Iterable[re.Match[str]]) -> int:
    return max((match.end() - match.start() for match in matches), default=0)
