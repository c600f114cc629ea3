"""Qwen3-MoE against transformers' class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crossdock.testing.model_oracle import TOLERANCE, oracle_errors
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.tiny_models import save_tiny_model

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one key head": {"num_key_value_heads": 1, "num_attention_heads": 8},
    "as many key heads": {"num_key_value_heads": 4},
    "kernel sizes": {"head_dim": 32, "hidden_size": 64, "moe_intermediate_size": 32},
    "tied, no renormalisation": {"tie_word_embeddings": True, "norm_topk_prob": False},
    "dense by list, biases": {"mlp_only_layers": [1], "attention_bias": True},
    "dense by step": {"decoder_sparse_step": 2},
    "all dense": {"mlp_only_layers": [0, 1, 2]},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(tmp_path, "qwen3_moe", **VARIANTS[name])
    errors = oracle_errors(DriverChoice(folder=str(folder)))
    assert max(errors.values()) < TOLERANCE, errors
