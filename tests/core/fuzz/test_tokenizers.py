"""Damaged ``tokenizer.json`` files, which a library in Rust reads inside the worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .damage import Amount, amounts

pytest.importorskip("tokenizers")


@amounts(1000)
def test_tokenizers(amount: Amount) -> None:
    script = Path(__file__).with_name("tokenizer_cases.py")
    ended = subprocess.run(
        [sys.executable, str(script), str(amount.num_cases), str(amount.seconds)],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr[-3000:]
