"""Nothing here is collected without the ``mlx`` extra."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("mlx") and find_spec("mlx_lm") else ["test_*.py"]
