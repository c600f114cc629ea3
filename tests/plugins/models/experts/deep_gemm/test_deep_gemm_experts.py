"""The ``deep_gemm`` experts without the library: its names, refusals, and the paths around products that are played in torch."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from crossdock.errors import DispatchMisuse, PluginImportFailed
from crossdock.groups import resolve_sizes
from crossdock.ops.fp8_block import dequantise_blocks, quantise_blocks
from crossdock.ops.quantise_rows import quantise_rows
from crossdock.plugin_call import call_hook
from crossdock.registry import load_plugin
from crossdock.types.attention import KvSpec
from crossdock.types.capability import Environment, Refusal
from crossdock.types.dispatch import Received, ReceiveLayout, ScaleForm, WireDtype
from crossdock.types.experts import ExpertsCapabilities, ExpertsSpec, ExpertTensors
from crossdock.types.model import ModelInfo, MoeSpec
from crossdock_models.experts.deep_gemm.experts import DeepGemmExperts
from crossdock_models.experts.deep_gemm.library import load_products, products_of
from crossdock_models.experts.deep_gemm.options import DeepGemmOptions

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_EXPERTS, HIDDEN_SIZE, INNER_SIZE, TOP_K, LAYER = 3, 256, 128, 2, 4
TOLERANCES = {"bfloat16": 2e-2, "fp8_block": 0.12}
"""Relative to the largest output: results of 8 bits; activations of 3 bits in both products."""


def dequantised(pair: Any) -> torch.Tensor:
    """What rows or weights stand for."""
    if isinstance(pair, torch.Tensor):
        return pair.float()
    values, scales = pair
    if values.dim() == 3 and scales.shape[1] != values.shape[1]:
        return torch.stack([dequantise_blocks(v, s, torch.float32) for v, s in zip(values, scales, strict=True)])
    return values.float() * scales.repeat_interleave(128, dim=-1)


class PlayedProducts:
    """DeepGEMM's products as their documentation says; what they must not touch is left as it was."""

    def __init__(self) -> None:
        self.sms = 132
        self.set: list[int] = []

    def contiguous(self, a: Any, b: Any, d: torch.Tensor, groups: torch.Tensor) -> None:
        rows, weights = dequantised(a), dequantised(b)
        for segment in range(0, len(groups), 128):
            assert groups[segment : segment + 128].unique().numel() == 1, "a segment has one expert"
            if groups[segment] >= 0:
                part = slice(segment, segment + 128)
                d[part] = (rows[part] @ weights[groups[segment]].T).to(d.dtype)

    def masked(self, a: Any, b: Any, d: torch.Tensor, counts: torch.Tensor, expected: int) -> None:
        assert expected > 0
        rows, weights = dequantised(a), dequantised(b)
        for expert, count in enumerate(counts.tolist()):
            d[expert, :count] = (rows[expert, :count] @ weights[expert].T).to(d.dtype)

    def module(self, **names: Any) -> SimpleNamespace:
        """As the newest release spells them."""
        return SimpleNamespace(
            m_grouped_fp8_gemm_nt_contiguous=self.contiguous,
            m_grouped_bf16_gemm_nt_contiguous=self.contiguous,
            fp8_m_grouped_gemm_nt_masked=self.masked,
            bf16_m_grouped_gemm_nt_masked=self.masked,
            set_num_sms=self.set.append,
            get_num_sms=lambda: self.sms,
            **names,
        )


