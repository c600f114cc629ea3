"""Expert choice against loops written out, and against transformers' routers."""

from __future__ import annotations

import pytest
import torch
from crossdock.native_code import native_code
from crossdock.ops.topk_routing import TopkRule, topk_routing
from crossdock.ops.topk_routing_cpu import takes, topk_routing_cpu
from crossdock.ops.topk_routing_torch import topk_routing_torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter


def logit(probability: list[float]) -> torch.Tensor:
    return torch.logit(torch.tensor([probability]))


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 2.5])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_renormalisation_and_scaling_are_independent(renormalise: bool, scaling: float, scoring: str) -> None:
    logits = torch.randn(7, 8, generator=torch.Generator().manual_seed(1))
    rule = TopkRule(top_k=3, scoring=scoring, renormalise=renormalise, routed_scaling=scaling)
    ids, weights = topk_routing(logits, None, rule)
    for row in range(7):
        scores = logits[row].double().softmax(0) if scoring == "softmax" else logits[row].double().sigmoid()
        best = sorted(range(8), key=lambda expert: -float(scores[expert]))[:3]
        wanted = scores[best] / (scores[best].sum() if renormalise else 1.0) * scaling
        assert ids[row].tolist() == best
        torch.testing.assert_close(weights[row].double(), wanted, atol=1e-6, rtol=1e-6)


def test_bias_changes_the_choice_and_not_the_weights() -> None:
    rule = TopkRule(top_k=1, scoring="sigmoid")
    ids, weights = topk_routing(logit([0.6, 0.5]), torch.tensor([0.0, 0.3]), rule)
    assert ids.tolist() == [[1]]
    assert weights.item() == pytest.approx(0.5)


