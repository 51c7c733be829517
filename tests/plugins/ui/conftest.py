"""The browser tests need playwright, which the tox environment `ui` has."""

from __future__ import annotations

import importlib.util

collect_ignore = ["test_browser.py"] if importlib.util.find_spec("playwright") is None else []