def make_experts(
    form: str, played: PlayedProducts, **options: Any
) -> tuple[DeepGemmExperts, torch.Tensor, torch.Tensor]:
    """Experts with seeded weights, and what these stand for in float32."""
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER_SIZE, HIDDEN_SIZE, generator=generator) / HIDDEN_SIZE**0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN_SIZE, INNER_SIZE, generator=generator) / INNER_SIZE**0.5
    tensors = {"gate_up": gate_up.to(torch.bfloat16), "down": down.to(torch.bfloat16)}
    if form == "fp8_block":
        for name, stacked in (("gate_up", gate_up), ("down", down)):
            parts = [quantise_blocks(matrix) for matrix in stacked]
            tensors[name] = torch.stack([part.view(torch.uint8) for part, _ in parts]).view(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.stack([scale for _, scale in parts])
    spec = ExpertsSpec(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INNER_SIZE,
        num_local_experts=NUM_EXPERTS,
        top_k=TOP_K,
        activation="silu",
        dtype=torch.bfloat16,
        device=DEVICE,
        weight_dtype=form if form == "fp8_block" else "native",
    )
    experts = DeepGemmExperts(DeepGemmOptions(**options), spec, products_of(played.module()))
    tensors = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    experts.attach(ExpertTensors(layer=LAYER, tensors=tensors))
    meant = [
        dequantised((tensors[name], tensors[f"{name}_scale"]) if form == "fp8_block" else tensors[name])
        for name in ("gate_up", "down")
    ]
    return experts, meant[0], meant[1]


def oracle(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:  # fmt: skip
    total = torch.zeros(rows.shape, device=rows.device)
    for row, k in (ids >= 0).nonzero().tolist():
        gate, up = (gate_up[ids[row, k]] @ rows[row].float()).chunk(2)
        total[row] += weights[row, k] * (down[ids[row, k]] @ (torch.nn.functional.silu(gate) * up))
    return total


def received_rows(num_rows: int) -> Received:
    generator = torch.Generator().manual_seed(7)
    ids = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous()
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    return Received(
        layout=ReceiveLayout.TOKEN_ROWS,
        rows=torch.randn(num_rows, HIDDEN_SIZE, generator=generator).to(DEVICE, torch.bfloat16),
        local_topk_ids=ids.to(DEVICE),
        row_weights=torch.rand(num_rows, TOP_K, generator=generator).to(DEVICE),
    )


def check(got: torch.Tensor, want: torch.Tensor, form: str) -> None:
    assert got.shape == want.shape
    if want.numel():
        assert float((got.float() - want).abs().max() / want.abs().max()) <= TOLERANCES[form]


@needs_triton
@pytest.mark.parametrize("masked_rows", [64, 0], ids=["masked", "contiguous"])
@pytest.mark.parametrize("form", ["bfloat16", "fp8_block"])
@pytest.mark.parametrize("num_rows", [0, 1, 40])
def test_rows_by_token_give_the_weighted_sum(num_rows: int, form: str, masked_rows: int) -> None:
    experts, gate_up, down = make_experts(form, PlayedProducts(), masked_rows=masked_rows)
    received = received_rows(num_rows)
    assert received.local_topk_ids is not None
    assert received.row_weights is not None
    want = oracle(received.rows, received.local_topk_ids, received.row_weights, gate_up, down)
    check(experts.run(LAYER, received), want, form)


@needs_triton
def test_rows_that_come_quantised_are_taken_as_they_are_and_the_hosts_count_bounds_the_places() -> None:
    experts, gate_up, down = make_experts("fp8_block", PlayedProducts(), masked_rows=0)
    received = received_rows(40)
    ids, weights = received.local_topk_ids, received.row_weights
    assert ids is not None
    assert weights is not None
    payload, scales = quantise_rows(received.rows)
    aligned = sum(-(-int((ids == expert).sum()) // 128) * 128 for expert in range(NUM_EXPERTS))
    quantised = attrs.evolve(received, rows=payload, scales=scales, scale_form=ScaleForm.FP32_ROW, aligned_rows=aligned)
    check(
        experts.run(LAYER, quantised), oracle(dequantised((payload, scales)), ids, weights, gate_up, down), "fp8_block"
    )


@needs_triton
@pytest.mark.parametrize("form", ["bfloat16", "fp8_block"])
def test_rows_in_places_stay_in_their_places(form: str) -> None:
    experts, gate_up, down = make_experts(form, PlayedProducts())
    counts = torch.tensor([5, 0, 2], dtype=torch.int32, device=DEVICE)
    rows = torch.randn(NUM_EXPERTS, 128, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
    rows = rows.to(DEVICE, torch.bfloat16)
    out = experts.run(LAYER, Received(layout=ReceiveLayout.EXPERT_MAJOR, rows=rows, counts=counts, expected_rows=3))
    for expert, count in enumerate(counts.tolist()):
        ids = torch.full((count, 1), expert, device=DEVICE)
        want = oracle(rows[expert, :count], ids, torch.ones(count, 1, device=DEVICE), gate_up, down)
        check(out[expert, :count], want, form)


@needs_triton
def test_multiprocessors_are_lent_in_pairs_and_given_back() -> None:
    played = PlayedProducts()
    experts, _, _ = make_experts("bfloat16", played)
    for budget in (101, None, 500):
        experts.run(LAYER, received_rows(2), budget)
    assert played.set == [100, 132, 132]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": torch.zeros(NUM_EXPERTS, 100, HIDDEN_SIZE)}, "found Tensor and 100"),
        ({"counts": [1, 2, 3]}, "found list and 128"),
        ({"scales": torch.ones(1), "scale_form": ScaleForm.FP32_ROW}, "come by column"),
    ],
)
def test_places_that_the_product_cannot_take_are_an_error(changes: dict[str, Any], words: str) -> None:
    experts, _, _ = make_experts("bfloat16", PlayedProducts())
    received = Received(
        layout=ReceiveLayout.EXPERT_MAJOR,
        rows=torch.zeros(NUM_EXPERTS, 128, HIDDEN_SIZE),
        counts=torch.zeros(NUM_EXPERTS, dtype=torch.int32),
    )
    with pytest.raises(DispatchMisuse, match=words):
        experts.run(LAYER, attrs.evolve(received, **changes))


def test_a_module_without_a_product_is_refused_by_name_and_version() -> None:
    module = PlayedProducts().module(__version__="9.9")
    del module.fp8_m_grouped_gemm_nt_masked
    with pytest.raises(PluginImportFailed, match=r"deep_gemm 9\.9 has no m_grouped_fp8_gemm_nt_masked or"):
        products_of(module)


def test_a_module_that_aligns_to_more_rows_is_refused() -> None:
    module = PlayedProducts().module(get_mk_alignment_for_contiguous_layout=lambda: 224)
    with pytest.raises(PluginImportFailed, match="224 rows, this plugin to 128"):
        products_of(module)


@pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is not None, reason="deep_gemm is installed")
def test_a_failing_import_names_the_wheel_that_fits() -> None:
    with pytest.raises(PluginImportFailed, match=r"sgl-deep-gemm==0\.1\.5"):
        load_products()


def answer(weight_dtype: str = "fp8_block", inner_size: int = 2048, **env: Any) -> ExpertsCapabilities | Refusal:
    moe = MoeSpec(
        layers=(1,),
        num_logical_experts=8,
        top_k=2,
        hidden_size=7168,
        intermediate_size=inner_size,
        weight_dtype=weight_dtype,
    )
    info = ModelInfo(
        model_type="deepseek_v3",
        num_layers=2,
        hidden_size=7168,
        vocab_size=10,
        max_position_embeddings=10,
        kv=KvSpec(kind="mla", kv_lora_rank=512, rope_dim=64),
        num_heads=8,
        moe=moe,
    )
    facts: dict[str, Any] = {"device": "cuda", "sizes": resolve_sizes(ranks=1), "dtype": "bfloat16", "model": info}
    facts["packages"] = frozenset({"deep_gemm", "triton"})
    found = call_hook(
        load_plugin("experts", "deep_gemm"), "experts_capabilities", options={}, env=Environment(**{**facts, **env})
    )
    assert isinstance(found, ExpertsCapabilities | Refusal)
    return found


def test_fp8_rows_are_taken_beside_fp8_weights_only() -> None:
    fp8, bf16 = answer(), answer("native")
    assert isinstance(fp8, ExpertsCapabilities)
    assert isinstance(bf16, ExpertsCapabilities)
    assert WireDtype.FP8_BLOCK in fp8.wire_dtypes
    assert bf16.wire_dtypes == {WireDtype.NATIVE}


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"packages": frozenset({"triton"})}, "package_missing", "sgl-deep-gemm==0.1.5"),
        ({"packages": frozenset({"deep_gemm"})}, "package_missing", "needs triton"),
        ({"inner_size": 96}, "shape_not_supported", "intermediate 96 a rank"),
    ],
)
def test_what_cannot_run_is_refused_with_what_works(changes: dict[str, Any], code: str, words: str) -> None:
    found = answer(**changes)
    assert isinstance(found, Refusal)
    assert found.code == code
    assert words in found.sentence
