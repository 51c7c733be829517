"""The browser tests need playwright, which the tox environment `ui` has."""

from __future__ import annotations

import importlib.util

collect_ignore = ["browser"] if importlib.util.find_spec("playwright") is None else []
