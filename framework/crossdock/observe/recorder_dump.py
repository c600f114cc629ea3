"""Recordings as files: the form that SGLang writes and loads (the facts, section 8.6), and ours (``load`` in an ``.npz``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from crossdock.ops.host_lists import int_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crossdock.observe.pass_records import PassRecord
    from crossdock.types.location import PlacementMaps

_PREFIX = "expert_distribution_recorder"
_TOKEN_CHOICES = 8
"""Columns of ``topk_ids_of_layer`` in SGLang's files, whatever the model's top-k; -1 fills them."""


def write_stat(
    folder: Path, stamp: str, logical_counts: torch.Tensor, layers: Sequence[int], balancedness: float | None
) -> tuple[Path, Path]:
    """Writes ``{prefix}_{stamp}.pt`` as SGLang does and ``{prefix}_{stamp}.npz``; called by one rank only.

    Args:
        folder: made when it does not exist.
        stamp: part of the file names, usually the time.
        logical_counts: [passes, L, E] summed over ranks, L MoE layers.
        layers: the model's layer numbers of the L rows, ascending. SGLang counts dense layers too: its file has zero rows for them.
        balancedness: mean over the window, or None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts = logical_counts.cpu()
    every_layer = counts.new_zeros((counts.shape[0], max(layers) + 1, counts.shape[2]))
    every_layer[:, list(layers)] = counts
    sglang_file = folder / f"{_PREFIX}_{stamp}.pt"
    torch.save(
        {
            "rank": 0,
            "logical_count": every_layer.to(torch.int32),
            "average_utilization_rate_over_window": balancedness,
        },
        sglang_file,
    )
    own_file = folder / f"{_PREFIX}_{stamp}.npz"
    np.savez_compressed(own_file, load=counts.numpy(), layer_ids=np.asarray(layers, dtype=np.int64))
    return sglang_file, own_file


def write_records(folder: Path, stamp: str, rank: int, records: Sequence[PassRecord], maps: PlacementMaps) -> Path:
    """Writes ``{prefix}_{stamp}_{rank}.pt`` with the passes of one rank; called by every rank, in the fine-grained modes.

    A pass under another map than the last one carries it as ``physical_to_logical_map``, which SGLang's files lack.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_PREFIX}_{stamp}_{rank}.pt"
    last = maps.physical_to_logical.cpu()
    # One tensor for all passes of a map: a file holds it once.
    known = {id(of_then): of_then.cpu() for record in records if (of_then := record.physical_to_logical) is not None}
    maps_of_then = {key: of_then for key, of_then in known.items() if not torch.equal(of_then, last)}
    rows: list[dict[str, Any]] = []
    for record in records:
        of_then = maps_of_then.get(id(record.physical_to_logical))
        rows.append(_record(record, rank) | ({} if of_then is None else {"physical_to_logical_map": of_then}))
    content = {"records": rows, "last_physical_to_logical_map": last}
    torch.save(content, path)
    return path


def _record(record: PassRecord, rank: int) -> dict[str, Any]:
    common: dict[str, Any] = {
        "forward_pass_id": record.pass_id,
        "rank": rank,
        "gatherer_key": "primary",
        "global_physical_count": record.physical_count.cpu().to(torch.int32),
    }
    if not record.topk_ids or record.input_ids is None or record.positions is None:
        return common
    return common | {
        "input_ids": int_list(record.input_ids),
        "positions": int_list(record.positions),
        "extend_seq_lens": list(record.query_lens),
        "forward_mode": record.forward_mode,
        "topk_ids_of_layer": torch.stack([_padded_choices(ids) for ids in record.topk_ids]),
        "misc_objects": [],
    }


def _padded_choices(ids: torch.Tensor) -> torch.Tensor:
    """[n, K] -> [n, 8] int32 on the CPU, filled with -1."""
    padded = torch.full((ids.shape[0], max(_TOKEN_CHOICES, ids.shape[1])), -1, dtype=torch.int32)
    padded[:, : ids.shape[1]] = ids.to("cpu", torch.int32)
    return padded
