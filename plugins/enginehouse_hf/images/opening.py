"""Decides whether a model reads images with the options that it is opened with, and opens its reader."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from attrs import frozen
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoImageProcessor

from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit.fast_tokenizer import ModelText
from enginehouse_backendkit.model_folder import describe_failure
from enginehouse_hf.backend import HfOptions
from enginehouse_hf.facts import ModelFacts
from enginehouse_hf.images.families import FAMILIES, CannotRead, Family
from enginehouse_hf.images.reader import ImageReader
from enginehouse_hf.tokenizer import ModelFiles

__all__ = ["ImageSupport", "find_support"]

_log = logging.getLogger(__name__)

_FILES = ("preprocessor_config.json", "processor_config.json")
_CONDITIONS = "only on the CPU, or on one NVIDIA GPU with Triton, without device_map and quantization"


@frozen
class ImageSupport:
    """What is known of images before a model is loaded.

    Attributes:
        family: None for a model that reads none.
        obstacle: options with which hf does not read images, as in the configuration file; empty if it does.
    """

    family: Family | None = None
    obstacle: str = ""

    @property
    def reads_images(self) -> bool:
        """True if the model is loaded with its vision tower."""
        return self.family is not None and not self.obstacle

    def open(
        self, files: ModelFiles, model: Any, text: ModelText, facts: ModelFacts
    ) -> tuple[ImageReader | None, dict[str, str]]:
        """Return the reader, or None with a warning in the log; and metadata, in which the reason is."""
        if self.family is None:
            return None, {}
        try:
            if self.obstacle:
                raise CannotRead(f"hf reads images {_CONDITIONS}, not with {self.obstacle}")
            if facts.states and model.device.type != "cpu":
                raise CannotRead("some of its layers are recurrent; hf reads its images on the CPU only")
            reader = _open_reader(self.family, files, model, text)
        except CannotRead as error:
            _log.warning("hf: %s takes no images: %s", files.folder, error)
            return None, {"images": f"none: {error}"}
        return reader, {"images": type(reader.processor).__name__}


def find_support(files: ModelFiles, options: HfOptions) -> ImageSupport:
    """Return what is known of a model's images.

    Args:
        options: resolved.

    Raises:
        ModelLoadError: hf cannot read images with these options, and transformers has no class for the text alone.
    """
    if files.gguf_file is not None:
        return ImageSupport()
    config = AutoConfig.from_pretrained(**files.arguments)
    family = FAMILIES.get(config.model_type)
    if family is None:
        return ImageSupport()
    chosen = {name: getattr(options, name) for name in ("device_map", "quantization")}
    if options.device != "cpu" and not options.runs_on_cuda:
        chosen["device"] = options.device
    obstacle = ", ".join(f'{name} = "{value}"' for name, value in chosen.items() if value is not None)
    if obstacle and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(
            f"{files.folder}: hf computes models of the type {config.model_type} {_CONDITIONS}, not with {obstacle}"
        )
    return ImageSupport(family, obstacle)


def _open_reader(family: Family, files: ModelFiles, model: Any, text: ModelText) -> ImageReader:
    """Return what reads images for a model of a family. Raises CannotRead, with the reason."""
    if find_spec("PIL") is None:
        raise CannotRead("Pillow is not installed; run: pip install 'enginehouse[images]'")
    if not any((files.folder / name).is_file() for name in _FILES):
        raise CannotRead(f"the folder has no {_FILES[0]}")
    try:
        processor = AutoImageProcessor.from_pretrained(**files.arguments)
    except Exception as error:
        raise CannotRead(f"transformers cannot make its image processor: {describe_failure(error)}") from error
    return ImageReader(model, family, processor, text)
