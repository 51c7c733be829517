"""Nothing here is collected without the ``hf`` extra."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]
