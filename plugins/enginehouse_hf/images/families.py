"""Families of models that read images: what each has in a prompt for an image, and how its image parts are called.

Each family is a function from what the checkpoint's image processor made of one image to a list of texts, token ids and
:class:`Tile`. It is written here, as transformers' processors of Qwen-VL and SmolVLM need packages for videos.

Sources: ``replace_image_token`` of Idefics3Processor, Gemma3Processor, LlavaProcessor and Qwen2_5_VLProcessor, and
``get_vision_position_ids`` of Qwen2_5_VLModel, in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor

from enginehouse_hf.images.windows import WINDOW_ATTENTION_NAME

__all__ = ["FAMILIES", "CannotRead", "Family", "Part", "Tile"]


class CannotRead(Exception):
    """Images of this model would be computed wrongly."""


@frozen(eq=False)
class Tile:
    """An image, or a part of a large one, with an embedding of its own.

    Attributes:
        inputs: arguments of the model's ``get_image_features``.
        num_tokens: rows of the embedding.
        grid: rows and columns of the tokens, if the model numbers them in two dimensions (M-RoPE).
    """

    inputs: Mapping[str, Tensor]
    num_tokens: int
    grid: tuple[int, int] | None = None

    @property
    def num_positions(self) -> int:
        """Positions by which the next token moves on."""
        return self.num_tokens if self.grid is None else max(self.grid)


Part = str | int | Tile
"""Text with control tokens, a token id, or a tile."""


@frozen
class Family:
    """How a family of models reads images.

    Attributes:
        parts: from the configuration and the output of the image processor for one image to the parts of a prompt.
        settings: of each call of the image processor.
        fewer_tokens: from the configuration, the image processor and a number of tokens to settings by which an image
            has about that number at most; None if the size of an image plays no part.
        sees_ahead: the tokens of a tile attend to each other.
        names: texts in ``parts`` that must be control tokens of the tokenizer.
        attention: attention function of the vision tower.
    """

    parts: Callable[[Any, Mapping[str, Any]], Sequence[Part]]
    settings: Mapping[str, Any] = {}
    fewer_tokens: Callable[[Any, Any, int], Mapping[str, Any]] | None = None
    sees_ahead: bool = False
    names: tuple[str, ...] = ()
    attention: str = "sdpa"


_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"
"""The first is a control token in every tokenizer; the second, and the names of rows and columns, only in SmolVLM's."""

_TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Vision towers of LLaVA models, with the number of states besides those of the patches."""


def _idefics3(config: Any, processed: Mapping[str, Any]) -> Sequence[Part]:
    """Rows of tiles, then the whole image made small; a small image is one tile."""
    vision = config.vision_config
    num_tokens = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    pixels = processed["pixel_values"]  # (1, tiles, 3, H, W)
    masks = processed["pixel_attention_mask"].bool()  # (1, tiles, H, W); an eighth of the library's int64
    rows, columns = int(processed["rows"][0][0]), int(processed["cols"][0][0])
    tiles = [
        Tile(
            {"pixel_values": pixels[:, at : at + 1], "pixel_attention_mask": masks[:, at : at + 1]},
            num_tokens,
        )
        for at in range(pixels.shape[1])
    ]
    parts: list[Part] = []
    ending = ""
    for row in range(rows):
        for column in range(columns):
            parts += [f"{ending}{_FAKE}<row_{row + 1}_col_{column + 1}>", tiles[row * columns + column]]
            ending = ""
        ending = "\n"
    return [*parts, f"{ending}{ending}{_FAKE}{_GLOBAL}", tiles[-1], _FAKE]


def _gemma3(config: Any, processed: Mapping[str, Any]) -> Sequence[Part]:
    tile = Tile({"pixel_values": processed["pixel_values"]}, config.mm_tokens_per_image)
    return ["\n\n", config.boi_token_id, tile, config.eoi_token_id, "\n\n"]


def _llava(config: Any, processed: Mapping[str, Any]) -> Sequence[Part]:
    vision, pixels = config.vision_config, processed["pixel_values"]  # (1, 3, H, W)
    if vision.model_type not in _TOWERS:
        raise CannotRead(f"its vision tower is a {vision.model_type}; known: {', '.join(_TOWERS)}")
    num_tokens = (pixels.shape[2] // vision.patch_size) * (pixels.shape[3] // vision.patch_size)
    num_tokens += _TOWERS[vision.model_type] - (config.vision_feature_select_strategy == "default")
    return [Tile({"pixel_values": pixels}, num_tokens)]


def _qwen(config: Any, processed: Mapping[str, Any]) -> Sequence[Part]:
    grid, merge = processed["image_grid_thw"], config.vision_config.spatial_merge_size  # (1, 3)
    _, rows, columns = (int(size) for size in grid[0])
    rows, columns = rows // merge, columns // merge
    inputs = {"pixel_values": processed["pixel_values"], "image_grid_thw": grid}
    return [config.vision_start_token_id, Tile(inputs, rows * columns, (rows, columns)), config.vision_end_token_id]


def _one_tile(config: Any, processor: Any, num_tokens: int) -> Mapping[str, Any]:
    return {"do_image_splitting": False}


def _fewer_pixels(config: Any, processor: Any, num_tokens: int) -> Mapping[str, Any]:
    side = processor.patch_size * processor.merge_size
    most = max(num_tokens, 1) * side * side
    size = processor.size
    return {
        "size": {"shortest_edge": min(size["shortest_edge"], most), "longest_edge": min(size["longest_edge"], most)}
    }


_IDEFICS3 = Family(_idefics3, {"return_row_col_info": True, "do_pad": True}, fewer_tokens=_one_tile, names=(_FAKE,))

FAMILIES: Mapping[str, Family] = {
    "gemma3": Family(_gemma3, {"do_pan_and_scan": False}, sees_ahead=True),
    "idefics3": _IDEFICS3,
    "llava": Family(_llava),
    "qwen2_5_vl": Family(_qwen, fewer_tokens=_fewer_pixels, attention=WINDOW_ATTENTION_NAME),
    "smolvlm": _IDEFICS3,
}
"""By ``model_type``."""
