"""Which tensors a config calls quantised."""

from __future__ import annotations

from typing import Any

import pytest
from crossdock.errors import CheckpointError
from crossdock_models._shared.quantisation import Quantisation, read_quantisation

FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def covers(name: str, *excluded: str) -> bool:
    return read_quantisation({"quantization_config": {**FP8, "modules_to_not_convert": list(excluded)}}).covers(name)


def test_linear_layers_are_covered_and_router_embedding_and_head_are_not() -> None:
    assert covers("model.layers.0.self_attn.kv_b_proj.weight")
    assert covers("model.layers.3.mlp.experts.7.gate_proj.weight")
    assert not covers("model.layers.3.mlp.gate.weight")
    assert not covers("model.embed_tokens.weight")
    assert not covers("lm_head.weight")


def test_exclusions_match_whole_components() -> None:
    assert not covers("model.layers.1.mlp.up_proj.weight", "model.layers.1")
    assert covers("model.layers.11.mlp.up_proj.weight", "model.layers.1")
    assert not covers("model.layers.4.self_attn.o_proj.weight", "self_attn")
    assert covers("model.layers.4.mlp.shared_experts.up_proj.weight", "experts")


def test_no_quantisation_covers_nothing() -> None:
    assert read_quantisation({}) == Quantisation()
    assert not Quantisation().covers("model.layers.0.self_attn.o_proj.weight")


@pytest.mark.parametrize(
    "fields", [{"quant_method": "awq"}, {"quant_method": "fp8"}, {**FP8, "weight_block_size": [64, 64]}]
)
def test_other_methods_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="cannot be read; only 'fp8' with blocks"):
        read_quantisation({"quantization_config": fields})
