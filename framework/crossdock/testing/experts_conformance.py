"""What must hold for an experts plugin: the same numbers as a plain loop, whatever the layout, the counts and the weight form."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator

import attrs
import torch
import torch.nn.functional as F

from crossdock.experts import adapt_experts, layouts_needed, make_experts
from crossdock.groups import resolve_sizes
from crossdock.ops.fp8_block import dequantise_blocks, quantise_blocks
from crossdock.ops.host_lists import int_rows
from crossdock.plugin_call import call_hook
from crossdock.registry import load_plugin
from crossdock.testing.conformance import NotCheckable, PluginCase, check_of
from crossdock.types.capability import Environment
from crossdock.types.dispatch import Received, ReceiveLayout
from crossdock.types.experts import Experts, ExpertsCapabilities, ExpertsSpec, ExpertTensors

NUM_EXPERTS, TOP_K = 5, 3
SIZES = {"cpu": (64, 96), "cuda": (256, 384)}
"""Hidden and intermediate size; device kernels work on blocks of 128."""
LAYER = 7
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2}
"""Relative to the largest output; bf16 rounds inputs of both products and their results to 8 bits."""
FP8_ON_DEVICES_TOLERANCE = 0.1
"""Both products may take activations of 3 bits beside fp8 weights."""
ROW_COUNTS = (0, 1, 2, 7, 33)


@attrs.frozen(kw_only=True, eq=False)
class ExpertsCase:
    """Experts with weights, and the same weights in float32 for the oracle."""

    experts: Experts
    tensors: ExpertTensors
    gate_up: torch.Tensor
    down: torch.Tensor
    dtype: torch.dtype
    tolerance: float

    @property
    def hidden_size(self) -> int:
        return self.down.shape[1]

    def oracle(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[R, H] float32, row by row and choice by choice."""
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for row, k in int_rows((ids >= 0).nonzero()):
            expert = int(ids[row, k])
            gate, up = (self.gate_up[expert] @ rows[row].float()).chunk(2)
            total[row] += weights[row, k] * (self.down[expert] @ (F.silu(gate) * up))
        return total


def _capabilities(case: PluginCase) -> ExpertsCapabilities:
    """Raises ``NotCheckable`` where the plugin does not run on the case's device here."""
    dtype = "float32" if case.device == "cpu" else "bfloat16"
    packages = frozenset(module.name for module in pkgutil.iter_modules())
    env = Environment(device=case.device, sizes=resolve_sizes(ranks=1), dtype=dtype, packages=packages)
    found = call_hook(load_plugin("experts", case.name), "experts_capabilities", options=case.options, env=env)
    if not isinstance(found, ExpertsCapabilities):
        raise NotCheckable(f"experts_capabilities answered {found!r}")
    if case.device not in found.devices:
        raise NotCheckable(f"runs on {', '.join(sorted(found.devices))} only")
    return found


def _weight_forms(case: PluginCase) -> list[str]:
    known = {"float32", "bfloat16", "fp8_block"} if case.device == "cpu" else {"bfloat16", "fp8_block"}
    return sorted(_capabilities(case).weight_dtypes & known)


def _plain_form(case: PluginCase) -> str:
    return "float32" if case.device == "cpu" else "bfloat16"


