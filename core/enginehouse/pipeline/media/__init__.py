"""Non-text message parts: fetched from allowed hosts only, checked without decoding, declared types not trusted."""

from __future__ import annotations

from enginehouse.pipeline.media.reading import MediaReader, check_media

__all__ = ["MediaReader", "check_media"]
