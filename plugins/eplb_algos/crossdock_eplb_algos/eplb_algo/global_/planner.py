"""DeepSeek's balancing with one group and one node."""

from __future__ import annotations

from crossdock.types.placement import ExpertLoad, Placement, Topology

from crossdock_eplb_algos._shared.problem import make_placement, make_problem
from crossdock_eplb_algos._shared.reference import reference_map
from crossdock_eplb_algos.eplb_algo.global_.options import GlobalOptions


class GlobalPlanner:
    """Replicates the hottest experts, then packs replicas onto GPUs, heaviest first. Steps of the load are summed."""

    def __init__(self, options: GlobalOptions) -> None:
        self.options = options

    def plan(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        problem = make_problem(load.total, topology, current, dead_gpus_allowed=False)
        slots = reference_map(problem.load, problem.num_slots, 1, 1, problem.num_gpus)
        return make_placement(slots, problem, current)
