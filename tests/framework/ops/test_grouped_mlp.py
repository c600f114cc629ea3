"""Every form of the grouped experts against the readable loop, and what only the native form promises."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from crossdock.errors import DispatchMisuse
from crossdock.native_code import native_code
from crossdock.ops.fp8_block import quantise_blocks
from crossdock.ops.grouped_mlp import GroupedMlp, GroupedMlpForm, best_form
from crossdock.ops.grouped_mlp_cpu import unsupported_reason

EXPERTS, TOP_K = 6, 3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Relative to the largest value: fp32 sums in another order; bf16 rounds the inner activations elsewhere."""
needs_compiler = pytest.mark.skipif(native_code().library is None, reason=f"no native kernels: {native_code().reason}")


def make_tensors(kind: str, hidden: int = 64, inner: int = 96) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * inner, hidden, generator=generator) / hidden**0.5
    down = torch.randn(EXPERTS, hidden, inner, generator=generator) / inner**0.5
    if kind != "fp8":
        dtype = getattr(torch, kind)
        return {"gate_up": gate_up.to(dtype), "down": down.to(dtype)}
    gates = [quantise_blocks(each[:inner] * 10.0**expert) for expert, each in enumerate(gate_up)]
    ups = [quantise_blocks(each[inner:]) for each in gate_up]
    downs = [quantise_blocks(each * 0.01**expert) for expert, each in enumerate(down)]
    values = [
        torch.cat((gate.view(torch.uint8), up.view(torch.uint8))) for (gate, _), (up, _) in zip(gates, ups, strict=True)
    ]
    return {
        "gate_up": torch.stack(values).view(torch.float8_e4m3fn),
        "gate_up_scale": torch.stack([torch.cat((g, u)) for (_, g), (_, u) in zip(gates, ups, strict=True)]),
        "down": torch.stack([value.view(torch.uint8) for value, _ in downs]).view(torch.float8_e4m3fn),
        "down_scale": torch.stack([scale for _, scale in downs]),
    }


def sample(
    rows: int, dtype: torch.dtype, hidden: int = 64, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous()
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return torch.randn(rows, hidden, generator=generator).to(dtype), ids, torch.rand(rows, TOP_K, generator=generator)


def assert_same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert found.dtype is torch.float32
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


def compare(
    form: GroupedMlpForm, tensors: Mapping[str, torch.Tensor], rows: int, dtype: torch.dtype, hidden: int
) -> None:
    arguments = sample(rows, dtype, hidden)
    wanted = GroupedMlp(tensors, "loop").run(*arguments)
    assert_same(GroupedMlp(tensors, form).run(*arguments), wanted, TOLERANCE[dtype])


@needs_compiler
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 13, 25, 47, 48, 49, 150, 700])
def test_native_equals_the_loop(kind: str, rows: int) -> None:
    compare("native", make_tensors(kind), rows, torch.bfloat16 if kind == "bfloat16" else torch.float32, 64)


@needs_compiler
@pytest.mark.parametrize(("hidden", "inner"), [(192, 320), (128, 64), (256, 192), (32, 32)])
def test_native_takes_sizes_that_fill_their_last_fp8_block_partly(hidden: int, inner: int) -> None:
    compare("native", make_tensors("fp8", hidden, inner), 9, torch.float32, hidden)


@needs_compiler
def test_native_reads_bfloat16_rows_with_float32_and_fp8_weights() -> None:
    for kind in ("float32", "fp8"):
        rows, ids, weights = sample(9, torch.bfloat16)
        wanted = GroupedMlp(make_tensors(kind), "loop").run(rows.float(), ids, weights)
        assert_same(GroupedMlp(make_tensors(kind), "native").run(rows, ids, weights), wanted, TOLERANCE[torch.float32])


