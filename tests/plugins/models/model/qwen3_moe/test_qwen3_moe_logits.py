"""Qwen3-MoE against transformers' class."""

from __future__ import annotations

from pathlib import Path

import pytest
from crossdock.testing.model_oracle import TOLERANCE, oracle_errors
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.model_variants import VARIANTS, variants_of
from crossdock.testing.tiny_models import save_tiny_model


@pytest.mark.parametrize("name", variants_of("qwen3_moe"))
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(tmp_path, VARIANTS[name].family, **VARIANTS[name].fields)
    errors = oracle_errors(DriverChoice(folder=str(folder)))
    assert max(errors.values()) < TOLERANCE, errors
