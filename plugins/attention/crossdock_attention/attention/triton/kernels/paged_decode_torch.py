"""Readable truth of ``paged_decode``: gathers each sequence's rows and takes a softmax in float32."""

from __future__ import annotations

import torch


def paged_decode_torch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See ``crossdock_attention.attention.triton.kernels.paged_decode.paged_decode``."""
    num_rows, num_heads, _ = q.shape
    group = num_heads // k_pool.shape[2]
    out = torch.zeros(num_rows, num_heads, v_pool.shape[3], dtype=torch.float32, device=q.device)
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        pages = page_table[row, : -(-length // k_pool.shape[1])].long()
        keys = k_pool[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
        values = v_pool[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,lhd->hl", q[row].float(), keys) * scale
        out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
    return out.to(q.dtype)
