"""Which models are served, under which names, and in what state they are."""

from __future__ import annotations

from enginehouse.models.manager import ModelManager
from enginehouse.models.served import LoadedModel, ModelState, ModelStatus

__all__ = ["LoadedModel", "ModelManager", "ModelState", "ModelStatus"]