@needs_compiler
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch_of_few(kind: str) -> None:
    rows, ids, weights = sample(6, torch.bfloat16 if kind == "bfloat16" else torch.float32)
    experts = GroupedMlp(make_tensors(kind), "native")
    together = experts.run(rows, ids, weights)
    for row in (0, 3, 5):
        alone = experts.run(rows[row : row + 1], ids[row : row + 1], weights[row : row + 1])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("form", [pytest.param("native_rows", marks=needs_compiler), "loop_rows"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_others(
    kind: str, form: GroupedMlpForm, threads: int
) -> None:
    """Few rows an expert, and more than a kernel takes at once; sizes of which one is no multiple of a block of outputs."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    arguments = sample(700 if form == "native_rows" else 40, dtype)
    tensors, before = make_tensors(kind), torch.get_num_threads()
    experts = GroupedMlp(tensors, form)
    try:
        torch.set_num_threads(threads)
        together = experts.run(*arguments)
        for first, last in [(0, 1), (39, 40), (5, 12), (3, 30), (1, 400)]:
            part = experts.run(*(each[first:last] for each in arguments))
            assert torch.equal(part, together[first:last]), (first, last)
    finally:
        torch.set_num_threads(before)
    # A loop of one row and one of many round each product once more in bf16.
    tolerance = TOLERANCE[dtype] if kind != "fp8" else 1e-5
    assert_same(together, GroupedMlp(tensors, "loop").run(*arguments), tolerance)


@needs_compiler
def test_shares_of_several_threads_add_up() -> None:
    arguments = sample(40, torch.float32)
    tensors = make_tensors("float32")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = GroupedMlp(tensors, "native").run(*arguments)
    finally:
        torch.set_num_threads(before)
    assert_same(found, GroupedMlp(tensors, "loop").run(*arguments), TOLERANCE[torch.float32])


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [0, 1, 9, 70])
def test_sorted_equals_the_loop(kind: str, rows: int) -> None:
    compare("sorted", make_tensors(kind), rows, getattr(torch, kind), 64)


@needs_compiler
def test_nan_in_rows_that_go_nowhere_stays_there() -> None:
    rows, ids, weights = sample(8, torch.float32)
    ids[3], rows[3] = -1, float("nan")
    out = GroupedMlp(make_tensors("float32"), "native").run(rows, ids, weights)
    assert not out[3].any()
    assert out.isfinite().all()


@needs_compiler
def test_nan_in_a_live_row_is_not_hidden() -> None:
    rows, ids, weights = sample(8, torch.float32)
    rows[3, 5], ids[3, 0] = float("nan"), 1
    out = GroupedMlp(make_tensors("float32"), "native").run(rows, ids, weights)
    assert out[3].isnan().all()
    assert out[:3].isfinite().all()


@needs_compiler
def test_large_gates_neither_overflow_nor_vanish() -> None:
    tensors = {"gate_up": torch.zeros(1, 64, 32), "down": torch.ones(1, 32, 32)}
    tensors["gate_up"][:, :, 0] = 1.0
    rows = torch.zeros(5, 32)
    rows[:, 0] = torch.tensor([-300.0, -20.0, 0.0, 20.0, 300.0])
    arguments = (rows, torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1))
    found, wanted = GroupedMlp(tensors, "native").run(*arguments), GroupedMlp(tensors, "loop").run(*arguments)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-30)


def test_sizes_and_types_without_a_kernel_fall_back_with_the_reason() -> None:
    odd = {"gate_up": torch.zeros(2, 40, 24), "down": torch.zeros(2, 24, 20)}
    assert "24 and 20 are no multiples of 32" in unsupported_reason(odd)
    assert best_form(odd, torch.float32)[0] == "loop"
    even = {"gate_up": torch.zeros(2, 48, 24), "down": torch.zeros(2, 24, 24)}
    assert best_form(even, torch.float32)[0] == "sorted"
    assert "no kernel for torch.float16" in unsupported_reason({name: each.half() for name, each in odd.items()})


def test_shapes_that_do_not_belong_together_are_named() -> None:
    rows, ids, weights = sample(4, torch.float32)
    with pytest.raises(DispatchMisuse, match=r"rows \[4, 32\].*must be \[R, 64\]"):
        GroupedMlp(make_tensors("float32"), "loop").run(rows[:, :32], ids, weights)
