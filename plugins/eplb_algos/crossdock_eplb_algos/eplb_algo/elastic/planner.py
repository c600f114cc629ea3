"""Global balancing over living GPUs; dead ones get nothing."""

from __future__ import annotations

from crossdock.types.placement import ExpertLoad, Placement, Topology

from crossdock_eplb_algos._shared.packing import packing_of
from crossdock_eplb_algos._shared.problem import make_placement, make_problem
from crossdock_eplb_algos._shared.reference import reference_map
from crossdock_eplb_algos._shared.slots import keep_slots, relabelled
from crossdock_eplb_algos.eplb_algo.elastic.options import ElasticOptions


class ElasticPlanner:
    """Plans as ``global`` does, for the GPUs that are alive. Steps of the load are summed.

    With a current placement, GPUs are renamed so that much of it stays. To survive f dead GPUs of G, P * (G - f) / G slots
    must hold all experts.
    """

    def __init__(self, options: ElasticOptions) -> None:
        self.options = options

    def plan(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        problem = make_problem(load.total, topology, current, dead_gpus_allowed=True)
        slots = reference_map(problem.load, problem.num_slots, 1, 1, problem.num_gpus)
        if problem.current is not None:
            shape = (load.num_layers, problem.num_gpus, -1)
            old = problem.current.reshape(shape)
            fresh = packing_of(slots, problem.load, problem.num_gpus)
            renamed = relabelled(old, fresh, load.num_logical_experts)
            slots = keep_slots(old, renamed.experts).reshape(load.num_layers, -1)
        return make_placement(slots, problem, current)
