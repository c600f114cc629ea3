"""Projections from block-quantised parts: what stays float8 stands for the same matrix as the dequantised form."""

from __future__ import annotations

import functools

import pytest
import torch
from crossdock.checkpoint import RandomCheckpoint
from crossdock.ops.fp8_block import dequantise_blocks
from crossdock.types.model import TensorSpec
from crossdock_models._shared.linears import LinearPart, load_linear, stacked_blocks
from crossdock_models._shared.rope_rows import pair_heads
from crossdock_models._shared.shards import Shard
from crossdock_models._shared.weights import WeightReader

WIDTH = 256


def reader() -> WeightReader:
    tensors = {
        "a.weight": TensorSpec(shape=(256, WIDTH), fp8_block=True),
        "b.weight": TensorSpec(shape=(200, WIDTH), fp8_block=True),
        "plain.weight": TensorSpec(shape=(128, WIDTH)),
    }
    checkpoint = RandomCheckpoint(tensors, "F32", 3)
    return WeightReader(checkpoint=checkpoint, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "parts",
    [
        [LinearPart(prefix="a")],
        [LinearPart(prefix="a", rows=Shard(128, 256)), LinearPart(prefix="b")],
        [LinearPart(prefix="a", cols=Shard(128, 256))],
        [LinearPart(prefix="a", reorder=functools.partial(pair_heads, head_dim=64)), LinearPart(prefix="b")],
    ],
)
def test_stored_parts_stand_for_what_the_dequantised_product_multiplies_with(parts: list[LinearPart]) -> None:
    source = reader()
    found = stacked_blocks(source, parts)
    assert found is not None
    meant = dequantise_blocks(*found, torch.float32)
    rows = torch.eye(meant.shape[1])
    assert torch.allclose(load_linear(source, parts)(rows), meant.T, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "parts",
    [
        [LinearPart(prefix="plain")],
        [LinearPart(prefix="b"), LinearPart(prefix="a")],
        [LinearPart(prefix="a", rows=Shard(64, 256))],
        [LinearPart(prefix="a", cols=Shard(0, 100))],
        [LinearPart(prefix="a", reorder=functools.partial(pair_heads, head_dim=256))],
    ],
    ids=["not stored so", "ends inside a block", "begins inside one", "width is cut", "order crosses blocks"],
)
def test_parts_whose_blocks_do_not_stay_whole_are_dequantised(parts: list[LinearPart]) -> None:
    source = reader()
    assert stacked_blocks(source, parts) is None
    assert load_linear(source, parts)(torch.zeros(1, parts[0].cols.size if parts[0].cols else WIDTH)).shape[0] == 1
