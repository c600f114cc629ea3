"""An fp8 checkpoint on a GPU, in fp8 all the way, against the dequantised one in float32 on the CPU (which transformers checks)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crossdock.config import CheckpointConfig, Config, LaunchConfig, PluginChoice
from crossdock.offline import logits
from crossdock.testing.random_checkpoint import write_random_checkpoint
from safetensors import safe_open

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
"""Every expert is chosen: near ties of the router, which rounding decides, are another matter."""
LENGTHS = (1, 7, 150)
BF16_TOLERANCE, FP8_TOLERANCE = 0.03, 0.1
"""Norm of the error: activations of 8 bits; activations of 3 bits in every product of three layers, which leave 0.07 where they are played on a CPU."""
CASES = [
    pytest.param("torch", FP8_TOLERANCE, id="torch"),
    pytest.param("triton", FP8_TOLERANCE, id="triton"),
    pytest.param(
        "deep_gemm",
        FP8_TOLERANCE,
        id="deep_gemm",
        marks=pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="deep_gemm is not installed"),
    ),
]


ODD = {"hidden_size": 192, "moe_intermediate_size": 160, "intermediate_size": 320}
"""No size is a multiple of 128: scales of the last block cover a part of it."""
EXPERTS_ONLY = ["self_attn", "shared_experts", "model.layers.0.mlp"]
MIXES: dict[str, tuple[dict[str, int], list[str]]] = {
    "experts only": ({}, EXPERTS_ONLY),
    "shared experts plain": ({}, ["shared_experts"]),
    "odd sizes": (ODD, []),
    "odd sizes, experts only": (ODD, EXPERTS_ONLY),
}
"""Sizes that differ, and what is stored as it is."""


def mixed_config(mix: str) -> dict[str, Any]:
    sizes, plain = MIXES[mix]
    return {
        **CONFIG,
        **sizes,
        "quantization_config": {**CONFIG["quantization_config"], "modules_to_not_convert": plain},
    }


def config_of(folder: Path, device: str, dtype: str, experts: str) -> Config:
    return Config(
        checkpoint=CheckpointConfig(path=str(folder), dtype=dtype),
        launch=LaunchConfig(device=device),
        experts=PluginChoice(name=experts),
    )


def error_of(found: list[np.ndarray[Any, Any]], wanted: list[np.ndarray[Any, Any]]) -> float:
    """The worst prompt's norm of the difference, relative to the norm of what is wanted."""
    return max(
        float(np.linalg.norm(got - want) / np.linalg.norm(want)) for got, want in zip(found, wanted, strict=True)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("experts", "tolerance"), CASES)
def test_logits_of_an_fp8_checkpoint_stay_close_to_float32(experts: str, tolerance: float, tmp_path: Path) -> None:
    assert_close(CONFIG, experts, tolerance, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("experts", ["auto", "triton"])
@pytest.mark.parametrize("mix", MIXES)
def test_logits_of_a_checkpoint_that_is_fp8_in_part_stay_close_to_float32(
    mix: str, experts: str, tmp_path: Path
) -> None:
    assert_close(mixed_config(mix), experts, FP8_TOLERANCE, tmp_path)


def assert_close(config: dict[str, Any], experts: str, tolerance: float, folder: Path) -> None:
    write_random_checkpoint(folder, config, seed=4)
    generator = np.random.default_rng(1)
    ids = [generator.integers(0, CONFIG["vocab_size"], length).tolist() for length in LENGTHS]
    wanted = logits(folder, ids, config_of(folder, "cpu", "float32", "torch"))
    found = logits(folder, ids, config_of(folder, "cuda", "bfloat16", experts))
    error = error_of(found, wanted)
    print(f"{experts}: relative error {error:.4f}")
    assert error <= tolerance


@pytest.mark.parametrize("mix", MIXES)
def test_only_what_is_not_left_out_is_stored_in_8_bits(mix: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, mixed_config(mix), seed=4)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
    narrow = {name for name, dtype in stored.items() if dtype == "F8_E4M3"}
    assert any(".mlp.experts." in name for name in narrow)
    assert not [name for name in narrow for part in MIXES[mix][1] if part in name]
    assert any("self_attn" in name for name in narrow) == ("self_attn" not in MIXES[mix][1])


@pytest.mark.parametrize("config", [CONFIG, *map(mixed_config, MIXES)], ids=["whole", *MIXES])
def test_the_small_model_is_read_on_a_cpu(config: dict[str, Any], tmp_path: Path) -> None:
    """bfloat16 against float32, so that the GPU test compares what runs."""
    write_random_checkpoint(tmp_path, config, seed=4)
    wanted = logits(tmp_path, [[1, 2, 3]], config_of(tmp_path, "cpu", "float32", "torch"))
    found = logits(tmp_path, [[1, 2, 3]], config_of(tmp_path, "cpu", "bfloat16", "torch"))
    assert error_of(found, wanted) <= BF16_TOLERANCE
