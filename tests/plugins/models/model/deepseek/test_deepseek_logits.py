"""DeepSeek-V2 and V3 against transformers' classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from crossdock.config import CheckpointConfig, Config
from crossdock.errors import CheckpointError
from crossdock.rank_plan import plan_rank
from crossdock.testing.model_oracle import TOLERANCE, oracle_errors
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.tiny_models import save_tiny_model


def yarn(**extra: float) -> dict[str, Any]:
    fields = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    return {"rope_parameters": {**fields, **extra}}


KERNEL_SIZES = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "hidden_size": 64, "moe_intermediate_size": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("deepseek_v3", {}),
    "v3 without groups": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "v3 without q_lora, with biases": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "v3 rope in halves, biases": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    "v3 no dense layer, tied": ("deepseek_v3", {"first_k_dense_replace": 0, "tie_word_embeddings": True}),
    "v3 two dense layers, no scaling": ("deepseek_v3", {"first_k_dense_replace": 2, "routed_scaling_factor": 1.0}),
    "v3 all dense": ("deepseek_v3", {"first_k_dense_replace": 3}),
    "v3 no renormalisation": ("deepseek_v3", {"norm_topk_prob": False, "n_shared_experts": 2}),
    "v3 yarn, equal mscales": ("deepseek_v3", yarn(mscale=1.0, mscale_all_dim=1.0)),
    "v3 yarn, different mscales": ("deepseek_v3", yarn(mscale=0.7, mscale_all_dim=1.3)),
    "v3 kernel sizes": ("deepseek_v3", KERNEL_SIZES),
    "v2": ("deepseek_v2", {}),
    "v2 grouped, scaled": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
    ),
    "v2 lite, yarn": ("deepseek_v2", {"q_lora_rank": None, **yarn(mscale=0.707, mscale_all_dim=0.707)}),
    "v2 yarn without mscales": ("deepseek_v2", yarn()),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    family, overrides = VARIANTS[name]
    folder = save_tiny_model(tmp_path, family, **overrides)
    errors = oracle_errors(DriverChoice(folder=str(folder)))
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("kept", [0, 5])
def test_more_or_fewer_groups_than_there_are_cannot_be_kept(tmp_path: Path, kept: int) -> None:
    config_file = save_tiny_model(tmp_path, "deepseek_v3", n_group=4, topk_group=2) / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"topk_group": kept}))
    config = attrs.evolve(Config(), checkpoint=CheckpointConfig(path=str(tmp_path)))
    with pytest.raises(CheckpointError, match=rf"topk_group is {kept}; must be 1 to n_group = 4"):
        plan_rank(config, 0)
