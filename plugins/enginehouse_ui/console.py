"""The page ``console``: the folder ``page`` beside this module, whose vendored files ``vendored.json`` lists."""

from __future__ import annotations

from pathlib import Path

from enginehouse.contract.page import Page

__all__ = ["CONSOLE"]

CONSOLE = Page("console", Path(__file__).parent / "page")
