"""A program, for a crash of the library to end this process only: damaged ``tokenizer.json`` files, wrapped and used.

Prints the number of cases at its end. Any exception is a named failure of the load, as are panics of the library in it.
A crash, too much memory or time, and a panic over a text are findings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from damage import Amount, damaged_document, run_damaged
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from enginehouse_backendkit.fast_tokenizer import FastTokenizer, check_tokenizer_file

_CORPUS = ["hello world, the quick brown fox jumps over it"] * 5


def _byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<s>", "<|im_end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return json.loads(tokenizer.to_str())


def _sentencepiece() -> Any:
    vocab = {"<unk>": 0, "<s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}, "▁h": 258, "▁he": 259}
    letters = {letter: 260 + at for at, letter in enumerate("▁helowrd")}
    merges = [("▁", "h"), ("▁h", "e")]
    tokenizer = Tokenizer(
        models.BPE({**vocab, **letters}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return json.loads(tokenizer.to_str())


def _loaded(text: str) -> Any:
    try:
        return Tokenizer.from_str(text)
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # the worker names it
            raise ValueError(str(error)) from error
        raise


def _check(random: Random, bases: list[Any], folder: Path) -> None:
    try:
        data = damaged_document(random, random.choice(bases))
        (folder / "tokenizer.json").write_bytes(data)
        check_tokenizer_file(folder)
        text = data.decode("utf-8")
        tokenizer = FastTokenizer(_loaded(text), random.choice([300, 100]), [1])
        for sample in ("hello world", "", "<|im_end|>x<s>", "é漢\U0001f642\0 12345\n"):
            for special in (True, False):
                assert all(isinstance(token_id, int) for token_id in tokenizer.encode(sample, special))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the loader names it
        return


if __name__ == "__main__":
    given = Amount(num_cases=int(sys.argv[1]), seconds=float(sys.argv[2]))
    all_bases = [_byte_level(), _sentencepiece()]
    with TemporaryDirectory() as name:
        run_damaged("tokenizer.json", given, lambda random: _check(random, all_bases, Path(name)))
