"""Tiny random checkpoints of every supported family, made with transformers: oracle and input of the models' tests.

transformers is imported inside the functions; it is a development dependency only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FAMILIES = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "mixtral")
FRAME: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""Fields of all families. No token ends a sequence, so random models never stop early."""
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
"""Fields of both DeepSeek families."""
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "deepseek_v2": {**LATENT, "topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False},
    "deepseek_v3": {
        **LATENT,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
    "mixtral": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}


def tiny_config(family: str, **overrides: Any) -> Any:
    """A transformers config of a family; ``overrides`` replace fields."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**FRAME, **FAMILY_FIELDS[family], **overrides})


def save_tiny_model(folder: Path, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes config and safetensors of a seeded random model to ``folder`` and returns it. fp32; equal arguments give equal files."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **overrides)
    make: Any = AutoModelForCausalLM
    model = make.from_config(config, dtype=torch.float32)
    spread_weights(model, seed)
    model.save_pretrained(folder)
    return folder


def spread_weights(model: torch.nn.Module, seed: int) -> None:
    """Seeded weights that leave nothing neutral: unit-gain matrices, norm weights off 1, biases off 0, routers with clear winners."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "inv_freq" not in n)]
    with torch.no_grad():
        for name, tensor in tensors:
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                noise = 1.0 + 0.2 * noise
            elif name.endswith("bias"):
                noise *= 0.1
            elif "embed_tokens" not in name:
                noise *= tensor.shape[-1] ** -0.5
                if name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")):
                    noise *= 3.0
            tensor.copy_(noise)


def oracle_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab] float32: one full pass of transformers' own class, eager attention and experts."""
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM
    model = make.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits.float()
