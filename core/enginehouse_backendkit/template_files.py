"""Chat templates in the files of a model, read without its library: for commands that examine files.

A backend that has opened the model gives its templates in :class:`enginehouse.contract.types.ModelInfo`.
"""

from __future__ import annotations

from pathlib import Path

from enginehouse.contract.regular_files import read_regular_text
from enginehouse_backendkit.fast_tokenizer import chat_templates
from enginehouse_backendkit.folder_files import read_object
from enginehouse_backendkit.gguf_reader import GgufReader, reading

__all__ = ["read_templates"]

_KEY = "tokenizer.chat_template"
_MAX_BYTES = 4 * 2**20


def read_templates(path: Path) -> dict[str, str]:
    """Return the templates of a GGUF file or of a folder, by name; ``default`` is the usual one.

    Raises:
        ModelLoadError: a file cannot be read.
        OSError: the same, for a template in a file of its own.
        UnicodeDecodeError: such a file is not UTF-8.
    """
    if path.is_dir():
        return _of_folder(path)
    found: dict[str, str] = {}
    with reading(path) as file:
        for entry in GgufReader(file).entries():
            if isinstance(entry.value, str) and (entry.key == _KEY or entry.key.startswith(f"{_KEY}.")):
                found[entry.key.removeprefix(_KEY).lstrip(".") or "default"] = entry.value
    return found


def _of_folder(folder: Path) -> dict[str, str]:
    """Return the templates of a folder; those in files of their own come before those in ``tokenizer_config.json``."""
    config = folder / "tokenizer_config.json"
    written = read_object(config).get("chat_template") if config.is_file() else None
    if isinstance(written, list):
        named = [one for one in written if isinstance(one, dict)]
        written = {str(one.get("name")): str(one.get("template")) for one in named}
    found = chat_templates(written if isinstance(written, str | dict) else None, folder)
    files = {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return found | {name: read_regular_text(file, _MAX_BYTES) for name, file in files.items()}
