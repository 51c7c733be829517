"""Served models: their names, their states, and loading and unloading."""

from __future__ import annotations

from enginehouse.contract.calls import ModelState
from enginehouse.serving.leases import Lease
from enginehouse.serving.lifecycle import ModelStatus
from enginehouse.serving.manager import ModelManager
from enginehouse.serving.served import LoadedModel

__all__ = ["Lease", "LoadedModel", "ModelManager", "ModelState", "ModelStatus"]
