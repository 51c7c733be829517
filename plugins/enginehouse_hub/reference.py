"""Names of hub models as users write them: ``OWNER/NAME[:QUANTISATION][@REVISION]``."""

from __future__ import annotations

import re

from attrs import frozen

from enginehouse.contract.gguf_names import is_quantization

__all__ = ["HubReference", "parse_reference"]

_REFERENCE = re.compile(
    r"(?P<id>[\w.-]+/[\w.-]+)(?::(?P<wanted>[\w.-]+))?(?:@(?P<revision>[\w.-][\w.-]*(?:/[\w.-]+)*))?", re.ASCII
)


@frozen(kw_only=True)
class HubReference:
    """A reference to a hub model.

    Attributes:
        quantization: selects a GGUF file; None means safetensors, or the only GGUF file.
        revision: a branch, a tag or a commit.
    """

    model_id: str
    quantization: str | None = None
    revision: str = "main"

    def __str__(self) -> str:
        """Return the reference as users write it."""
        wanted = f":{self.quantization}" if self.quantization else ""
        return f"{self.model_id}{wanted}" + (f"@{self.revision}" if self.revision != "main" else "")


def parse_reference(text: str) -> HubReference | None:
    """Parse a reference; None if ``text`` is not the name of a hub model.

    ``owner/name:v1.0`` is a revision too, because the part after the colon is not a quantisation.
    """
    found = _REFERENCE.fullmatch(text)
    if found is None or ".." in text:
        return None
    wanted, revision = found["wanted"], found["revision"]
    if wanted is not None and not is_quantization(wanted):
        if revision is not None:
            return None
        wanted, revision = None, wanted
    return HubReference(model_id=found["id"], quantization=wanted, revision=revision or "main")
