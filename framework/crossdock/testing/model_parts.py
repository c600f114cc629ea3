"""What a model driver runs a model on: choices as plain data, cache pools, and the parts of the MoE blocks."""

from __future__ import annotations

import attrs
import torch

from crossdock.dispatch import make_dispatcher
from crossdock.experts import adapt_experts, layouts_needed, make_experts
from crossdock.location import make_expert_location, placement_maps
from crossdock.placement import trivial_placement
from crossdock.testing.delayed_dispatcher import DelayedDispatcher
from crossdock.types.attention import KvSpec
from crossdock.types.comm import Comms
from crossdock.types.dispatch import Dispatcher, DispatcherSpec, Received
from crossdock.types.experts import Experts, ExpertsSpec
from crossdock.types.location import PickerSpec
from crossdock.types.model import MoeParts, MoeSpec
from crossdock.types.parallel import ParallelSizes, RankPlace
from crossdock.types.placement import Topology
from crossdock.types.step import PaddingMode

CPU = torch.device("cpu")


class NoRecorder:
    """Counts nothing."""

    def record(self, layer: int, physical_ids: torch.Tensor) -> None:
        return None

    def record_received(self, layer: int, received: Received) -> None:
        return None


@attrs.frozen(kw_only=True)
class DriverChoice:
    """What a driver is built with, all of it plain data so that it reaches rank processes."""

    folder: str
    dispatcher: str = "allgatherv"
    dispatcher_options: dict[str, object] = attrs.field(factory=dict[str, object])
    link_row_us: float = 0.0
    """Time that a row takes between ranks, as on a slow network; 0 for what the machine takes."""
    strategy: str = "sequential"
    strategy_options: dict[str, object] = attrs.field(factory=dict[str, object])
    always_overlaps: bool = False
    """Steps overlap whatever their size and what was measured, if only all replicas' rows can be cut."""
    row_invariant: bool = False
    """As ``launch.row_invariant``: a row's bits do not depend on the rows beside it."""
    experts: str = "torch"
    padding_mode: PaddingMode = PaddingMode.SUM_LEN
    dense_tp_size: int = 0
    redundant_experts: int = 0
    max_rows: int = 512
    """Rows that one rank may bring to a dispatch."""
    page_tokens: int = 4
    num_pages: int = 128
    dtype: str = "float32"
    poison_new_pages: bool = True
    """Fill a page with NaN when it is handed out, so that reading past a sequence shows. Benchmarks leave it out."""


def make_pools(kv: KvSpec, choice: DriverChoice, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """One layer's cache: (k, v), or (latent,)."""
    head = (choice.num_pages, choice.page_tokens)
    if kv.kind == "mla":
        return (torch.zeros(*head, kv.kv_lora_rank + kv.rope_dim, dtype=dtype),)
    keys = torch.zeros(*head, kv.num_kv_heads, kv.head_dim, dtype=dtype)
    return keys, torch.zeros(*head, kv.num_kv_heads, kv.v_head_dim, dtype=dtype)


def make_moe_parts(
    choice: DriverChoice,
    moe: MoeSpec,
    sizes: ParallelSizes,
    place: RankPlace,
    comms: Comms,
    dtype: torch.dtype,
    max_in_flight: int = 1,
) -> MoeParts:
    """Dispatcher, experts, picker and maps of a trivial placement; nothing is recorded."""
    physical = moe.num_logical_experts + choice.redundant_experts
    num_local = physical // sizes.moe_ep_size
    experts_spec = ExpertsSpec(
        hidden_size=moe.hidden_size,
        intermediate_size=moe.intermediate_size // sizes.moe_tp_size,
        num_local_experts=num_local,
        top_k=moe.top_k,
        activation="silu",
        dtype=dtype,
        device=CPU,
        weight_dtype=moe.weight_dtype,
        row_invariant=choice.row_invariant,
    )
    experts: Experts = make_experts(choice.experts, {}, experts_spec)
    dispatcher_spec = DispatcherSpec(
        sizes=sizes,
        place=place,
        comms=comms,
        hidden_size=moe.hidden_size,
        top_k=moe.top_k,
        num_physical_experts=physical,
        dtype=dtype,
        device=CPU,
        max_rows_per_rank=choice.max_rows,
        max_in_flight=max_in_flight,
        accepted_layouts=layouts_needed(experts.capabilities.layouts),
    )
    dispatcher: Dispatcher = make_dispatcher(choice.dispatcher, choice.dispatcher_options, dispatcher_spec)
    if choice.link_row_us:
        dispatcher = DelayedDispatcher(dispatcher, choice.link_row_us / 1e6)
    placement = trivial_placement(len(moe.layers), moe.num_logical_experts, physical)
    maps = placement_maps(placement, CPU)
    topology = Topology(
        num_gpus=sizes.moe_ep_size, num_nodes=1, num_physical_experts=physical, num_groups=moe.num_groups
    )
    replicated = dispatcher.capabilities.rank_invariant_picks_needed
    picker_spec = PickerSpec(
        maps=maps, topology=topology, sizes=sizes, place=place, comms=comms, replicated_rows=replicated
    )
    return MoeParts(
        dispatcher=dispatcher,
        experts=adapt_experts(experts, dispatcher.capabilities.layouts, num_local),
        picker=make_expert_location("dynamic" if replicated else "static", {}, picker_spec),
        maps=maps,
        recorder=NoRecorder(),
        num_physical_experts=physical,
    )
