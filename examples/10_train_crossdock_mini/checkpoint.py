"""Write the training model as a Hugging Face checkpoint of type `deepseek_v3`, one tensor an expert, in bfloat16.

The router's correction bias stays fp32 and is shifted so that its smallest value is 0: the choice of experts only
depends on differences, and with every score positive it does not matter whether an engine closes groups with 0 or -inf.
"""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import torch
from model import MiniModel, ModelShape, MoeMlp
from safetensors.torch import save_file
from torch import Tensor

_ATTENTION = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_MLP = ("gate_proj", "up_proj", "down_proj")


def config_fields(shape: ModelShape, special_ids: dict[str, int]) -> dict[str, object]:
    """Return the fields of `config.json`; `special_ids` holds `bos_token_id`, `eos_token_id` and `pad_token_id`."""
    fields: dict[str, object] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "rope_interleave": True,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "num_key_value_heads": shape.num_attention_heads,
        "use_cache": True,
    }
    return dict(sorted({**fields, **attrs.asdict(shape), **special_ids}.items()))


def hf_tensors(model: MiniModel) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint by their Hugging Face names, on the CPU."""
    tensors = {"model.embed_tokens.weight": model.embed_tokens.weight, "model.norm.weight": model.norm.weight}
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        for name in _NORMS:
            tensors[f"{prefix}{name}.weight"] = getattr(layer, name).weight
        for name in _ATTENTION:
            tensors[f"{prefix}self_attn.{name}.weight"] = getattr(layer.self_attn, name).weight
        if isinstance(layer.mlp, MoeMlp):
            tensors.update(_moe_tensors(layer.mlp, f"{prefix}mlp."))
        else:
            tensors.update({f"{prefix}mlp.{name}.weight": getattr(layer.mlp, name).weight for name in _MLP})
    wide = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return {name: tensor if name.endswith("bias") else tensor.to(torch.bfloat16) for name, tensor in wide.items()}


def _moe_tensors(mlp: MoeMlp, prefix: str) -> dict[str, Tensor]:
    width = mlp.shape.moe_intermediate_size
    tensors: dict[str, Tensor] = {
        f"{prefix}gate.weight": mlp.router,
        f"{prefix}gate.e_score_correction_bias": mlp.correction_bias - mlp.correction_bias.min(),
    }
    for expert in range(mlp.shape.n_routed_experts + 1):
        owner = "shared_experts" if expert == mlp.shape.n_routed_experts else f"experts.{expert}"
        last = None if owner == "shared_experts" else (expert + 1) * width
        columns = slice(expert * width, last)
        tensors[f"{prefix}{owner}.gate_proj.weight"] = mlp.gate_proj.weight[columns]
        tensors[f"{prefix}{owner}.up_proj.weight"] = mlp.up_proj.weight[columns]
        tensors[f"{prefix}{owner}.down_proj.weight"] = mlp.down_proj.weight[:, columns]
    return tensors


def save_checkpoint(model: MiniModel, folder: Path, special_ids: dict[str, int], shard_bytes: int) -> None:
    """Write `config.json` and the weights: `model.safetensors`, or numbered shards of at most about `shard_bytes`."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in hf_tensors(model).items():
        if used + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
    fields = config_fields(model.shape, special_ids)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
