"""DeepSeek-V2 and V3 against transformers' classes."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from crossdock.config import CheckpointConfig, Config
from crossdock.errors import CheckpointError
from crossdock.rank_plan import plan_rank
from crossdock.testing.model_oracle import TOLERANCE, oracle_errors
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.model_variants import VARIANTS, variants_of
from crossdock.testing.tiny_models import save_tiny_model


@pytest.mark.parametrize("name", variants_of("deepseek_v2", "deepseek_v3"))
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(tmp_path, VARIANTS[name].family, **VARIANTS[name].fields)
    errors = oracle_errors(DriverChoice(folder=str(folder)))
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("kept", [0, 5])
def test_more_or_fewer_groups_than_there_are_cannot_be_kept(tmp_path: Path, kept: int) -> None:
    config_file = save_tiny_model(tmp_path, "deepseek_v3", n_group=4, topk_group=2) / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"topk_group": kept}))
    config = attrs.evolve(Config(), checkpoint=CheckpointConfig(path=str(tmp_path)))
    with pytest.raises(CheckpointError, match=rf"topk_group is {kept}; must be 1 to n_group = 4"):
        plan_rank(config, 0)
