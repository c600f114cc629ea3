"""A layer's switch cut into groups of slots that a step can afford to copy. Pure: every rank cuts the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from crossdock.types.moves import LayerMoves


def switch_groups(
    moves: LayerMoves, old: Sequence[int], *, slots_per_rank: int, max_slots: int, max_replicas: int
) -> tuple[tuple[int, ...], ...]:
    """Groups of physical slots; after each group every expert of the layer still lies somewhere.

    Slots are taken one after the other as long as another slot in force holds the expert that they give up. Where none does, the
    slots of a whole cycle go together.

    Args:
        moves: what changes.
        old: logical expert of each slot of a living rank in force, in slot order; only counts matter.
        slots_per_rank: to know whose slot is whose.
        max_slots: most slots of one rank in a group, unless a cycle is longer.
        max_replicas: most replicas that an expert may have in between.
    """
    state = _State(
        before={move.slot: old[move.slot] for move in moves.moves},
        after={move.slot: move.logical_expert for move in moves.moves},
        replicas=Counter(old),
        slots_per_rank=slots_per_rank,
        max_slots=max_slots,
        max_replicas=max_replicas,
    )
    groups: list[tuple[int, ...]] = []
    while state.before:
        groups.append(state.next_group() or state.next_cycle())
    return tuple(groups)


@attrs.define(kw_only=True)
class _State:
    """What is still to switch, and how many replicas each expert has in force."""

    before: dict[int, int]
    after: dict[int, int]
    replicas: Counter[int]
    slots_per_rank: int
    max_slots: int
    max_replicas: int

    def next_group(self) -> tuple[int, ...]:
        """Slots that can switch one after the other; empty when only cycles are left."""
        group: list[int] = []
        of_rank: Counter[int] = Counter()
        is_stuck = False
        while not is_stuck:
            is_stuck = True
            for slot in list(self.before):
                rank = slot // self.slots_per_rank
                if of_rank[rank] < self.max_slots and self._can_switch(slot):
                    self._take(slot)
                    group.append(slot)
                    of_rank[rank] += 1
                    is_stuck = False
        return tuple(group)

    def next_cycle(self) -> tuple[int, ...]:
        """The shortest way on from the first slot left: whoever gets the expert that it gives up, and so on."""
        target = {expert: slot for slot, expert in self.after.items()}
        slot = next(iter(self.before))
        group = [slot]
        expert = self.before[slot]
        self._take(slot)
        while not self.replicas[expert] and expert in target:
            slot = target[expert]
            expert = self.before[slot]
            group.append(slot)
            self._take(slot)
        if max(self.replicas.values()) > self.max_replicas:
            # What is too many in between is not at the end: all that is left goes at once.
            group += self.before
            for slot in list(self.before):
                self._take(slot)
        return tuple(group)

    def _can_switch(self, slot: int) -> bool:
        return self.replicas[self.before[slot]] > 1 and self.replicas[self.after[slot]] < self.max_replicas

    def _take(self, slot: int) -> None:
        self.replicas[self.before.pop(slot)] -= 1
        self.replicas[self.after.pop(slot)] += 1
