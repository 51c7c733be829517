"""Prompt compression: selects the texts of a request that may be shortened, and shortens them.

``choosing`` combines request and settings, ``texts`` finds the texts that may be changed, a plugin's compressor decides
which parts to keep, and ``prompt_compressor`` cuts. Used by the pipeline. Does not know any template or wire format.
"""

from __future__ import annotations

from enginehouse.pipeline.compressing.prompt_compressor import Compressed, PromptCompressor

__all__ = ["Compressed", "PromptCompressor"]
