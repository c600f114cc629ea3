"""DeepSeek's hierarchical balancing, strict or with an escape for the hottest replicas."""

from __future__ import annotations

from crossdock.types.placement import ExpertLoad, Placement, Topology

from crossdock_eplb_algos._shared.balance import EFFORTS
from crossdock_eplb_algos._shared.hierarchy import Nodes, broken_rules, escaping_packing, exceeds_copies
from crossdock_eplb_algos._shared.problem import make_placement, make_problem
from crossdock_eplb_algos._shared.reference import reference_map
from crossdock_eplb_algos.eplb_algo.hierarchical.options import HierarchicalOptions


class HierarchicalPlanner:
    """Groups to nodes, replicas within a node, replicas to GPUs. Steps of the load are summed.

    Where the sizes do not divide it plans as ``global`` does, and says so in the placement's notes.
    """

    def __init__(self, options: HierarchicalOptions) -> None:
        self.options = options

    def plan(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        problem = make_problem(load.total, topology, current, dead_gpus_allowed=False)
        broken = broken_rules(load.num_logical_experts, topology)
        if broken:
            slots = reference_map(problem.load, problem.num_slots, 1, 1, problem.num_gpus)
            return make_placement(slots, problem, current, (broken,))
        may_escape = self.options.escape > 0 and topology.num_nodes > 1
        if may_escape and not exceeds_copies(load.num_logical_experts, topology):
            nodes = Nodes(
                num_groups=topology.num_groups,
                num_nodes=topology.num_nodes,
                num_gpus=problem.num_gpus,
                num_slots=problem.num_slots,
                max_outside=int(self.options.escape * problem.num_slots),
            )
            packing = escaping_packing(problem.load, nodes, EFFORTS["default"])
            return make_placement(packing.experts.reshape(load.num_layers, -1), problem, current)
        slots = reference_map(
            problem.load, problem.num_slots, topology.num_groups, topology.num_nodes, problem.num_gpus
        )
        return make_placement(slots, problem, current)