def _built(case: PluginCase, form: str, *, seed: int = 0, row_invariant: bool = False) -> ExpertsCase:
    """The plugin with seeded weights in a form: ``float32``, ``bfloat16`` or ``fp8_block`` (whose scales differ by 100 between experts)."""
    _capabilities(case)
    hidden_size, inner_size = SIZES[case.device]
    dtype = torch.bfloat16 if form == "bfloat16" or case.device != "cpu" else torch.float32
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(NUM_EXPERTS, 2 * inner_size, hidden_size, generator=generator) / hidden_size**0.5
    down = torch.randn(NUM_EXPERTS, hidden_size, inner_size, generator=generator) / inner_size**0.5
    if form == "fp8_block":
        factors = torch.logspace(-1, 1, NUM_EXPERTS)[:, None, None]
        tensors, gate_up, down = _quantised(gate_up * factors, down)
    else:
        gate_up, down = gate_up.to(dtype), down.to(dtype)
        tensors = {"gate_up": gate_up.clone(), "down": down.clone()}
    spec = ExpertsSpec(
        hidden_size=hidden_size,
        intermediate_size=inner_size,
        num_local_experts=NUM_EXPERTS,
        top_k=TOP_K,
        activation="silu",
        dtype=dtype,
        device=torch.device(case.device),
        weight_dtype="fp8_block" if form == "fp8_block" else "native",
        row_invariant=row_invariant,
    )
    experts = make_experts(case.name, case.options, spec)
    placed = {name: tensor.to(case.device) for name, tensor in tensors.items()}
    expert_tensors = ExpertTensors(layer=LAYER, tensors=placed)
    experts.attach(expert_tensors)
    everything = frozenset(layouts_needed(experts.capabilities.layouts)) - {ReceiveLayout.FLAT}
    adapted = adapt_experts(experts, everything, NUM_EXPERTS)
    return ExpertsCase(
        experts=adapted,
        tensors=expert_tensors,
        gate_up=gate_up.float().to(case.device),
        down=down.float().to(case.device),
        dtype=dtype,
        tolerance=_tolerance(case, form, dtype),
    )


def _tolerance(case: PluginCase, form: str, dtype: torch.dtype) -> float:
    has_fp8_products = form == "fp8_block" and case.device != "cpu"
    rounding = TOLERANCES[str(dtype).removeprefix("torch.")]
    return max(rounding, case.tolerance, FP8_ON_DEVICES_TOLERANCE if has_fp8_products else 0.0)


