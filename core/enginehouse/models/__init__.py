"""Which models are served, under which names, and in what state they are."""

from __future__ import annotations

from enginehouse.models.leases import Lease
from enginehouse.models.manager import ModelManager
from enginehouse.models.served import LoadedModel
from enginehouse.models.status import ModelState, ModelStatus

__all__ = ["Lease", "LoadedModel", "ModelManager", "ModelState", "ModelStatus"]
