"""Fused kernels of the GPU path against the torch ops they stand for: interpreted where there is no GPU (fp32), compiled where there is one."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from crossdock.ops.add_rms_norm import add_rms_norm, add_rms_norm_fused
from crossdock.ops.early_launch import early_launch
from crossdock.ops.few_rows_linear import LinearTile, few_rows_linear
from crossdock.ops.float_linear import FloatLinear
from crossdock.ops.latent_rotate import latent_rotate, latent_rotate_fused
from crossdock.ops.norm_rotate import norm_rotate, norm_rotate_fused
from crossdock.ops.packed_linear import PackedLinear
from crossdock.ops.rms_norm_torch import rms_norm_torch
from crossdock.ops.rope_torch import rotate_pairs_torch, rotation_table
from crossdock.ops.swiglu import swiglu_fused
from crossdock.ops.swiglu_torch import swiglu_torch
from crossdock.ops.topk_routing import TopkRule, topk_routing
from crossdock.ops.topk_routing_fused import can_fuse, topk_routing_fused
from crossdock.ops.topk_routing_torch import topk_routing_torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 2e-2 if ON_GPU else 1e-5
"""bf16: a rounding of the norm and one of the gain; fp32: another order of summation."""


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("hidden_size", [1, 48, 64, 65])
def test_add_and_norm_in_one_pass_equal_the_two_ops(rows: int, hidden_size: int) -> None:
    generator = torch.Generator().manual_seed(rows + hidden_size)
    residual, update = (torch.randn(rows, hidden_size, generator=generator).to(DEVICE, DTYPE) for _ in range(2))
    weight = torch.randn(hidden_size, generator=generator).to(DEVICE, DTYPE)
    total, normed = add_rms_norm_fused(residual, update, weight, 1e-6)
    assert torch.equal(total, residual + update)
    torch.testing.assert_close(normed, rms_norm_torch(total, weight, 1e-6), rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(add_rms_norm(residual, update, weight, 1e-6)[0], total)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_and_rotation_of_strided_heads_equal_the_ops(rows: int, has_norm: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    heads, dim = 3, 24
    packed = torch.randn(rows, heads + 2, dim, generator=generator).to(DEVICE, DTYPE)
    weight = torch.randn(heads, dim, generator=generator).to(DEVICE, DTYPE) if has_norm else None
    table = rotation_table(torch.rand(dim // 2, generator=generator), 32, 1.1).to(DEVICE)
    rotation = table[torch.arange(rows, device=DEVICE) * 3].unsqueeze(1)
    got = norm_rotate_fused(packed[:, :heads], weight, 1e-6, rotation)
    want = packed[:, :heads]
    if weight is not None:
        want = rms_norm_torch(want, None, 1e-6) * weight
    torch.testing.assert_close(got, rotate_pairs_torch(want, rotation), rtol=TOLERANCE, atol=TOLERANCE)


def test_rotation_that_does_not_fit_is_refused() -> None:
    rotation = torch.zeros(2, 1, 4, dtype=torch.complex64, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit"):
        norm_rotate(torch.zeros(2, 3, 10, device=DEVICE, dtype=DTYPE), None, 1e-6, rotation)


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("num_experts", [6, 32, 40])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_in_one_launch_equals_the_ops(rows: int, num_experts: int, scoring: str, renormalise: bool) -> None:
    generator = torch.Generator().manual_seed(rows + num_experts)
    rule = TopkRule(top_k=3, scoring=scoring, renormalise=renormalise, routed_scaling=2.5)
    logits = torch.randn(rows, num_experts, generator=generator).to(DEVICE)
    for bias in (None, torch.randn(num_experts, generator=generator).to(DEVICE)):
        ids, weights = topk_routing_fused(logits, bias, rule)
        want_ids, want_weights = topk_routing_torch(logits, bias, rule)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [-8.0, -1e4])
def test_negative_logits_choose_as_a_softmax_does(value: float) -> None:
    """A running maximum that starts at 0 would lose them."""
    logits = torch.full((2, 8), value, device=DEVICE)
    logits[1] = torch.linspace(-8, -1, 8, device=DEVICE)
    ids, weights = topk_routing_fused(logits, None, TopkRule(top_k=2))
    assert ids.tolist() == [[0, 1], [7, 6]]
    torch.testing.assert_close(weights[1], logits[1].softmax(-1)[[7, 6]], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("group_score", ["max", "sum_of_two_best"])
@pytest.mark.parametrize("kept_groups", [1, 2, 3])
def test_groups_are_left_out_as_by_the_ops(group_score: str, kept_groups: int) -> None:
    """A bias below every score: what is left out must be lower than any of them."""
    generator = torch.Generator().manual_seed(kept_groups)
    rule = TopkRule(
        top_k=4, scoring="sigmoid", renormalise=True, num_groups=4, kept_groups=kept_groups, group_score=group_score
    )
    logits = torch.randn(9, 32, generator=generator).to(DEVICE)
    for bias in (None, (torch.randn(32, generator=generator) - 5).to(DEVICE)):
        ids, weights = topk_routing_fused(logits, bias, rule)
        want_ids, want_weights = topk_routing_torch(logits, bias, rule)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)


def test_slots_take_the_place_of_experts_and_padded_rows_go_nowhere() -> None:
    generator = torch.Generator().manual_seed(3)
    rule = TopkRule(top_k=3)
    logits = torch.randn(6, 12, generator=generator).to(DEVICE)
    slots = torch.randperm(12, generator=generator).to(DEVICE)
    padded = torch.tensor([False, True, False, False, True, True], device=DEVICE).unsqueeze(1)
    ids, weights = topk_routing_fused(logits, None, rule, slots, padded)
    plain_ids, plain_weights = topk_routing_torch(logits, None, rule)
    assert torch.equal(ids, torch.where(padded, -1, slots[plain_ids]))
    torch.testing.assert_close(weights, plain_weights, rtol=1e-5, atol=1e-6)
    chosen, _ = topk_routing(logits.cpu(), None, rule, slots.cpu(), padded.cpu())
    assert torch.equal(chosen, ids.cpu())


def test_rules_that_leave_out_groups_are_fused_for_powers_of_two() -> None:
    logits = torch.zeros(1, 8, device=DEVICE)
    assert can_fuse(logits, TopkRule(top_k=2)) == ON_GPU
    assert can_fuse(logits, TopkRule(top_k=2, num_groups=4, kept_groups=2)) == ON_GPU
    assert not can_fuse(torch.zeros(1, 12, device=DEVICE), TopkRule(top_k=2, num_groups=4, kept_groups=2))


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("inner_size", [1, 24, 1025])
def test_gated_activation_in_one_pass_equals_the_ops(rows: int, inner_size: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    gate_up = torch.randn(rows, 2 * inner_size, generator=generator).to(DEVICE, DTYPE)
    torch.testing.assert_close(swiglu_fused(gate_up), swiglu_torch(gate_up), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("heads", [1, 3, 20])
def test_a_latent_layers_rows_are_turned_and_normed_where_they_lie(rows: int, heads: int) -> None:
    """Slices of one product, whose neighbours must stay as they are."""
    generator = torch.Generator().manual_seed(rows)
    nope, rope, rank = 5, 12, 24
    width = heads * (nope + rope)
    packed = torch.randn(rows, width + rank + rope + 3, generator=generator).to(DEVICE, DTYPE)
    before = packed.clone()
    weight = torch.randn(rank, generator=generator).to(DEVICE, DTYPE)
    table = rotation_table(torch.rand(rope // 2, generator=generator), 32, 1.1).to(DEVICE)
    rotation = table[torch.arange(rows, device=DEVICE) * 3].unsqueeze(1)
    queries = packed[:, :width].unflatten(1, (heads, -1))
    latent = packed[:, width : width + rank + rope]
    latent_rotate_fused(queries, latent, weight, 1e-6, rotation)
    old = before[:, :width].unflatten(1, (heads, -1))
    old_latent = before[:, width : width + rank + rope]
    assert torch.equal(queries[..., :nope], old[..., :nope])
    assert torch.equal(packed[:, width + rank + rope :], before[:, width + rank + rope :])
    close = {"rtol": TOLERANCE, "atol": TOLERANCE}
    torch.testing.assert_close(queries[..., nope:], rotate_pairs_torch(old[..., nope:].clone(), rotation), **close)
    torch.testing.assert_close(latent[:, :rank], rms_norm_torch(old_latent[:, :rank], weight, 1e-6), **close)
    turned = rotate_pairs_torch(old_latent[:, None, rank:].clone(), rotation)[:, 0]
    torch.testing.assert_close(latent[:, rank:], turned, **close)


def test_latent_rows_that_do_not_fit_are_refused() -> None:
    rotation = torch.zeros(2, 1, 4, dtype=torch.complex64, device=DEVICE)
    queries, latent = torch.zeros(2, 3, 10, device=DEVICE), torch.zeros(2, 20, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit"):
        latent_rotate(queries, latent, torch.ones(11, device=DEVICE), 1e-6, rotation)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 7), (37, 100), (64, 32)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_few_rows_times_a_matrix_equal_the_product(rows: int, shape: tuple[int, int], has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(shape, generator=generator).to(DEVICE, DTYPE)
    bias = torch.randn(shape[0], generator=generator).to(DEVICE, DTYPE) if has_bias else None
    x = torch.randn(rows, shape[1] + 5, generator=generator).to(DEVICE, DTYPE)[:, : shape[1]]
    tile = LinearTile(columns=8, inner=32, warps=4)
    got = few_rows_linear(x, weight, bias, torch.float32, tile)
    want = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_only_devices_that_can_launch_early_do() -> None:
    assert early_launch(torch.zeros(1)) == {"is_early": False}
    if ON_GPU:
        options = early_launch(torch.zeros(1, device=DEVICE))
        assert options["is_early"] == (torch.cuda.get_device_capability()[0] >= 9)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [37, 2048, 2049])
def test_one_row_streams_a_matrix_to_the_product_of_torch(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(columns, 1030, generator=generator).to(DEVICE, torch.bfloat16)
    row = torch.randn(1, 1030, generator=generator).to(DEVICE, torch.bfloat16)
    want = row.double() @ weight.double().T
    for got in (PackedLinear(weight)(row), PackedLinear(weight).in_float32(row)):
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE, atol=TOLERANCE * 32)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("exact", [True, False])
def test_a_split_float32_weight_gives_nearly_float32_logits(exact: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 2048, generator=generator).to(DEVICE) / 45
    if exact:
        weight = weight.to(torch.bfloat16).float()
    x = torch.randn(rows, 2048, generator=generator).to(DEVICE, torch.bfloat16)
    want = x.double() @ weight.double().T
    error = (FloatLinear(weight, torch.bfloat16)(x).double() - want).abs().max()
    assert float(error) < 2e-5 * float(want.abs().max())
