"""Loading without the library, and binding."""

from __future__ import annotations

import subprocess
import sys

from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings

WITHOUT_LIBRARY = """
import sys
sys.modules["llguidance"] = None  # not installed
from enginehouse.settings.config import PluginsSettings
from enginehouse.contract.errors import MissingDependency
from enginehouse.plugins import PluginRegistry
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

registry = PluginRegistry.load(PluginsSettings())
try:
    registry.structured_decoders["llguidance"].bind(FakeTokenizer())
except MissingDependency as error:
    print(error.message)
"""


def test_the_plugin_is_listed_with_its_kinds() -> None:
    decoder = PluginRegistry.load(PluginsSettings()).structured_decoders["llguidance"]

    assert {"json_object", "json_schema", "regex", "choice", "lark", "gbnf"} <= decoder.kinds


def test_it_loads_without_the_library_and_then_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARY], capture_output=True, text=True, check=False)

    assert done.stdout == "llguidance is not installed; run: pip install 'enginehouse[llguidance]'\n", done.stderr
