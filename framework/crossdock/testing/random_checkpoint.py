"""A seeded random checkpoint for any config that an installed model plugin reads: no oracle, but everything that compares with itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from crossdock.checkpoint import RandomCheckpoint
from crossdock.groups import rank_place, resolve_sizes
from crossdock.model import model_info


def write_random_checkpoint(folder: Path, config: Mapping[str, Any], *, seed: int = 0) -> Path:
    """Writes ``config.json`` and one safetensors file with every tensor of ``ModelInfo.tensors``; float32, fp8 blocks where the config says so.

    Raises:
        CheckpointError: the config cannot be read.
    """
    sizes = resolve_sizes(ranks=1)
    info = model_info(config, sizes, rank_place(sizes, 0))
    checkpoint = RandomCheckpoint(info.tensors, "F32", seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {name: checkpoint.read(name).contiguous() for name in checkpoint.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return folder
