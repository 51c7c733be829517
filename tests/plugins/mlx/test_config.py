"""Settings that transformers 5 moved in ``config.json`` reach mlx-lm's model classes."""

from __future__ import annotations

import pytest

from enginehouse_mlx.config import older_keys

pytestmark = pytest.mark.mlx


def test_older_keys_come_from_rope_parameters() -> None:
    assert older_keys({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}) == {"rope_theta": 5.0}


def test_older_keys_keep_a_scaled_rotation() -> None:
    parameters = {"rope_type": "llama3", "rope_theta": 5.0, "factor": 8.0}

    assert older_keys({"rope_parameters": parameters}) == {"rope_theta": 5.0, "rope_scaling": parameters}


def test_older_keys_of_a_model_with_two_kinds_of_layers() -> None:
    config = {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
            "full_attention": {"rope_type": "default", "rope_theta": 7.0},
        },
    }

    assert older_keys(config) == {"rope_theta": 7.0, "rope_local_base_freq": 5.0, "sliding_window_pattern": 2}


def test_older_keys_never_replace_what_is_there() -> None:
    assert older_keys({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5.0}}) == {}


def test_older_keys_reach_the_text_part_of_a_larger_model() -> None:
    config = {"text_config": {"hidden_size": 8, "rope_parameters": {"rope_theta": 5.0}}}

    assert older_keys(config)["text_config"]["rope_theta"] == 5.0
    assert older_keys(config)["text_config"]["hidden_size"] == 8


def test_older_keys_leave_an_irregular_pattern_to_the_model() -> None:
    assert older_keys({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}) == {}
