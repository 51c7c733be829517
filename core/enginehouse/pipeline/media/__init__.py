"""What messages hold besides text: read from where the settings allow, checked without decoding, never believed."""

from __future__ import annotations

from enginehouse.pipeline.media.reading import MediaReader, check_media

__all__ = ["MediaReader", "check_media"]
