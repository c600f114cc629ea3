"""A compact DeepSeek-V3-style language model for training: the same function as transformers' class, made for one GPU.

All experts of a layer, the shared one included, are three plain matrix products over `(experts + 1) * width` columns
with the routing weights (zero where a token does not visit an expert) multiplied in between. With 32 experts of width
32 that wastes arithmetic but no launch: on a large GPU it is faster than any grouped form.
Mathematics: DeepSeek-V3 technical report (arXiv 2412.19437), sections 2.1 (MLA, sigmoid routing) and 2.1.2 (balancing by
a bias that only the choice of experts sees).
"""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@attrs.frozen(kw_only=True)
class ModelShape:
    """The fields of `config.json` that shape the model; names are those of the Hugging Face checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    first_k_dense_replace: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float


class Attention(nn.Module):
    """Multi-head latent attention, causal, over whole rows."""

    def __init__(self, shape: ModelShape) -> None:
        """Create the projections of the low-rank query and key-value paths."""
        super().__init__()
        self.shape = shape
        heads = shape.num_attention_heads
        qk_width = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        self.q_a_proj = nn.Linear(shape.hidden_size, shape.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(shape.q_lora_rank, eps=shape.rms_norm_eps)
        self.q_b_proj = nn.Linear(shape.q_lora_rank, heads * qk_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden_size, shape.kv_lora_rank + shape.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(shape.kv_lora_rank, eps=shape.rms_norm_eps)
        self.kv_b_proj = nn.Linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * shape.v_head_dim, shape.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within each row.

        Args:
            hidden_states: [rows, tokens, hidden_size].
            cos, sin: [tokens, qk_rope_head_dim / 2] fp32.

        Returns:
            [rows, tokens, hidden_size].
        """
        shape = self.shape
        rows, tokens, _ = hidden_states.shape
        heads, nope, rope = shape.num_attention_heads, shape.qk_nope_head_dim, shape.qk_rope_head_dim
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(rows, tokens, heads, nope + rope).transpose(1, 2)
        q_nope, q_rope = query.split([nope, rope], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split([shape.kv_lora_rank, rope], dim=-1)
        key_value = self.kv_b_proj(self.kv_a_layernorm(latent)).view(rows, tokens, heads, nope + shape.v_head_dim)
        k_nope, value = key_value.transpose(1, 2).split([nope, shape.v_head_dim], dim=-1)
        k_rope = rotated(k_rope.view(rows, 1, tokens, rope), cos, sin).expand(-1, heads, -1, -1)
        query = torch.cat([q_nope, rotated(q_rope, cos, sin)], dim=-1)
        key = torch.cat([k_nope, k_rope], dim=-1)
        # Flash kernels want one head width; the padded columns of the result are zero and cut off.
        value = F.pad(value, (0, nope + rope - shape.v_head_dim))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)[..., : shape.v_head_dim]
        result: Tensor = self.o_proj(attended.transpose(1, 2).reshape(rows, tokens, heads * shape.v_head_dim))
        return result


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of the last dim by the angle of their position; the result holds all first halves, then
    all second halves, which scores do not notice because queries and keys agree."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1).to(x.dtype)


