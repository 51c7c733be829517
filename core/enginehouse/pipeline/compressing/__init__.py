"""Shorter prompts: which texts of a request may be shortened, by what, and what is left of them.

``choosing`` reads what request and settings say, ``texts`` finds what may be touched, a plugin's compressor says what
to keep of it, and ``prompt_compressor`` cuts. Used by the pipeline. Knows no template and no wire format.
"""

from __future__ import annotations

from enginehouse.pipeline.compressing.prompt_compressor import Compressed, PromptCompressor

__all__ = ["Compressed", "PromptCompressor"]
