"""Rotary embedding against transformers' tables and a rotation written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from crossdock.ops.rope import RopeTable, halves_to_pairs, rotate_pairs
from crossdock.ops.rope_spec import RopeSpec, mscale, read_rope
from crossdock.ops.rope_torch import inverse_frequencies
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CPU = torch.device("cpu")
DIM = 16
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
}
MSCALES: tuple[dict[str, Any], ...] = (
    {},
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.7, "mscale_all_dim": 1.3},
    {"mscale": 0.7},
    {"mscale_all_dim": 0.7},
    {"attention_factor": 1.4, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"beta_fast": 20.0, "beta_slow": 2.0},
    {"truncate": False},
)


def transformers_rope(parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
    config = DeepseekV3Config(qk_rope_head_dim=DIM, max_position_embeddings=1024, rope_parameters=dict(parameters))
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    return frequencies, factor


@pytest.mark.parametrize("extra", MSCALES)
def test_yarn_table_equals_transformers(extra: dict[str, Any]) -> None:
    parameters = {**YARN, **extra}
    spec = read_rope({"rope_parameters": parameters, "max_position_embeddings": 1024}, DIM)
    frequencies, factor = transformers_rope(parameters)
    torch.testing.assert_close(inverse_frequencies(spec), frequencies)
    assert spec.table_factor == pytest.approx(factor)


def test_linear_table_equals_transformers() -> None:
    parameters = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    frequencies, factor = transformers_rope(parameters)
    spec = read_rope({"rope_parameters": parameters}, DIM)
    torch.testing.assert_close(inverse_frequencies(spec), frequencies)
    assert spec.table_factor == factor == 1.0


def test_table_factor_is_the_ratio_when_both_mscales_are_given_and_the_explicit_one_wins() -> None:
    plain = {"dim": DIM, "kind": "yarn", "factor": 16.0, "original_max_positions": 64}
    assert RopeSpec(**plain, mscale=1.0, mscale_all_dim=1.0).table_factor == 1.0
    assert RopeSpec(**plain).table_factor == pytest.approx(0.1 * math.log(16) + 1)
    assert RopeSpec(**plain, mscale=2.0).table_factor == pytest.approx(0.1 * math.log(16) + 1)
    assert RopeSpec(**plain, attention_factor=1.7, mscale=1.0, mscale_all_dim=1.0).table_factor == 1.7


def test_softmax_factor_is_the_square_of_the_all_dim_mscale_and_not_the_table_factor() -> None:
    spec = RopeSpec(dim=DIM, kind="yarn", factor=40.0, original_max_positions=64, mscale=1.0, mscale_all_dim=1.0)
    assert spec.softmax_factor == pytest.approx(mscale(40.0) ** 2)
    assert RopeSpec(dim=DIM, mscale_all_dim=1.0).softmax_factor == 1.0


def test_old_and_new_spelling_give_the_same_rope() -> None:
    scaling = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}
    old = {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", **scaling}, "max_position_embeddings": 1024}
    new = {"rope_parameters": YARN, "max_position_embeddings": 1024}
    assert read_rope(old, DIM) == read_rope(new, DIM)


@pytest.mark.parametrize("fields", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "linear"}])
def test_an_unknown_kind_and_a_missing_factor_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rope type"):
        read_rope({"rope_parameters": fields}, DIM)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_of_reordered_halves_equals_the_rotation_of_halves(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, DIM, generator=generator).to(dtype)
    positions = torch.arange(rows) * 7
    angles = positions[:, None, None] * inverse_frequencies(RopeSpec(dim=DIM))
    first, second = x.float().chunk(2, dim=-1)
    wanted = torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )
    order = halves_to_pairs(DIM)
    rotation = RopeTable(RopeSpec(dim=DIM), CPU).rows(positions, int(positions.max()) if rows else 0)
    found = rotate_pairs(x[..., order], rotation)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # one rounding to bf16 of values up to 4
    torch.testing.assert_close(found.float(), wanted[..., order], atol=tolerance, rtol=tolerance)


def test_the_table_grows_and_old_rows_stay() -> None:
    table = RopeTable(RopeSpec(dim=DIM), CPU)
    before = table.rows(torch.tensor([5]), 5)
    far = table.rows(torch.tensor([RopeTable.CHUNK + 3]), RopeTable.CHUNK + 3)
    torch.testing.assert_close(table.rows(torch.tensor([5]), 5), before)
    angle = float((RopeTable.CHUNK + 3) * inverse_frequencies(RopeSpec(dim=DIM))[-1])
    assert complex(far[0, 0, -1]).real == pytest.approx(math.cos(angle), abs=1e-4)


def test_rows_and_rotation_of_different_sizes_are_refused() -> None:
    rotation = RopeTable(RopeSpec(dim=DIM), CPU).rows(torch.arange(3), 2)
    with pytest.raises(ValueError, match="do not fit"):
        rotate_pairs(torch.zeros(4, 1, DIM), rotation)
