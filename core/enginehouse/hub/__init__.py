"""Models of the Hugging Face hub: their names, where downloads lie, and downloading."""

from __future__ import annotations

from enginehouse.hub.client import HubClient
from enginehouse.hub.pulling import Pulled, PullReport, pull
from enginehouse.hub.reference import HubReference, parse_reference
from enginehouse.hub.refusals import HubUnreachable

__all__ = ["HubClient", "HubReference", "HubUnreachable", "PullReport", "Pulled", "parse_reference", "pull"]
