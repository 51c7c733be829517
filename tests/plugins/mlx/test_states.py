"""Saved sequences: another runner goes on with equal logits, other data is refused, a restarted server finds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from enginehouse.contract.backend import Span
from enginehouse.contract.errors import StateRefused
from enginehouse_backendkit.saved_states import HEAD_BYTES, write_head
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_testkit.contract.reopened_states import OpenRunner, ReopenedStatesContract

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(300)]


class TestStates(ReopenedStatesContract):
    backend = MlxBackend()
    options = MlxOptions(context=64, slots=2)
    more_options = ({"draws": "mlx"},)

    @pytest.fixture
    def folder(self, tiny_model: Callable[[str], Path]) -> Callable[[str], Path]:
        return tiny_model

    @pytest.mark.parametrize("num_bytes", [0, 1, 1000, 40 * 512 - 1, 40 * 512 + 1, 41 * 512])
    def test_a_right_head_before_another_amount_of_data_is_refused(
        self, open_runner: OpenRunner, num_bytes: int
    ) -> None:
        runner = open_runner()
        sequence = runner.open_sequence()
        runner.forward([Span(sequence, 0, np.arange(40, dtype=np.int32))])
        # 2 layers, keys and values, 2 heads of 16 floats
        assert runner.save(sequence).nbytes == HEAD_BYTES + 40 * 512
        data = memoryview(bytearray(HEAD_BYTES + num_bytes))
        write_head(data, runner.state_format, 40)
        free_tokens = runner.free_tokens()
        with pytest.raises(StateRefused):
            runner.load(data)

        assert runner.free_tokens() == free_tokens