def test_experts_of_excluded_groups_are_never_chosen_even_when_every_allowed_score_is_negative() -> None:
    generator = torch.Generator().manual_seed(2)
    rule = TopkRule(top_k=4, scoring="sigmoid", num_groups=4, kept_groups=2, group_score="sum_of_two_best")
    for bias in (torch.full((8,), -5.0), torch.tensor([-5.0, -5, -9, -9, -5, -5, -9, -9])):
        ids, weights = topk_routing(torch.randn(50, 8, generator=generator), bias, rule)
        groups = [{int(expert) // 2 for expert in row} for row in ids]
        assert all(len(kept) == 2 for kept in groups)
        assert bool((weights > 0).all())


@pytest.mark.parametrize(("group_score", "kept"), [("sum_of_two_best", {2, 3}), ("max", {0, 1})])
def test_v3_keeps_the_group_with_the_best_two_and_v2_the_group_with_the_best_one(
    group_score: str, kept: set[int]
) -> None:
    rule = TopkRule(top_k=2, scoring="sigmoid", num_groups=2, kept_groups=1, group_score=group_score)
    scores = torch.tensor([[0.9, 1e-6, 0.6, 0.6]])
    ids, _ = topk_routing(torch.logit(scores), None, rule)
    assert set(ids[0].tolist()) == kept


def test_groups_of_one_expert_work() -> None:
    rule = TopkRule(top_k=2, scoring="sigmoid", num_groups=4, kept_groups=3, group_score="sum_of_two_best")
    ids, _ = topk_routing(logit([0.1, 0.7, 0.5, 0.3]), None, rule)
    assert ids.tolist() == [[1, 2]]


def test_all_negative_logits_choose_as_softmax_does() -> None:
    logits = -8.0 + 7.0 * torch.rand(20, 16, generator=torch.Generator().manual_seed(3))
    ids, weights = topk_routing(logits, None, TopkRule(top_k=4))
    wanted, order = logits.double().softmax(-1).sort(descending=True)
    assert ids.tolist() == order[:, :4].tolist()
    torch.testing.assert_close(weights.double(), wanted[:, :4], atol=1e-6, rtol=1e-5)
    _, equal = topk_routing(torch.full((1, 16), -1e4), None, TopkRule(top_k=4))
    torch.testing.assert_close(equal, torch.full((1, 4), 1 / 16))


def test_grouped_choice_equals_transformers() -> None:
    config = DeepseekV3Config(
        hidden_size=12, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=5, routed_scaling_factor=2.5
    )
    router = DeepseekV3TopkRouter(config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        router.e_score_correction_bias.copy_(torch.randn(16, generator=generator) * 0.3)
        logits, wanted_weights, wanted_ids = router(torch.randn(40, 12, generator=generator))
        rule = TopkRule(
            top_k=5,
            scoring="sigmoid",
            renormalise=True,
            routed_scaling=2.5,
            num_groups=4,
            kept_groups=2,
            group_score="sum_of_two_best",
        )
        ids, weights = topk_routing(logits, router.e_score_correction_bias, rule)
    dense = torch.zeros(40, 16).scatter(1, ids, weights)
    torch.testing.assert_close(dense, torch.zeros(40, 16).scatter(1, wanted_ids, wanted_weights))


def test_no_rows_give_empty_results_of_the_right_shape() -> None:
    ids, weights = topk_routing(torch.zeros(0, 8), torch.zeros(8), TopkRule(top_k=2, num_groups=2, kept_groups=1))
    assert ids.shape == weights.shape == (0, 2)
    assert ids.dtype == torch.int64


@pytest.mark.parametrize(
    "rule", [TopkRule(top_k=2, num_groups=3, kept_groups=1), TopkRule(top_k=3, num_groups=4, kept_groups=1)]
)
def test_groups_that_do_not_fit_are_refused(rule: TopkRule) -> None:
    with pytest.raises(ValueError, match="topk_routing"):
        topk_routing(torch.zeros(1, 8), None, rule)


needs_compiler = pytest.mark.skipif(native_code().library is None, reason=f"no native kernels: {native_code().reason}")
RULES = (
    TopkRule(top_k=4, renormalise=True),
    TopkRule(top_k=1, routed_scaling=16.0),
    TopkRule(top_k=3, num_groups=4, kept_groups=2),
    TopkRule(top_k=4, scoring="sigmoid", num_groups=4, kept_groups=2, group_score="sum_of_two_best", renormalise=True),
    TopkRule(top_k=2, scoring="sigmoid", routed_scaling=2.5),
)


@needs_compiler
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("experts", [8, 16, 36, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_native_choice_equals_the_torch_one(rule: TopkRule, rows: int, experts: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(experts)
    wide = 3 * torch.randn(rows, experts + 5, generator=generator)
    logits, bias = wide[:, :experts], torch.randn(experts, generator=generator) if has_bias else None
    slots = torch.randperm(experts, generator=generator)
    assert takes(logits, bias)
    ids, weights = topk_routing_cpu(logits, bias, rule, None)
    wanted_ids, wanted_weights = topk_routing_torch(logits, bias, rule)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, atol=1e-6, rtol=1e-6)
    assert torch.equal(topk_routing_cpu(logits, bias, rule, slots)[0], slots[wanted_ids])


@needs_compiler
def test_of_equal_experts_the_native_choice_takes_the_first() -> None:
    ids, _ = topk_routing_cpu(torch.zeros(2, 40), None, TopkRule(top_k=3), None)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]


@needs_compiler
def test_nan_logits_give_ids_in_range_and_weights_that_show_it() -> None:
    logits = torch.randn(3, 20)
    logits[1, 7] = float("nan")
    ids, weights = topk_routing_cpu(logits, None, TopkRule(top_k=4, renormalise=True), None)
    assert bool(((ids >= 0) & (ids < 20)).all())
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()


def test_the_kernel_does_not_take_other_types() -> None:
    assert not takes(torch.zeros(2, 8, dtype=torch.float64), None)
    assert not takes(torch.zeros(8, 2).T, None)
    assert not takes(torch.zeros(2, 8), torch.zeros(8, dtype=torch.float64))
