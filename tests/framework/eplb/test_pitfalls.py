"""Known pitfalls of expert load balancing, each with the test that would have caught it.

====================================  ==========================================================================================
pitfall                               test
====================================  ==========================================================================================
sglang#25882 wrong text on the CPU    test_live_rebalance: greedy tokens stay the same when experts move after every pass
sglang#8253 hierarchical asserts      tests of the planners ``hierarchical`` and ``crossdock``: broken rules, planned flat
vllm#52435, #30614, #30215            tests/framework/test_config_rules: slots that do not divide, with the smallest that works
vllm#57465 TP and EP sizes mixed      test_live_rebalance: every layout moves its own shards
vllm#21497, vllm-ascend#5311          tests/framework/test_config_rules: slots that do not divide
sglang#17158, #13715 lost scales      here: block scales move with quantised experts
vllm#38128, #57151, #56716            tests/framework/test_recorder: only live tokens count; here: idle and probe passes
sglang#7266, #9501 recorder modes     test_live_rebalance: every recorder mode works with balancing and reports
vllm#57883 balancing stops for ever   test_manager: a rank that is never ready is given up after a time
sglang#8345 threshold read backwards  tests of the policy ``threshold``: its truth table
vllm#22842 set-up twice               here: set-up twice, then one rebalance
vllm#24069 first rebalance, no load   here: all-zero loads and a layer of zeros; conformance of every planner
vllm#24537 out of memory              test_live_rebalance: spare slots in the receipt; here: nothing else grows
FastDeploy#4599, prime-rl#3583        test_manager: addresses after every switch
prime-rl#3583 reload                  here: a checkpoint read under the placement in force
miles#2605, tokenspeed#1373           test_manager: a failed transfer rolls back on all ranks
====================================  ==========================================================================================
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
import structlog
import torch
from crossdock.config import EplbConfig, PluginChoice
from crossdock.eplb.live_placement import LivePlacement
from crossdock.eplb.spare_slots import SpareSlots
from crossdock.eplb.transfer import LocalCarrier
from crossdock.experts import make_experts
from crossdock.location import placement_maps
from crossdock.offline import logits, logits_job
from crossdock.placement import plan, trivial_placement
from crossdock.testing.balanced_ranks import run_balanced
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.testing.rebalance_rig import (
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_SLOTS,
    ListeningPicker,
    RebalanceRig,
    RigOptions,
    shuffled_placement,
)
from crossdock.testing.world import RankContext, RankPool
from crossdock.types.dispatch import Received, ReceiveLayout
from crossdock.types.experts import ExpertsSpec, ExpertTensors
from crossdock.types.placement import ExpertLoad, Placement, Topology

Pool = Callable[[int], RankPool]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


def quantised_experts(num_experts: int, hidden: int, inner: int) -> ExpertTensors:
    """fp8 blocks; neighbouring experts have scales that differ by a hundred."""
    generator = torch.Generator().manual_seed(0)

    def blocks(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn)

    scales = torch.tensor([100.0 ** (expert % 2) * 1e-3 for expert in range(num_experts)]).view(-1, 1, 1)
    return ExpertTensors(
        layer=0,
        tensors={
            "gate_up": blocks(num_experts, 2 * inner, hidden),
            "down": blocks(num_experts, hidden, inner),
            "gate_up_scale": scales.expand(-1, 2 * inner // 128, hidden // 128).contiguous(),
            "down_scale": scales.expand(-1, hidden // 128, inner // 128).contiguous(),
        },
    )


def test_block_scales_move_with_quantised_experts() -> None:
    num_experts, hidden, inner = 4, 128, 128
    tensors = quantised_experts(num_experts, hidden, inner)
    experts = make_experts(
        "torch",
        {},
        ExpertsSpec(
            hidden_size=hidden,
            intermediate_size=inner,
            num_local_experts=num_experts,
            top_k=1,
            activation="silu",
            dtype=torch.float32,
            device=torch.device("cpu"),
            weight_dtype="fp8_block",
        ),
    )
    experts.attach(tensors)
    live = LivePlacement(
        topology=Topology(num_gpus=1, num_nodes=1, num_physical_experts=num_experts),
        maps=placement_maps(trivial_placement(1, num_experts, num_experts), torch.device("cpu")),
        tensors=[tensors],
        experts=experts,
        picker=ListeningPicker(),
        counters=_NoCounters(),
        ep_rank=0,
        spare=SpareSlots([tensors.tensors]),
    )
    logical = torch.tensor([[0], [1], [2], [3], [0]])
    before = layer_output(live, experts, logical)
    swapped = Placement.from_physical([[3, 1, 2, 0]], num_experts)
    transfer = live.transfer(live.layer_order(0, swapped, max_step_bytes=1000).run(), LocalCarrier())
    while not transfer.advance():
        pass
    for group in transfer.plan.groups:
        live.switch(transfer.plan, group)
    assert torch.equal(layer_output(live, experts, logical), before)
    assert float(tensors.tensors["gate_up_scale"][0, 0, 0]) == pytest.approx(0.1)


class _NoCounters:
    def flush_layer(self, layer: int) -> None:
        """Nothing is counted."""


def layer_output(live: LivePlacement, experts, logical: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Rows through the slots that hold their experts now."""
    rows = torch.randn(logical.shape[0], 128, generator=torch.Generator().manual_seed(1))
    slots = live.maps.logical_to_physical[0, :, 0][logical]
    received = Received(
        layout=ReceiveLayout.TOKEN_ROWS,
        rows=rows,
        local_topk_ids=slots,
        row_weights=torch.ones(logical.shape, dtype=torch.float32),
    )
    output: torch.Tensor = experts.run(0, received)
    return output.clone()


