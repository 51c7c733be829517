"""Token ids of a GGUF vocabulary. Thread-safe: llama.cpp's tokenizer only reads, our tables never change.

All text that this plugin tokenizes goes through :meth:`LlamaCppTokenizer.encode`, because llama.cpp's own function
overflows the stack of a normal thread on some texts; see :mod:`enginehouse_llamacpp.pre_tokenizers`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence

from enginehouse.contract.errors import GenerationFailed
from enginehouse.engine.text.segments import bytes_per_token
from enginehouse_llamacpp.library import Bindings
from enginehouse_llamacpp.pre_tokenizers import PreTokenizer
from enginehouse_llamacpp.special_splits import TOKENS_PER_PIECE, SpecialSplits

__all__ = ["LlamaCppTokenizer"]

_SHALLOW_CHARACTERS = 1024
"""Length of a match that fits on any thread's stack."""

_STACK_BYTES_PER_CHARACTER = 1024
"""Three times the measured value. Only the used part is backed by memory; it is released when the thread ends."""

_BASE_STACK_BYTES = 2**20

_stack_size_lock = threading.Lock()


class LlamaCppTokenizer:
    """Implements :class:`enginehouse.contract.backend.Tokenizer`; valid while the model is loaded.

    Tables are built once: one llama.cpp call per token would cost more than sampling.
    """

    def __init__(self, bindings: Bindings, vocab: int, pre_tokenizer: PreTokenizer) -> None:
        self._bindings, self.vocab, self._pre_tokenizer = bindings, vocab, pre_tokenizer
        self.vocab_size: int = bindings.llama_vocab_n_tokens(vocab)
        self.token_bytes: Sequence[bytes] = self._read_token_bytes()
        control = self._read_control_ids()
        is_end = bindings.llama_vocab_is_eog
        self.end_token_ids = frozenset(token_id for token_id in range(self.vocab_size) if is_end(vocab, token_id))
        self.control_token_ids = frozenset(control) | self.end_token_ids
        self.special_tokens: Mapping[str, int] = {
            self.token_bytes[token_id].decode(errors="replace"): token_id for token_id in sorted(control)
        }
        self.splits = {special: self._read_splits(special) for special in (False, True)}
        self.max_bytes_per_token = self._find_max_bytes_per_token()
        bos = bindings.llama_vocab_bos(vocab)
        self.prefix_token_ids: tuple[int, ...] = (bos,) if bindings.llama_vocab_get_add_bos(vocab) and bos >= 0 else ()

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the token ids of ``text`` without prefix. Control-token strings are parsed only with ``special``.

        Raises:
            InvalidRequest: the vocabulary's pre-tokenizer cannot process this text.
            GenerationFailed: the memory does not suffice for the required stack.
        """
        if len(text) <= _SHALLOW_CHARACTERS:
            return self.encode_here(text, special)
        length = self._pre_tokenizer.longest_match(text)
        if length <= _SHALLOW_CHARACTERS:
            return self.encode_here(text, special)
        thread = _DeepThread(self, text, special)
        thread.begin(_BASE_STACK_BYTES + length * _STACK_BYTES_PER_CHARACTER)
        return thread.result()

    def encode_here(self, text: str, special: bool) -> list[int]:
        """:meth:`encode` on the stack of the calling thread."""
        if text and not text.isascii():
            text = text.encode(errors="replace").decode()  # replaces lone surrogates by question marks
        pieces = list(self.splits[special].pieces(text))
        self._pre_tokenizer.check_pieces(len(pieces) * TOKENS_PER_PIECE)
        token_ids = list[int]()
        for piece in pieces:
            token_ids += self._encode_piece(piece.encode(), special)
        return token_ids

    def _encode_piece(self, data: bytes, special: bool) -> list[int]:
        if not data:
            return []
        size = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * size)()
            count = self._bindings.llama_tokenize(self.vocab, data, len(data), buffer, size, False, special)
            if count >= 0:
                return buffer[:count]
            size = -count

    def token_text(self, token_id: int) -> str:
        """Text of one id; empty for an id that does not exist."""
        return self.token_bytes[token_id].decode(errors="replace") if 0 <= token_id < self.vocab_size else ""

    def _read_token_bytes(self) -> tuple[bytes, ...]:
        """Read the bytes of every id; control tokens by name."""
        to_piece, vocab = self._bindings.llama_token_to_piece, self.vocab
        buffer = ctypes.create_string_buffer(256)
        pieces = []
        for token_id in range(self.vocab_size):
            length = to_piece(vocab, token_id, buffer, len(buffer), 0, True)
            if length < 0:
                buffer = ctypes.create_string_buffer(-length)
                length = to_piece(vocab, token_id, buffer, len(buffer), 0, True)
            pieces.append(ctypes.string_at(buffer, length))
        return tuple(pieces)

    def _read_control_ids(self) -> list[int]:
        """Ids that llama.cpp parses from text only if special tokens are enabled."""
        get_attributes, vocab = self._bindings.llama_vocab_get_attr, self.vocab
        mask = self._bindings.LLAMA_TOKEN_ATTR_CONTROL | self._bindings.LLAMA_TOKEN_ATTR_UNKNOWN
        return [token_id for token_id in range(self.vocab_size) if get_attributes(vocab, token_id) & mask]

    def _find_max_bytes_per_token(self) -> int | None:
        bindings, vocab = self._bindings, self.vocab
        strips = bindings.LLAMA_TOKEN_ATTR_LSTRIP | bindings.LLAMA_TOKEN_ATTR_RSTRIP
        is_lossless = bindings.llama_vocab_type(vocab) in (bindings.LLAMA_VOCAB_TYPE_BPE, bindings.LLAMA_VOCAB_TYPE_SPM)
        if not is_lossless or any(bindings.llama_vocab_get_attr(vocab, i) & strips for i in range(self.vocab_size)):
            return None
        return bytes_per_token(self.token_bytes)

    def _read_splits(self, special: bool) -> SpecialSplits:
        """Return the tokens that llama.cpp searches for first, with or without control tokens."""
        bindings, vocab = self._bindings, self.vocab
        attributes = [bindings.llama_vocab_get_attr(vocab, token_id) for token_id in range(self.vocab_size)]
        if any(attribute & bindings.LLAMA_TOKEN_ATTR_LSTRIP for attribute in attributes):
            return SpecialSplits(())  # the start of these tokens depends on the preceding text
        mask = bindings.LLAMA_TOKEN_ATTR_USER_DEFINED
        if special:
            mask |= bindings.LLAMA_TOKEN_ATTR_CONTROL | bindings.LLAMA_TOKEN_ATTR_UNKNOWN
        texts = [
            bindings.llama_vocab_get_text(vocab, token_id)
            for token_id, attribute in enumerate(attributes)
            if attribute & mask
        ]
        try:
            strings = [text.decode() for text in texts]
        except UnicodeDecodeError:
            return SpecialSplits(())  # half a character may match anywhere
        strips = any(attribute & bindings.LLAMA_TOKEN_ATTR_RSTRIP for attribute in attributes)
        return SpecialSplits(strings, strips)


class _DeepThread(threading.Thread):
    """Tokenizes one text on a thread with its own stack size."""

    def __init__(self, tokenizer: LlamaCppTokenizer, text: str, special: bool) -> None:
        super().__init__(name="deep tokenizing", daemon=True)
        self._tokenizer, self._text, self._special = tokenizer, text, special
        self._token_ids: list[int] | None = None
        self._error: BaseException | None = None

    def begin(self, stack_bytes: int) -> None:
        """Start the thread with ``stack_bytes`` of stack, rounded up to whole MiB.

        Raises:
            GenerationFailed: the system cannot provide that much address space.
        """
        size = -(-stack_bytes // 2**20) * 2**20
        with _stack_size_lock:  # interpreter-wide; affects all threads started in the meantime
            before = threading.stack_size(size)
            try:
                self.start()
            except (RuntimeError, MemoryError) as error:
                message = (
                    f"The memory does not suffice for a stack of {size // 2**20} MiB, which tokenizing this text needs."
                )
                raise GenerationFailed(message) from error
            finally:
                threading.stack_size(before)

    def result(self) -> list[int]:
        """Wait for the token ids and return them; re-raises the tokenizer's exception."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._token_ids is not None
        return self._token_ids

    def run(self) -> None:
        """Tokenize."""
        try:
            self._token_ids = self._tokenizer.encode_here(self._text, self._special)
        except BaseException as error:  # noqa: BLE001 - raised where the result is wanted
            self._error = error
