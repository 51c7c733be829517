"""Decoding of image files. Runs in the rendering process, which may be killed, since the files are not trusted.

Bounds are checked before anything is decoded. Does not know requests or models.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from enginehouse.contract.errors import RenderError

if TYPE_CHECKING:
    from PIL import Image

MAX_DECODED_PIXELS = 2**24
"""Maximum number of pixels of an image that is decoded: 64 MiB of memory."""

MISSING = "this server cannot decode images: pip install 'enginehouse[images]'"
"""Reason of the refusal where Pillow is not installed."""

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_ORIENTATION = 0x0112
"""Tag of EXIF: 1 is upright; 2 to 8 name the changes that make an image upright, see :func:`_upright`."""


def decode_image(data: bytes, target_pixels: int) -> tuple[int, int, bytes]:
    """Return width, height and pixels (RGB, row by row) of an image: its first frame, upright, on white.

    Args:
        data: a PNG, JPEG, GIF or WebP file.
        target_pixels: larger images are shrunk to at most this number, at least 1.

    Raises:
        RenderError: the image is damaged or too large; the message gives the reason, with the image as "it".
        MemoryError: it needs more than the process has.
    """
    try:
        from PIL import Image  # noqa: PLC0415 - of an extra
    except ImportError:
        raise RenderError(MISSING) from None
    Image.MAX_IMAGE_PIXELS = None  # checked here, with a message of ours
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            if image.width * image.height > MAX_DECODED_PIXELS:
                size = f"{image.width} x {image.height}"
                raise RenderError(f"it has {size} pixels, more than the {MAX_DECODED_PIXELS} that are decoded")
            return _pixels(image, target_pixels)
    except (RenderError, MemoryError):
        raise
    except Exception as error:
        problem = (
            f"it cannot be decoded ({type(error).__name__}): the file is damaged, or of a kind that Pillow cannot read"
        )
        raise RenderError(problem) from error


def _pixels(image: Image.Image, target_pixels: int) -> tuple[int, int, bytes]:
    from PIL.Image import Resampling, frombytes  # noqa: PLC0415 - of an extra

    share = math.sqrt(min(1.0, target_pixels / (image.width * image.height)))
    width = min(max(1, int(image.width * share)), target_pixels)
    size = width, max(1, min(int(image.height * share), target_pixels // width))
    orientation = image.getexif().get(_ORIENTATION, 1)
    if share < 1.0:
        image.draft("RGB", size)  # a JPEG file can be decoded at a fraction of its size
    image.load()
    if image.mode.startswith("I;16"):
        high = image.tobytes()[0 if image.mode.endswith("B") else 1 :: 2]
        image = frombytes("L", image.size, high)
    has_transparency = image.has_transparency_data
    image = image.convert("RGBA" if has_transparency else "RGB")
    if share < 1.0:
        image = image.resize(size, Resampling.BICUBIC, reducing_gap=2.0)
    if has_transparency:
        background = image.copy()
        background.paste((255, 255, 255, 255), (0, 0, *image.size))
        background.alpha_composite(image)
        image = background.convert("RGB")
    image = _upright(image, orientation)
    return image.width, image.height, image.tobytes()


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    """Turn an image as its EXIF data says. Source: the table of tag 274 in TIFF 6.0."""
    from PIL.Image import Transpose  # noqa: PLC0415 - of an extra

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(orientation)
    return image if turn is None else image.transpose(turn)