def passes_that_count(context: RankContext) -> tuple[int, list[str]]:
    rig = RebalanceRig(context, RigOptions(interval=4))
    for _ in range(40):
        rig.step(tokens=0)
    return rig.segments.num_passes, rig.outcomes()


def test_idle_passes_neither_count_nor_trigger_a_rebalance(rank_pool: Pool) -> None:
    assert rank_pool(2).run(passes_that_count) == [(0, [])] * 2


def test_set_up_twice_then_one_rebalance(rank_pool: Pool) -> None:
    for moved, refreshed in rank_pool(2).run(set_up_twice):
        expected = (
            np.tile(np.arange(NUM_SLOTS) % NUM_EXPERTS, (NUM_LAYERS, 1)) != shuffled_placement(2).physical_to_logical
        )
        assert moved == int(expected.sum())
        assert refreshed <= NUM_LAYERS


def set_up_twice(context: RankContext) -> tuple[int, int]:
    rig = RebalanceRig(context, RigOptions(max_step_bytes=400))  # a layer in one group
    # The same tensors and maps once more, as a second set-up would; only the second is used.
    rig.live = attrs.evolve(rig.live)
    rig.manager.live = rig.live
    rig.manager.apply(shuffled_placement(2), "test")
    rig.run_until_idle()
    rig.check_content()
    return rig.counters.rebalances[0].moved_slots, len(rig.experts.refreshed)


class RealPlanner:
    """The planner of this project on whatever load comes."""

    def plan(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        return plan("crossdock", load, topology, current)


def rebalance_without_load(context: RankContext, zero_layers: int) -> list[str]:
    rig = RebalanceRig(context, RigOptions(interval=2), algo=RealPlanner())
    for _ in range(2):
        counts = torch.zeros((NUM_LAYERS, NUM_SLOTS), dtype=torch.int32)
        counts[zero_layers:, context.rank * 6] = 5
        rig.segments.push(counts)
    rig.step(tokens=0)
    rig.run_until_idle()
    rig.check_content()
    return rig.outcomes()


@pytest.mark.parametrize("zero_layers", [1, NUM_LAYERS])
def test_layers_without_load_are_no_reason_to_fail(zero_layers: int, rank_pool: Pool) -> None:
    expected = ["refused"] if zero_layers == NUM_LAYERS else ["applied"]
    assert rank_pool(2).run(rebalance_without_load, zero_layers) == [expected] * 2


def memory_of_rebalances(context: RankContext) -> tuple[int, int]:
    """Python's peak, and bytes of the spare slots; tensors are counted by the second."""
    rig = RebalanceRig(context, RigOptions(max_step_bytes=100_000))
    addresses = rig.live.spare.total_bytes
    tracemalloc.start()
    for seed in range(2, 6):
        rig.manager.apply(shuffled_placement(seed), "test")
        rig.run_until_idle()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rig.live.spare.total_bytes == addresses
    return peak, addresses


def test_rebalances_need_the_spare_slots_and_little_else(rank_pool: Pool) -> None:
    for peak, spare in rank_pool(2).run(memory_of_rebalances):
        assert spare == 6 * (4 * 24 + 2 * 12 + 4 * 2 + 5)
        assert peak < 2_000_000


def test_a_checkpoint_is_read_under_the_placement_in_force(tmp_path: Path, rank_pool: Pool) -> None:
    """What a reload after a rebalance must do: every slot is filled by the map, not by its position."""
    folder = write_random_model(tmp_path / "model")
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]
    expected = logits(folder, prompts, random_model_config(folder))
    in_force = np.stack([np.random.default_rng(layer).permutation([*range(8), 0, 3, 3, 7]) for layer in range(3)])
    config = random_model_config(folder, ranks=2, attn_dp=2, dispatcher="alltoallv")
    location = json.dumps({"physical_to_logical_map": in_force.tolist()})
    config = attrs.evolve(config, eplb=EplbConfig(slots=12, init_location=location))
    found = run_balanced(rank_pool(2), logits_job(folder, prompts, config))
    for index, array in enumerate(expected):
        np.testing.assert_allclose(found.result.logits[str(index)], array, atol=1e-5 * np.abs(array).max())


@pytest.mark.parametrize("picker", ["lp", "dynamic"])
def test_start_placements_of_every_form_give_the_same_logits(picker: str, tmp_path: Path, rank_pool: Pool) -> None:
    folder = write_random_model(tmp_path / "model")
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]
    expected = logits(folder, prompts, random_model_config(folder))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "load.npz", load=rng.integers(0, 100, (3, 3, 8)))
    torch.save({"logical_count": torch.from_numpy(rng.integers(0, 100, (3, 8)))}, tmp_path / "load.pt")
    slots = [[*range(8), 0, 1, 2, 3]] * 3
    (tmp_path / "map.json").write_text(json.dumps({"physical_to_logical_map": slots}))
    locations = ["trivial", str(tmp_path / "load.npz"), str(tmp_path / "load.pt"), str(tmp_path / "map.json")]
    for location in locations:
        config = random_model_config(folder, ranks=2, attn_dp=2, dispatcher="alltoallv")
        config = attrs.evolve(
            config,
            eplb=EplbConfig(slots=12, init_location=location),
            expert_location=PluginChoice(name=picker),
        )
        found = run_balanced(rank_pool(2), logits_job(folder, prompts, config))
        for index, array in enumerate(expected):
            np.testing.assert_allclose(found.result.logits[str(index)], array, atol=1e-5 * np.abs(array).max())
