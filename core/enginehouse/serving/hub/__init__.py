"""Models of the Hugging Face hub: names, download cache, and downloading."""

from __future__ import annotations

from enginehouse.serving.hub.client import HubClient
from enginehouse.serving.hub.pulling import Pulled, PullReport, pull
from enginehouse.serving.hub.reference import HubReference, parse_reference
from enginehouse.serving.hub.refusals import HubUnreachable

__all__ = ["HubClient", "HubReference", "HubUnreachable", "PullReport", "Pulled", "parse_reference", "pull"]
