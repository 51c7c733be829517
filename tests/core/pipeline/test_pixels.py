"""Image files as pixels: upright, of the first frame, on white, within bounds."""

from __future__ import annotations

import io
from typing import Any

import pytest

from enginehouse.contract.errors import RenderError
from enginehouse.pipeline.prompt.pixels import MAX_DECODED_PIXELS, decode_image
from enginehouse_testkit.fake_media import fake_image, fake_image_file

Image = pytest.importorskip("PIL.Image")

_ALL = 2**22
_RED, _BLUE, _WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def two_colours(width: int = 4, height: int = 2) -> Any:
    """Red, with a blue upper left pixel."""
    image = Image.new("RGB", (width, height), _RED)
    image.putpixel((0, 0), _BLUE)
    return image


def pixels(data: bytes, target: int = _ALL) -> tuple[tuple[int, int], list[tuple[int, ...]]]:
    width, height, rgb = decode_image(data, target)
    assert len(rgb) == width * height * 3
    return (width, height), [tuple(rgb[at : at + 3]) for at in range(0, len(rgb), 3)]


def test_a_file_without_a_library_has_the_pixels_of_its_picture() -> None:
    image = fake_image(3, 5, 4)
    assert decode_image(fake_image_file(3, 5, 4), _ALL) == (5, 4, image.rgb)


@pytest.mark.parametrize(
    ("orientation", "size", "place"),
    [
        (1, (4, 2), (0, 0)),
        (2, (4, 2), (3, 0)),
        (3, (4, 2), (3, 1)),
        (4, (4, 2), (0, 1)),
        (5, (2, 4), (0, 0)),
        (6, (2, 4), (1, 0)),
        (7, (2, 4), (1, 3)),
        (8, (2, 4), (0, 3)),
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_images_are_turned_as_exif_says(
    orientation: int, size: tuple[int, int], place: tuple[int, int], kind: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    found, colours = pixels(file_of(two_colours(), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {})))

    assert found == size
    assert [at for at, colour in enumerate(colours) if colour == _BLUE] == [place[1] * size[0] + place[0]]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in (_RED, _BLUE)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)

    assert pixels(data)[1] == [_RED] * 4


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(mode: str) -> None:
    image = Image.new("RGBA", (2, 1), (255, 255, 255, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    data = file_of(image.convert(mode)) if mode != "P" else file_of(image, "GIF")

    assert pixels(data)[1] == [_WHITE, (0, 0, 0)]


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [("1", 1, _WHITE), ("L", 128, (128,) * 3), ("I;16", 0x80FF, (128,) * 3), ("CMYK", (0, 0, 0, 0), _WHITE)],
)
def test_every_kind_of_pixel_becomes_rgb(mode: str, value: Any, expected: tuple[int, ...]) -> None:
    data = file_of(Image.new(mode, (2, 2), value), "JPEG" if mode == "CMYK" else "PNG")
    assert pixels(data)[1] == [expected] * 4


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_large_images_are_shrunk_in_their_proportions(kind: str) -> None:
    (width, height), colours = pixels(file_of(Image.new("RGB", (400, 100), _RED), kind), target=100)

    assert (width, height) == (20, 5)
    assert all(abs(one - other) < 3 for colour in colours for one, other in zip(colour, _RED, strict=True))
    assert pixels(file_of(Image.new("RGB", (3000, 1), _RED)), target=100)[0] == (100, 1)
    assert pixels(file_of(Image.new("RGB", (1, 3000), _RED)), target=100)[0] == (1, 100)


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    side = int(MAX_DECODED_PIXELS**0.5) + 1
    with pytest.raises(RenderError, match=f"{side} x {side} pixels, more than"):
        decode_image(file_of(Image.new("1", (side, side))), _ALL)


@pytest.mark.parametrize(
    "data", [b"", b"<svg/>", fake_image_file(1)[:-30], file_of(Image.new("RGB", (8, 8)), "TIFF"), b"RIFF" + bytes(40)]
)
def test_other_and_damaged_files_are_refused(data: bytes) -> None:
    with pytest.raises(RenderError, match="cannot be decoded"):
        decode_image(data, _ALL)
