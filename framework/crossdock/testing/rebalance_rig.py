"""Live balancing without a model: a manager on each rank, expert tensors whose content tells which expert they are, and sabotage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from crossdock.engine_seams import AgreedStep
from crossdock.eplb.ballot import GatheredBallot
from crossdock.eplb.desk_thread import ThreadDesk
from crossdock.eplb.history import RebalanceLog
from crossdock.eplb.live_placement import LivePlacement, make_canaries
from crossdock.eplb.load_segments import LoadSegments
from crossdock.eplb.manager import EplbManager
from crossdock.eplb.settings import EplbSettings
from crossdock.eplb.spare_slots import SpareSlots, moved_tensors
from crossdock.eplb.transfer import LocalCarrier, SliceCarrier, SliceTransfer, Ticket, TransferTicket
from crossdock.eplb.transfer_gloo import GlooCarrier
from crossdock.eplb.transfer_shared import SharedCarrier, share_spare_slots
from crossdock.eplb.transport import make_ballot
from crossdock.groups import resolve_sizes
from crossdock.location import placement_maps
from crossdock.observe.receipt import ReceiptCounters
from crossdock.placement import trivial_placement
from crossdock.rebalance import make_rebalance_policy
from crossdock.testing.world import RankContext
from crossdock.types.comm import GroupComm
from crossdock.types.dispatch import Received, ReceiveLayout
from crossdock.types.experts import ExpertsCapabilities, ExpertTensors
from crossdock.types.location import PickerCapabilities
from crossdock.types.placement import EplbAlgo, ExpertLoad, Placement, Topology
from crossdock.types.rebalance import RebalancePolicy
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 3, 8, 12
STEP_LIMIT_S = 20.0
"""A rebalance of the rig takes milliseconds."""


@attrs.frozen(kw_only=True)
class RigOptions:
    """What a test sets."""

    interval: int = 4
    max_step_bytes: int = 200
    late_s: float = 10.0
    policy: str = "interval"
    policy_options: dict[str, object] = attrs.field(factory=dict[str, object])
    policy_needs_plan: bool = False
    canary: bool = False
    shared_votes: bool = False
    """Votes as on one machine: in shared memory, read one step later."""
    shared_slots: bool = False
    """Experts are written into the memory of the other ranks, where they would go over gloo."""


class ShufflePlanner:
    """A valid plan from a seed that goes up with each call; the load is ignored."""

    def __init__(self) -> None:
        self.calls = 0

    def plan(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        self.calls += 1
        return shuffled_placement(self.calls)


def shuffled_placement(seed: int) -> Placement:
    """Every expert at least once, the rest and the order at random."""
    rng = np.random.default_rng(seed)
    rest = NUM_SLOTS - NUM_EXPERTS
    rows = [
        rng.permutation([*range(NUM_EXPERTS), *rng.integers(0, NUM_EXPERTS, rest).tolist()]) for _ in range(NUM_LAYERS)
    ]
    return Placement.from_physical(np.stack(rows), NUM_EXPERTS)


class ListeningExperts:
    """Remembers what was refreshed."""

    def __init__(self) -> None:
        self.refreshed: list[tuple[int, tuple[int, ...]]] = []

    @property
    def capabilities(self) -> ExpertsCapabilities:
        return ExpertsCapabilities(layouts=(ReceiveLayout.FLAT,))

    def attach(self, tensors: ExpertTensors) -> None:
        """Nothing is derived."""

    def refresh(self, layer: int, slots: Sequence[int]) -> None:
        self.refreshed.append((layer, tuple(slots)))

    def run(self, layer: int, received: Received, sm_budget: int | None = None) -> torch.Tensor:
        return received.rows


class ListeningPicker:
    """Remembers which layers changed."""

    def __init__(self) -> None:
        self.changed: list[int] = []

    @property
    def capabilities(self) -> PickerCapabilities:
        return PickerCapabilities(rank_invariant=True)

    def transform_router(
        self, logits: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logits, bias

    def pick(self, layer: int, topk_ids: torch.Tensor, live_rows: int | torch.Tensor) -> torch.Tensor:
        return topk_ids

    def placement_changed(self, layer: int) -> None:
        self.changed.append(layer)


@attrs.define(eq=False)
class SabotagedCarrier:
    """Another carrier, but the slices with these numbers fail at once (``fails``) or never end (``hangs``)."""

    inner: SliceCarrier
    fails: frozenset[int] = frozenset()
    hangs: frozenset[int] = frozenset()
    renewals: int = attrs.field(default=0, init=False)
    _number: int = attrs.field(default=0, init=False)

    @property
    def has_room(self) -> bool:
        return self.inner.has_room

    def submit(self, transfer: SliceTransfer) -> Ticket:
        number, self._number = self._number, self._number + 1
        if number not in self.fails | self.hangs:
            return self.inner.submit(transfer)
        ticket = TransferTicket(transfer)
        if number in self.fails:
            ticket.error = ConnectionError("the cable was pulled")
            ticket.finished.set()
        return ticket

    def release(self) -> None:
        self.inner.release()

    def abandon(self) -> None:
        self.inner.abandon()

    def renew(self) -> None:
        self.renewals += 1
        self.inner.renew()

    def close(self) -> None:
        self.inner.close()


def expert_content(layer: int, expert: int) -> dict[str, torch.Tensor]:
    """Tensors of one expert of one layer, of several types and very different sizes; no two experts have equal ones."""
    base = 1000.0 * layer + 10.0 * expert
    return {
        "gate_up": base + torch.arange(24, dtype=torch.float32).view(6, 4),
        "down": (base + torch.arange(12).view(4, 3)).to(torch.bfloat16),
        "gate_up_scale": torch.full((2, 1), 100.0 ** (expert % 4) + layer),
        "down_blocks": torch.full((5,), 1 + expert, dtype=torch.uint8).view(torch.float8_e4m3fn),
    }


def layer_tensors(layer: int, experts: Sequence[int]) -> ExpertTensors:
    """Tensors of local slots that hold these experts."""
    contents = [expert_content(layer, expert) for expert in experts]
    names = contents[0]
    stacked = {
        name: torch.stack([content[name].view(torch.uint8) for content in contents]).view(names[name].dtype)
        for name in names
    }
    return ExpertTensors(layer=layer, tensors=stacked)


def _carrier(group: GroupComm, spare: SpareSlots, *, is_shared: bool) -> SliceCarrier:
    if group.size == 1:
        return LocalCarrier()
    if not is_shared:
        return GlooCarrier(group.ranks, [group.ranks], timeout_s=30.0)
    slots = share_spare_slots(spare, group)
    assert slots is not None, "ranks of a pool are on one machine"
    return SharedCarrier(slots)


class RebalanceRig:
    """One rank. Build it on every rank with the same arguments but ``sabotage``."""

    def __init__(
        self,
        context: RankContext,
        options: RigOptions | None = None,
        *,
        algo: EplbAlgo | None = None,
        policy: RebalancePolicy | None = None,
        sabotage: Callable[[SliceCarrier], SliceCarrier] = lambda carrier: carrier,
    ) -> None:
        options = options or RigOptions()
        ranks = context.size
        sizes = resolve_sizes(ranks=ranks, attn_dp_size=ranks)
        comms = context.comms_of(sizes)
        topology = Topology(num_gpus=ranks, num_nodes=1, num_physical_experts=NUM_SLOTS)
        first = trivial_placement(NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS)
        self.maps = placement_maps(first, torch.device("cpu"))
        local = NUM_SLOTS // ranks
        self._own = slice(context.rank * local, (context.rank + 1) * local)
        self.tensors = [
            layer_tensors(layer, first.physical_to_logical[layer, self._own].tolist()) for layer in range(NUM_LAYERS)
        ]
        self.experts, self.picker = ListeningExperts(), ListeningPicker()
        self.segments = LoadSegments(self.maps, ranks, options.interval)
        canaries = make_canaries(self.maps, context.rank, local) if options.canary else ()
        spare = SpareSlots(
            [moved_tensors(tensors, canaries[row] if canaries else None) for row, tensors in enumerate(self.tensors)]
        )
        self.carrier = sabotage(_carrier(comms.host.moe_ep, spare, is_shared=options.shared_slots))
        self.counters = ReceiptCounters()
        self.gauges: dict[str, float] = {}
        self.live = LivePlacement(
            topology=topology,
            maps=self.maps,
            tensors=self.tensors,
            experts=self.experts,
            picker=self.picker,
            counters=self.segments,
            ep_rank=context.rank,
            spare=spare,
            canaries=canaries,
        )
        self.manager = EplbManager(
            settings=EplbSettings(
                interval=options.interval,
                max_step_bytes=options.max_step_bytes,
                late_s=options.late_s,
                expert_share=0.5,
                link_gbps=10.0,
            ),
            live=self.live,
            segments=self.segments,
            desk=ThreadDesk(algo or ShufflePlanner()),
            policy=policy or make_rebalance_policy(options.policy, options.policy_options),
            policy_needs_plan=options.policy_needs_plan,
            carrier=self.carrier,
            world=comms.world,
            host_world=comms.host.world,
            ballot=make_ballot(comms.host.world) if options.shared_votes else GatheredBallot(world=comms.host.world),
            log=RebalanceLog(rank=context.rank, counters=self.counters, observers=(), gauges=self.gauges),
            gauges=self.gauges,
        )
        self.steps = 0
        self._addresses = self._data_pointers()

    def step(self, *, tokens: int = 6) -> None:
        """One step in which every rank counts so many tokens for each slot of its own; none for an idle step."""
        if tokens:
            counts = torch.zeros((NUM_LAYERS, NUM_SLOTS), dtype=torch.int32)
            counts[:, self._own] = tokens
            self.segments.push(counts)
        plan = StepPlan(
            step=self.steps,
            eplb_pass=self.steps,
            live_tokens=(tokens,),
            padded_tokens=(tokens,),
            padding_mode=PaddingMode.MAX_LEN,
            forward_mode=ForwardMode.DECODE,
            dispatch_mode=DispatchMode.NORMAL,
            overlap=False,
            overlap_reason="",
        )
        self.manager.after_step(AgreedStep(plan=plan, records=()))
        self.steps += 1

    def run_until_idle(self) -> None:
        """Idle steps until nothing is under way."""
        deadline = time.monotonic() + STEP_LIMIT_S
        while self.manager.is_busy:
            assert time.monotonic() < deadline, "the rebalance does not end"
            self.step(tokens=0)

    def outcomes(self) -> list[str]:
        return [entry.outcome for entry in self.counters.rebalances]

    def check_content(self) -> None:
        """Maps, tensors and host copy agree, and nothing has another address than at the start."""
        slots: npt.NDArray[np.int64] = self.maps.physical_to_logical.numpy()
        np.testing.assert_array_equal(slots, self.live.slots)
        self.live.placement()
        for layer, tensors in enumerate(self.tensors):
            expected = layer_tensors(layer, slots[layer, self._own].tolist())
            for name, tensor in tensors.tensors.items():
                same = torch.equal(tensor.view(torch.uint8), expected.tensors[name].view(torch.uint8))
                assert same, f"layer {layer}: {name} is not that of experts {slots[layer, self._own]}"
        assert self._data_pointers() == self._addresses, "a tensor moved"

    def _data_pointers(self) -> list[int]:
        maps = (self.maps.physical_to_logical, self.maps.logical_to_physical, self.maps.replica_counts)
        tensors = [tensor for layer in self.tensors for tensor in layer.tensors.values()]
        return [tensor.data_ptr() for tensor in (*maps, *tensors)]
