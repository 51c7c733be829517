"""``[media]``: images and recordings in messages. A part of ``config``."""

from __future__ import annotations

import re
from typing import Any

from attrs import field, frozen
from attrs.validators import ge, gt

from enginehouse.settings.reload import LIVE


def _check_image_hosts(_: object, attribute: Any, value: tuple[str, ...]) -> None:
    for host in value:
        if not host or re.search(r"[/\s@]", host):
            raise ValueError(f"'{attribute.name}' must hold hosts such as images.example, not {host!r}")


@frozen(kw_only=True)
class MediaSettings:
    """``[media]``: images and recordings in messages, for models that support them.

    Attributes:
        allowed_hosts: hosts from which images may be downloaded, besides ``data:`` URLs: ``images.example``,
            ``.example.org`` for every name below it, ``*`` for all; append ``:8443`` for a port other than the default.
        allow_private: also allow hosts whose addresses are not on the public internet.
        max_images: maximum number of images and recordings per request.
        max_bytes: maximum size of an image or a recording.
        max_pixels: maximum number of pixels of an image, according to its header.
        max_audio_s: maximum duration of the recordings of a request, in seconds.
        max_redirects: maximum number of redirects per download.
        timeout_s: time limit for the download of an image, in seconds.
    """

    allowed_hosts: tuple[str, ...] = field(default=(), validator=_check_image_hosts, metadata=LIVE)
    allow_private: bool = field(default=False, metadata=LIVE)
    max_images: int = field(default=16, validator=ge(1), metadata=LIVE)
    max_bytes: int = field(default=10 * 1024 * 1024, validator=gt(0), metadata=LIVE)
    max_pixels: int = field(default=40_000_000, validator=gt(0), metadata=LIVE)
    max_audio_s: float = field(default=300.0, validator=gt(0), metadata=LIVE)
    max_redirects: int = field(default=3, validator=ge(0), metadata=LIVE)
    timeout_s: float = field(default=10.0, validator=gt(0), metadata=LIVE)
