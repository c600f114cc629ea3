"""A checkpoint's block-fp8 copy, and its twin with the same rounded values in float32: the twin is what an oracle can load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from crossdock.ops.fp8_block import dequantise_blocks, quantise_blocks

SINGLE_FILE = "model.safetensors"


def write_fp8_copies(
    source: Path, fp8: Path, twin: Path, is_quantised: Callable[[str], bool], excluded: tuple[str, ...] = ()
) -> None:
    """Writes two copies of a float32 checkpoint of one file.

    Args:
        source: folder as ``save_tiny_model`` writes it.
        fp8: gets float8_e4m3fn and ``_scale_inv`` for the tensors that ``is_quantised`` names, and a ``quantization_config``.
        twin: gets the same values, dequantised.
        is_quantised: decides by tensor name; asked for matrices only.
        excluded: written as ``modules_to_not_convert``.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    stored: dict[str, torch.Tensor] = {}
    rounded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / SINGLE_FILE).items():
        stored[name] = rounded[name] = tensor
        if tensor.dim() == 2 and is_quantised(name):
            stored[name], scale = quantise_blocks(tensor)
            stored[f"{name}_scale_inv"] = scale
            rounded[name] = dequantise_blocks(stored[name], scale, torch.float32)
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": list(excluded)}
    for folder, tensors, fields in (
        (fp8, stored, {**config, "quantization_config": quantisation}),
        (twin, rounded, config),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
