"""Served models: their names, their states, and loading and unloading."""

from __future__ import annotations

from enginehouse.serving.leases import Lease
from enginehouse.serving.manager import ModelManager
from enginehouse.serving.served import LoadedModel
from enginehouse.serving.status import ModelState, ModelStatus

__all__ = ["Lease", "LoadedModel", "ModelManager", "ModelState", "ModelStatus"]
