"""The planner of this project: balance first, then as few moves as that leaves."""

from __future__ import annotations

import numpy as np
from crossdock.types.placement import ExpertLoad, Placement, Topology

from crossdock_eplb_algos._shared.arrays import Floats, Ints, numbers
from crossdock_eplb_algos._shared.balance import EFFORTS, balanced_packing
from crossdock_eplb_algos._shared.churn import MoveLimits, fewest_moves
from crossdock_eplb_algos._shared.counts import greedy_counts, max_copies
from crossdock_eplb_algos._shared.forecast import forecast_load
from crossdock_eplb_algos._shared.hierarchy import (
    Nodes,
    broken_rules,
    escaping_packing,
    exceeds_copies,
    slots_outside,
)
from crossdock_eplb_algos._shared.links import linked_packing, relink
from crossdock_eplb_algos._shared.packing import Packing, has_twins, packing_of, replica_counts
from crossdock_eplb_algos._shared.problem import Problem, make_placement, make_problem
from crossdock_eplb_algos._shared.slots import (
    keep_slots,
    moved_replicas,
    relabelled,
    single_slot_map,
    trivial_map,
    with_missing_experts,
)
from crossdock_eplb_algos._shared.twins import part_twins, take_fresh_where_better
from crossdock_eplb_algos.eplb_algo.crossdock.options import CrossdockOptions

_SLACK, _SLACK_FEW_SLOTS, _MANY_SLOTS = 0.011, 0.015, 8
_AIM = 2 / 3
"""Part of the slack that actions aim at; walking a little deeper than needed takes fewer moves."""
_LINKS_MAY_COST = 0.01
"""Part by which the fullest GPU of a layer may be fuller so that a picker can move more between GPUs: it wins several times that."""
_RELINKS = 8
"""Most exchanges of copies a layer that link GPUs again, from a current placement; each loads two replicas."""
_FAR = 6.0
"""A layer that few moves leave this many slacks above a fresh plan is planned afresh."""


