"""Names of hub models as users write them: ``OWNER/NAME[:QUANTISATION][@REVISION]``."""

from __future__ import annotations

import re

from attrs import frozen

from enginehouse.serving.hub.quantizations import is_quantization

__all__ = ["HubReference", "parse_reference"]

_REFERENCE = re.compile(
    r"(?P<id>[\w.-]+/[\w.-]+)(?::(?P<wanted>[\w.-]+))?(?:@(?P<revision>[\w.-][\w.-]*(?:/[\w.-]+)*))?", re.ASCII
)


@frozen(kw_only=True)
class HubReference:
    """A model of a hub.

    Attributes:
        quantization: which GGUF file of it is meant; None is the model as safetensors, or the only GGUF file.
        revision: a branch, a tag or a commit.
    """

    model_id: str
    quantization: str | None = None
    revision: str = "main"

    def __str__(self) -> str:
        """What users write for it."""
        wanted = f":{self.quantization}" if self.quantization else ""
        return f"{self.model_id}{wanted}" + (f"@{self.revision}" if self.revision != "main" else "")


def parse_reference(text: str) -> HubReference | None:
    """What ``text`` means; None where it is no name of a hub's model.

    ``owner/name:v1.0`` is a revision too, as what follows the colon is the name of no quantisation.
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