class DenseMlp(nn.Module):
    """The SwiGLU block of the first layers."""

    def __init__(self, shape: ModelShape) -> None:
        """Create the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the block's result, same shape as the input."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        return result


class MoeMlp(nn.Module):
    """Router, routed experts and one shared expert; expert e owns the columns e*I to (e+1)*I, the shared one the last I."""

    def __init__(self, shape: ModelShape) -> None:
        """Create the router (fp32) and the stacked projections."""
        super().__init__()
        self.shape = shape
        columns = (shape.n_routed_experts + shape.n_shared_experts) * shape.moe_intermediate_size
        self.router = nn.Parameter(torch.empty(shape.n_routed_experts, shape.hidden_size))
        self.correction_bias: Tensor
        self.register_buffer("correction_bias", torch.zeros(shape.n_routed_experts))
        self.gate_proj = nn.Linear(shape.hidden_size, columns, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, columns, bias=False)
        self.down_proj = nn.Linear(columns, shape.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block's result and the tokens of each expert.

        Args:
            hidden_states: [rows, tokens, hidden_size].

        Returns:
            ([rows, tokens, hidden_size], [n_routed_experts] fp32 counts).
        """
        shape = self.shape
        topk_ids, topk_weights = self.route(hidden_states.reshape(-1, shape.hidden_size))
        weights = torch.zeros(topk_ids.shape[0], shape.n_routed_experts, device=topk_ids.device)
        weights = weights.scatter(1, topk_ids, topk_weights)
        counts = (weights.detach() > 0).sum(dim=0).float()
        weights = F.pad(weights, (0, shape.n_shared_experts), value=1.0)
        inner = F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        by_expert = inner.view(-1, weights.shape[1], shape.moe_intermediate_size)
        weighted = by_expert * weights.to(inner.dtype).unsqueeze(-1)
        return self.down_proj(weighted.view(inner.shape)), counts

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (ids [n, K] int64, weights [n, K] fp32 with the scaling factor): sigmoid, groups, top-k, renormalised."""
        shape = self.shape
        with torch.autocast(hidden_states.device.type, enabled=False):
            scores = F.linear(hidden_states.float(), self.router.float()).sigmoid()
        with torch.no_grad():
            choice = scores + self.correction_bias
            grouped = choice.view(-1, shape.n_group, shape.n_routed_experts // shape.n_group)
            best_groups = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(shape.topk_group, dim=-1).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best_groups, False)
            choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).view_as(choice)
            topk_ids = choice.topk(shape.num_experts_per_tok, dim=-1).indices
        topk_weights = scores.gather(1, topk_ids)
        topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
        return topk_ids, topk_weights * shape.routed_scaling_factor

    @torch.no_grad()
    def update_bias(self, counts: Tensor, rate: float) -> None:
        """Raise the bias of experts below the mean load of the step, lower the others; `counts`: [n_routed_experts]."""
        self.correction_bias += rate * torch.sign(counts.mean() - counts)


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        """Create layer `index`; the first `first_k_dense_replace` ones are dense."""
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = DenseMlp(shape) if index < shape.first_k_dense_replace else MoeMlp(shape)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states after the layer and the expert counts (None of a dense layer)."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), cos, sin)
        normed = self.post_attention_layernorm(hidden_states)
        if isinstance(self.mlp, MoeMlp):
            mixed, counts = self.mlp(normed)
            return hidden_states + mixed, counts
        return hidden_states + self.mlp(normed), None


class MiniModel(nn.Module):
    """The language model with tied embeddings."""

    def __init__(self, shape: ModelShape) -> None:
        """Create and initialise: normal 0.02, outputs into the residual stream smaller by the square root of their number."""
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        half = torch.arange(0, shape.qk_rope_head_dim, 2, dtype=torch.float32) / shape.qk_rope_head_dim
        angles = torch.outer(torch.arange(shape.max_position_embeddings, dtype=torch.float32), shape.rope_theta**-half)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * shape.num_hidden_layers) ** 0.5 if into_residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits and expert counts.

        Args:
            ids: [rows, tokens] int64.

        Returns:
            ([rows, tokens, vocab_size], one [n_routed_experts] fp32 a MoE layer).
        """
        tokens = ids.shape[1]
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        hidden_states = self.embed_tokens(ids)
        counts = []
        for layer in self.layers:
            hidden_states, layer_counts = layer(hidden_states, cos, sin)
            if layer_counts is not None:
                counts.append(layer_counts)
        return F.linear(self.norm(hidden_states), self.embed_tokens.weight), counts

    def moe_mlps(self) -> list[MoeMlp]:
        """Return the MoE blocks in layer order."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeMlp)]