class CrossdockPlanner:
    """Swaps replicas and changes counts towards the bound; from a current placement by few moves, never to a worse one."""

    def __init__(self, options: CrossdockOptions) -> None:
        self.options = options

    def plan(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        options = self.options
        expected = forecast_load(load.counts, options.forecast, decay=options.decay, margin=options.margin)
        problem = make_problem(expected, topology, current, dead_gpus_allowed=True)
        notes: tuple[str, ...] = ()
        if options.outside is not None:
            broken = _no_nodes(problem)
            if not broken:
                return make_placement(self._on_nodes(problem), problem, current)
            notes = (broken,)
        slots = self._fresh(problem) if problem.current is None else self._from_current(problem, problem.current)
        return make_placement(slots, problem, current, notes)

    def _fresh(self, problem: Problem) -> Ints:
        num_layers, num_experts = problem.load.shape
        if problem.num_slots == problem.num_gpus:
            counts = greedy_counts(
                problem.load, problem.num_slots, max_copies(num_experts, problem.num_slots, problem.num_gpus)
            )
            return single_slot_map(counts, trivial_map(num_layers, num_experts, problem.num_slots))
        return self._balanced(problem).experts.reshape(num_layers, -1)

    def _balanced(self, problem: Problem) -> Packing:
        """The evenest packing, or where it costs little the one that links most GPUs."""
        effort = EFFORTS[self.options.effort]
        packing = balanced_packing(problem.load, problem.num_slots, problem.num_gpus, effort)
        num_experts = problem.load.shape[1]
        if self.options.split == "batch" and num_experts < problem.num_slots <= num_experts * problem.num_gpus:
            linked = linked_packing(
                problem.load, problem.num_slots, problem.num_gpus, near=effort.near, tries=effort.link_tries
            )
            good = np.flatnonzero(linked.max_load() <= packing.max_load() * (1 + _LINKS_MAY_COST))
            packing.overwrite(good, linked.rows(good))
        return packing

    def _slack(self, problem: Problem) -> float:
        if self.options.slack is not None:
            return self.options.slack
        return _SLACK if problem.topology.slots_per_gpu >= _MANY_SLOTS else _SLACK_FEW_SLOTS

    def _from_current(self, problem: Problem, current: Ints) -> Ints:
        """Few moves where they suffice; a fresh plan, with GPUs renamed, in layers where they do not."""
        options, load, slack = self.options, problem.load, self._slack(problem)
        num_layers, num_experts = load.shape
        start, repaired = with_missing_experts(current, load)
        limit = None if options.max_moves is None else np.maximum(options.max_moves - repaired, 0)
        mean = load.sum(axis=1) / problem.num_gpus
        fresh = self._balanced(problem)
        reach = np.maximum(fresh.max_load(), mean)
        first = packing_of(start, load, problem.num_gpus)
        packing = first.rows(numbers(num_layers))
        parted, spent = np.zeros(0, dtype=np.int64), np.zeros(num_layers, dtype=np.int64)
        if not options.move_price and problem.num_slots <= num_experts * problem.num_gpus:
            parted, spent = part_twins(packing, num_experts, limit)
        fewest_moves(
            packing,
            load,
            replica_counts(start, num_experts),
            reach * (1 + slack * _AIM),
            reach * (1 + slack),
            MoveLimits(max_moves=None if limit is None else limit - spent, price=options.move_price),
        )
        old = start.reshape(packing.experts.shape)
        if limit is None:
            layers = np.flatnonzero(packing.max_load() > reach * (1 + _FAR * slack) + 1e-9 * mean)
            if layers.size:
                _replan(packing, fresh, old, layers, options.move_price * mean[layers])
        if options.split == "batch":
            room = np.maximum(
                packing.max_load(),
                np.minimum(first.max_load(), reach * (1 + slack)),
            )
            left = (
                np.full(num_layers, _RELINKS)
                if limit is None
                else (limit - moved_replicas(old, packing.experts, num_experts)) // 2
            )
            relink(packing, room, np.clip(left, 0, _RELINKS), EFFORTS[options.effort].link_tries)
        if parted.size:
            renamed = relabelled(old, fresh, num_experts) if limit is None else None
            take_fresh_where_better(packing, first, renamed, parted)
        return keep_slots(old, packing.experts).reshape(num_layers, -1)

    def _on_nodes(self, problem: Problem) -> Ints:
        """Groups on nodes; a layer whose current placement is nearly as good keeps it."""
        topology, options, slack = problem.topology, self.options, self._slack(problem)
        nodes = Nodes(
            num_groups=topology.num_groups,
            num_nodes=topology.num_nodes,
            num_gpus=problem.num_gpus,
            num_slots=problem.num_slots,
            max_outside=int((options.outside or 0.0) * problem.num_slots),
        )
        packing = escaping_packing(problem.load, nodes, EFFORTS[options.effort])
        slots = packing.experts.reshape(len(problem.load), -1)
        if problem.current is not None:
            now = packing_of(problem.current, problem.load, problem.num_gpus).max_load()
            keep = now <= packing.max_load() * (1 + slack)
            keep &= slots_outside(problem.current, nodes, problem.load.shape[1]) <= nodes.max_outside
            keep &= ~has_twins(problem.current.reshape(packing.experts.shape)).any(axis=1)
            slots = np.where(keep[:, None], problem.current, slots)
        return slots


def _replan(packing: Packing, fresh: Packing, old: Ints, layers: Ints, price: Floats) -> None:
    """Take the fresh plan for these layers where fullest GPU plus ``price`` [n] a move is less, in place."""
    num_experts = int(old.max()) + 1
    renamed = relabelled(old[layers], fresh.rows(layers), num_experts)
    costs = [
        state.max_load() + price * moved_replicas(old[layers], state.experts, num_experts)
        for state in (renamed, packing.rows(layers))
    ]
    better = np.flatnonzero(costs[0] < costs[1])
    packing.overwrite(layers[better], renamed.rows(better))


def _no_nodes(problem: Problem) -> str:
    if not problem.is_whole:
        return "planned flat, over living GPUs alike: groups are not kept on nodes while a GPU is dead"
    num_experts = problem.load.shape[1]
    return broken_rules(num_experts, problem.topology) or exceeds_copies(num_experts, problem.topology)
