"""llama.cpp's own way from media to logits, to compare with."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from enginehouse_llamacpp.library import load_library


class Oracle:
    """llama.cpp's own path: mtmd_helper_eval_chunks, then llama_decode of single tokens."""

    def __init__(self, path: Path, type_v: int) -> None:
        library = load_library()
        self.llama, self.mtmd = library.bindings, library.mtmd
        params = self.llama.llama_model_default_params()
        params.use_extra_bufts = False
        self.model = self.llama.llama_model_load_from_file(str(path).encode(), params)
        params = self.llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 256
        params.type_v = type_v
        self.context = self.llama.llama_init_from_model(self.model, params)
        params = self.mtmd.mtmd_context_params_default()
        params.n_threads = 1
        projector = path.with_name("mmproj-F16.gguf")
        self.projector = self.mtmd.mtmd_init_from_file(str(projector).encode(), self.model, params)
        assert self.model and self.context and self.projector

    def image(self, pixels: NDArray[np.uint8]) -> int:
        """Return the bitmap of an image, (height, width, 3) uint8."""
        height, width, _ = pixels.shape
        address = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return int(self.mtmd.mtmd_bitmap_init(width, height, address))

    def recording(self, samples: NDArray[np.float32]) -> int:
        """Return the bitmap of a recording."""
        address = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return int(self.mtmd.mtmd_bitmap_init_from_audio(len(samples), address))

    def answer(self, before: str, bitmap: int, after: str, num_tokens: int) -> tuple[list[int], NDArray[np.float32]]:
        """Return the most probable tokens after two texts with a bitmap between them, and the first row."""
        llama, mtmd = self.llama, self.mtmd
        chunks, data = mtmd.mtmd_input_chunks_init(), f"{before}<__media__>{after}".encode()
        prompt = mtmd.mtmd_input_text(data, len(data), True, True)
        assert mtmd.mtmd_tokenize(self.projector, chunks, prompt, (ctypes.c_void_p * 1)(bitmap), 1) == 0
        position, answer, first = ctypes.c_int32(0), list[int](), None
        done = mtmd.mtmd_helper_eval_chunks(
            self.projector, self.context, chunks, 0, 0, 256, True, ctypes.byref(position)
        )
        assert done == 0
        vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        batch = llama.llama_batch_init(1, 0, 1)
        for step in range(num_tokens):
            row = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, -1), (vocab_size,)).copy()
            first = row if first is None else first
            answer.append(int(row.argmax()))
            batch.n_tokens, batch.token[0], batch.pos[0] = 1, answer[-1], position.value + step
            batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
            assert llama.llama_decode(self.context, batch) == 0
        llama.llama_batch_free(batch)
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        assert first is not None
        return answer, first

    def close(self) -> None:
        self.mtmd.mtmd_free(self.projector)
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)