def _quantised(gate_up: torch.Tensor, down: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """fp8 block tensors as a checkpoint has them, and what they stand for."""

    def halves(stacked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = [quantise_blocks(matrix) for matrix in stacked]
        values = torch.stack([part.view(torch.uint8) for part, _ in parts])
        meant = torch.stack([dequantise_blocks(part, scale, torch.float32) for part, scale in parts])
        return values, torch.stack([scale for _, scale in parts]), meant

    gate, gate_scale, gate_meant = halves(gate_up.chunk(2, dim=1)[0])
    up, up_scale, up_meant = halves(gate_up.chunk(2, dim=1)[1])
    low, low_scale, down_meant = halves(down)
    tensors = {
        "gate_up": torch.cat((gate, up), dim=1).view(torch.float8_e4m3fn),
        "gate_up_scale": torch.cat((gate_scale, up_scale), dim=1),
        "down": low.view(torch.float8_e4m3fn),
        "down_scale": low_scale,
    }
    return tensors, torch.cat((gate_meant, up_meant), dim=1), down_meant


def _rows(
    built: ExpertsCase, count: int, *, seed: int = 1, everything_to: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, local ids with some -1, weights; rows whose ids are all -1 hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, built.hidden_size, generator=generator).to(built.dtype)
    ids = torch.rand(count, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous()
    if everything_to is not None:
        ids = torch.full((count, TOP_K), -1)
        ids[:, 1] = everything_to
    else:
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    rows[(ids < 0).all(dim=1)] = float("nan")
    weights = torch.rand(count, TOP_K, generator=generator)
    device = built.down.device
    return rows.to(device), ids.to(device), weights.to(device)


def _compare(built: ExpertsCase, received: Received, wanted: torch.Tensor, what: str) -> None:
    out = built.experts.run(LAYER, received)
    assert out.dtype in (torch.float32, torch.bfloat16), f"{what}: output is {out.dtype}"
    assert out.shape == wanted.shape, f"{what}: output {list(out.shape)}, expected {list(wanted.shape)}"
    _check_close(built, out, wanted, what)


def _check_close(built: ExpertsCase, out: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if wanted.numel():
        error = float((out.float() - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-3)
        assert error <= built.tolerance, f"{what}: relative error {error}, tolerance {built.tolerance}"


def _by_token(
    rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layout: ReceiveLayout = ReceiveLayout.TOKEN_ROWS
) -> Received:
    return Received(layout=layout, rows=rows, local_topk_ids=ids, row_weights=weights)


def check_it_gives_the_weighted_sum_of_swiglu_experts(case: PluginCase) -> None:
    for form in _weight_forms(case):
        built = _built(case, form)
        for count in ROW_COUNTS:
            rows, ids, weights = _rows(built, count)
            wanted = built.oracle(rows, ids, weights)
            for layout in (ReceiveLayout.TOKEN_ROWS, ReceiveLayout.REPLICATED):
                _compare(built, _by_token(rows, ids, weights, layout), wanted, f"{form}, {count} rows, {layout.value}")


def check_sorted_rows_give_the_same(case: PluginCase) -> None:
    if ReceiveLayout.FLAT not in _capabilities(case).layouts:
        raise NotCheckable("does not take rows sorted by expert")
    for form, counts, has_weights in _sorted_cases(case):
        built = _built(case, form)
        generator = torch.Generator().manual_seed(3)
        device = built.down.device
        rows = torch.randn(sum(counts), built.hidden_size, generator=generator).to(device, built.dtype)
        weights = torch.rand(sum(counts), generator=generator).to(device) if has_weights else None
        ids = torch.arange(NUM_EXPERTS).repeat_interleave(torch.tensor(counts))[:, None].to(device)
        ones = torch.ones(len(rows), 1, device=device)
        wanted = built.oracle(rows, ids, ones if weights is None else weights[:, None])
        received = Received(layout=ReceiveLayout.FLAT, rows=rows, counts=counts, row_weights=weights)
        _compare(built, received, wanted, f"{form}, counts {counts}")


def _sorted_cases(case: PluginCase) -> Iterator[tuple[str, list[int], bool]]:
    align = _capabilities(case).expert_alignment
    for form in _weight_forms(case):
        for counts in ([2, 0, 1, 3, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 4]):
            yield form, [count * align for count in counts], True
            yield form, [count * align for count in counts], False


def check_rows_in_places_of_their_experts_give_the_same(case: PluginCase) -> None:
    """[S, C, H] with counts on the device; places beyond a count hold NaN, outputs there are anything."""
    for form in _weight_forms(case):
        built = _built(case, form)
        if ReceiveLayout.EXPERT_MAJOR not in built.experts.capabilities.layouts:
            raise NotCheckable("does not take rows in places of their experts")
        for counts in ([3, 0, 128, 1, 7], [0] * NUM_EXPERTS):
            rows = torch.randn(NUM_EXPERTS, 128, built.hidden_size, generator=torch.Generator().manual_seed(4))
            live = torch.arange(128)[None, :] < torch.tensor(counts)[:, None]
            rows[~live] = float("nan")
            rows, live = rows.to(built.down.device, built.dtype), live.to(built.down.device)
            received = Received(
                layout=ReceiveLayout.EXPERT_MAJOR,
                rows=rows,
                counts=torch.tensor(counts, dtype=torch.int32, device=rows.device),
                expected_rows=28,
            )
            out = built.experts.run(LAYER, received)
            assert out.shape == rows.shape, f"{form}: output {list(out.shape)}, expected {list(rows.shape)}"
            ids = live.nonzero()[:, :1]
            wanted = built.oracle(rows[live], ids, torch.ones(ids.shape, device=ids.device))
            _check_close(built, out[live], wanted, f"{form}, counts {counts} in places")


def check_all_rows_may_go_to_one_expert(case: PluginCase) -> None:
    for form in _weight_forms(case):
        built = _built(case, form)
        for expert in (0, NUM_EXPERTS - 1):
            rows, ids, weights = _rows(built, 40, everything_to=expert)
            _compare(built, _by_token(rows, ids, weights), built.oracle(rows, ids, weights), f"{form}, expert {expert}")


def check_strided_rows_and_weights_are_read_right(case: PluginCase) -> None:
    """A dispatcher may hand over views into its receive buffer."""
    built = _built(case, _plain_form(case))
    rows, ids, weights = _rows(built, 9)
    wide_rows = rows.new_full((9, built.hidden_size + 16), float("nan"))
    wide_weights = weights.new_full((9, TOP_K + 5), float("nan"))
    wide_rows[:, : built.hidden_size], wide_weights[:, 2 : 2 + TOP_K] = rows, weights
    views = _by_token(wide_rows[:, : built.hidden_size], ids, wide_weights[:, 2 : 2 + TOP_K])
    _compare(built, views, built.oracle(rows, ids, weights), "strided views")


def check_after_a_swap_of_two_experts_and_refresh_the_outputs_are_swapped(case: PluginCase) -> None:
    """Every per-expert tensor moves, scales included, and nothing derived stays behind."""
    for form in _weight_forms(case):
        built = _built(case, form)
        rows, ids, weights = _rows(built, 21)
        before = built.experts.run(LAYER, _by_token(rows, ids, weights)).float()
        for tensor in built.tensors.tensors.values():
            raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            raw[[0, 3]] = raw[[3, 0]].clone()
        built.experts.refresh(LAYER, (0, 3))
        renamed = torch.where(ids == 0, 3, torch.where(ids == 3, 0, ids))
        after = built.experts.run(LAYER, _by_token(rows, renamed, weights)).float()
        live = (ids >= 0).any(dim=1)
        tolerance = built.tolerance * float(before[live].abs().max())
        difference = float((after[live] - before[live]).abs().max())
        assert difference <= tolerance, f"{form}: outputs differ by {difference} after the swap"


def check_attaching_again_changes_nothing(case: PluginCase) -> None:
    built = _built(case, _plain_form(case))
    rows, ids, weights = _rows(built, 5)
    first = built.experts.run(LAYER, _by_token(rows, ids, weights))
    built.experts.attach(built.tensors)
    assert torch.equal(first, built.experts.run(LAYER, _by_token(rows, ids, weights))), "another result after attach"


def check_inputs_and_weights_are_not_changed(case: PluginCase) -> None:
    built = _built(case, _plain_form(case))
    rows, ids, weights = _rows(built, 12)
    kept = [tensor.clone() for tensor in (rows, ids, weights, *built.tensors.tensors.values())]
    built.experts.run(LAYER, _by_token(rows, ids, weights))
    for now, before in zip((rows, ids, weights, *built.tensors.tensors.values()), kept, strict=True):
        assert torch.equal(torch.nan_to_num(now), torch.nan_to_num(before)), "a tensor was overwritten"


def check_a_row_keeps_its_bits_among_others_where_that_is_promised(case: PluginCase) -> None:
    if case.device != "cpu" or not _capabilities(case).row_invariant:
        raise NotCheckable("row_invariant is not among its capabilities here")
    built = _built(case, "float32", row_invariant=True)
    rows, ids, weights = _rows(built, 90)
    together = built.experts.run(LAYER, _by_token(rows, ids, weights))
    for first, last in ((0, 1), (89, 90), (3, 10), (20, 75)):
        part = slice(first, last)
        alone = built.experts.run(LAYER, _by_token(rows[part], ids[part], weights[part]))
        assert torch.equal(alone, together[part]), f"rows {first} to {last - 1} have other bits without the others"


CHECKS = tuple(
    check_of(check)
    for check in (
        check_it_gives_the_weighted_sum_of_swiglu_experts,
        check_sorted_rows_give_the_same,
        check_rows_in_places_of_their_experts_give_the_same,
        check_all_rows_may_go_to_one_expert,
        check_strided_rows_and_weights_are_read_right,
        check_after_a_swap_of_two_experts_and_refresh_the_outputs_are_swapped,
        check_attaching_again_changes_nothing,
        check_inputs_and_weights_are_not_changed,
        check_a_row_keeps_its_bits_among_others_where_that_is_promised,
    )
)
