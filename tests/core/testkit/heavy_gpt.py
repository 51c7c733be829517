"""A wrong backend: its module imports a package that is not one of core's, as if it were the library of its models."""

from __future__ import annotations

import pytest  # noqa: F401 - the mistake
from numpy_gpt import GptBackend


class HeavyBackend(GptBackend):
    """Right in all else."""
