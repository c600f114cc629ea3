"""Mixtral against transformers' class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crossdock.testing.model_oracle import TOLERANCE, oracle_errors
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.tiny_models import save_tiny_model

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one key head": {"num_key_value_heads": 1},
    "tied, wide window": {"tie_word_embeddings": True, "sliding_window": 512},
    "kernel sizes": {"head_dim": 32, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 8},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(tmp_path, "mixtral", **VARIANTS[name])
    errors = oracle_errors(DriverChoice(folder=str(folder)))
    assert max(errors.values()) < TOLERANCE, errors
