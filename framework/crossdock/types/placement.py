"""Where experts live: topology, placement, load, and the planner protocol (DESIGN section 10).

Arrays are host arrays (numpy). L MoE layers, E logical experts, P slots (physical experts), G GPUs, X replica list width.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from crossdock.errors import ConfigValueError, InvalidPlacement
from crossdock.types.placement_checks import check_lists, check_replicas, check_slots


@attrs.frozen(kw_only=True)
class Topology:
    """GPUs, nodes and slots that a placement is made for.

    Raises:
        ConfigValueError: a count is below 1, slots do not divide over GPUs, GPUs do not divide over nodes, or nobody is alive.
    """

    num_gpus: int
    num_nodes: int
    num_physical_experts: int
    """Slots over all GPUs; slot s lives on GPU s // (num_physical_experts // num_gpus)."""
    num_groups: int = 1
    """Expert groups of the model's router; experts of a group have neighbouring numbers."""
    active_gpus: tuple[bool, ...] | None = None
    """False for a dead GPU; None when all are alive."""

    def __attrs_post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("num_gpus", "num_nodes", "num_physical_experts", "num_groups")}
        wrong = {name: count for name, count in counts.items() if not isinstance(count, (int, np.integer))}
        problems = [f"topology {name}: must be an integer, found {count!r}" for name, count in wrong.items()]
        few = [name for name in counts if name not in wrong and counts[name] < 1]
        problems += [f"topology {name}: must be at least 1, found {counts[name]}" for name in few]
        if not problems and self.num_physical_experts % self.num_gpus:
            smallest = -(-self.num_physical_experts // self.num_gpus) * self.num_gpus
            problems.append(
                f"topology num_physical_experts: {self.num_physical_experts} slots do not divide over {self.num_gpus} GPUs;"
                f" take {smallest} slots ({smallest - self.num_physical_experts} redundant experts more)"
            )
        if not problems and self.num_gpus % self.num_nodes:
            problems.append(f"topology num_nodes: {self.num_gpus} GPUs do not divide over {self.num_nodes} nodes")
        if self.active_gpus is not None and len(self.active_gpus) != self.num_gpus:
            problems.append(f"topology active_gpus: {len(self.active_gpus)} entries for {self.num_gpus} GPUs")
        elif self.active_gpus is not None and not any(self.active_gpus):
            problems.append("topology active_gpus: no GPU is alive")
        if problems:
            raise ConfigValueError(problems)

    @property
    def slots_per_gpu(self) -> int:
        return self.num_physical_experts // self.num_gpus

    @property
    def gpus_per_node(self) -> int:
        return self.num_gpus // self.num_nodes

    @property
    def num_active_gpus(self) -> int:
        return self.num_gpus if self.active_gpus is None else sum(self.active_gpus)

    @property
    def active_slots(self) -> npt.NDArray[np.bool_]:
        """[P]: False for the slots of dead GPUs."""
        active = np.ones(self.num_gpus, dtype=np.bool_) if self.active_gpus is None else np.array(self.active_gpus)
        return np.repeat(active, self.slots_per_gpu)


MOST_TOKENS = float(2**53)
"""Above this a float is no exact count, and sums may overflow."""


def _as_counts(counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    try:
        array = np.asarray(counts)
        if array.dtype.kind not in "biufO":
            raise TypeError(f"found {array.dtype}")
        array = array.astype(np.float64, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigValueError([f"load: expected numbers, in rows of equal length; {error}"]) from error
    return array[None] if array.ndim == 2 else array


def _as_slots(slots: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """[L, P] copy; floats where they are whole."""
    try:
        array = np.array(slots, ndmin=2)
        with np.errstate(invalid="ignore"):
            whole = array.astype(np.int64)
        if array.dtype.kind not in "iu" and not (array.dtype.kind == "f" and (whole == array).all()):
            raise TypeError(f"found {array.dtype}")
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidPlacement(
            f"slots: expected the integers of logical experts, in rows of equal length; {error}"
        ) from error
    return whole


@attrs.frozen(kw_only=True, eq=False)
class ExpertLoad:
    """Tokens routed to each logical expert: ``counts`` [steps, layers, logical experts] float64; [layers, experts] is one step.

    Raises:
        ConfigValueError: another shape, nothing in it, or a count that is negative, NaN, infinite or above 2^53 (the first is named).
    """

    counts: npt.NDArray[np.float64] = attrs.field(converter=_as_counts)

    def __attrs_post_init__(self) -> None:
        shape = self.counts.shape
        if len(shape) != 3 or 0 in shape:
            raise ConfigValueError(
                [f"load: expected [steps, layers, experts] with no empty axis, found shape {list(shape)}"]
            )
        # One pass for the usual case: NaN, infinite, negative and absurd counts all fail it.
        if not (self.counts.min() >= 0 and self.counts.max() <= MOST_TOKENS):
            wrong = ~((self.counts >= 0) & (self.counts <= MOST_TOKENS))
            step, layer, expert = (int(axis[0]) for axis in np.nonzero(wrong))
            raise ConfigValueError(
                [
                    f"load: {int(wrong.sum())} counts are negative, not finite or above 2^53, the first at step {step}, layer {layer},"
                    f" expert {expert}: {self.counts[step, layer, expert]}"
                ]
            )

    @property
    def num_layers(self) -> int:
        return int(self.counts.shape[1])

    @property
    def num_logical_experts(self) -> int:
        return int(self.counts.shape[2])

    @property
    def total(self) -> npt.NDArray[np.float64]:
        """[L, E]: counts summed over the steps."""
        total: npt.NDArray[np.float64] = self.counts[0] if len(self.counts) == 1 else self.counts.sum(axis=0)
        return total


@attrs.frozen(kw_only=True, eq=False)
class Placement:
    """Slots of every layer. Build one with ``Placement.from_physical``.

    Raises:
        InvalidPlacement: a shape does not fit, an expert has no replica, or the three arrays contradict each other.
    """

    physical_to_logical: npt.NDArray[np.int64]
    """[L, P]. A slot of a dead GPU holds a valid expert number too, but is in no replica list."""
    logical_to_physical: npt.NDArray[np.int64]
    """[L, E, X] replicas in slot order, padded with -1."""
    replica_counts: npt.NDArray[np.int64]
    """[L, E]."""
    notes: tuple[str, ...] = ()
    """What a planner did differently from what was asked, one sentence each."""
    are_derived: bool = attrs.field(default=False, repr=False)
    """The second and third array were made from the first by ``from_physical``: they cannot contradict it and are not compared."""

    def __attrs_post_init__(self) -> None:
        if self.are_derived:
            return
        slots, lists, counts = self.physical_to_logical, self.logical_to_physical, self.replica_counts
        if slots.ndim != 2 or lists.ndim != 3 or counts.shape != lists.shape[:2] or len(slots) != len(counts):
            raise InvalidPlacement(
                f"shapes must be [L, P], [L, E, X] and [L, E], found {list(slots.shape)}, {list(lists.shape)},"
                f" {list(counts.shape)}"
            )
        check_slots(slots, counts.shape[1])
        check_replicas(counts)
        if counts.max(initial=1) > lists.shape[2]:
            raise InvalidPlacement(f"an expert has {int(counts.max())} replicas, the lists hold {lists.shape[2]}")
        check_lists(slots, lists, counts)

    @classmethod
    def from_physical(
        cls,
        physical_to_logical: npt.ArrayLike,
        num_logical_experts: int,
        *,
        max_replicas: int | None = None,
        active_slots: npt.NDArray[np.bool_] | None = None,
        notes: tuple[str, ...] = (),
    ) -> Placement:
        """The placement of a slot map [L, P].

        Args:
            num_logical_experts: E.
            max_replicas: X; P - E + 1, the most that is possible, when None.
            active_slots: [P]; slots where it is False are in no replica list (dead GPUs).
            notes: see the field.
        """
        slots = _as_slots(physical_to_logical)
        check_slots(slots, num_logical_experts)
        num_layers, num_slots = slots.shape
        if num_logical_experts > num_slots:
            # Before anything of that size is made.
            missing = int(np.setdiff1d(np.arange(num_slots + 1, dtype=np.int64), slots[0])[0])
            raise InvalidPlacement(
                f"layer 0: logical expert {missing} has no replica: {num_slots} slots cannot hold {num_logical_experts} experts"
            )
        width = num_slots - num_logical_experts + 1 if max_replicas is None else max_replicas
        live = np.arange(num_slots, dtype=np.int64) if active_slots is None else np.flatnonzero(active_slots)
        held = slots[:, live]
        flat = np.arange(num_layers, dtype=np.int64)[:, None] * num_logical_experts + held
        counts = np.bincount(flat.ravel(), minlength=num_layers * num_logical_experts)
        check_replicas(counts.reshape(num_layers, num_logical_experts))
        if counts.max(initial=0) > width:
            raise InvalidPlacement(f"an expert has {int(counts.max())} replicas, at most {width} are allowed")
        # Stable, so that slots of an expert stay in order; a narrow type lets numpy sort by radix.
        order = np.argsort(held.astype(np.int16 if num_logical_experts < 2**15 else np.int64), axis=1, kind="stable")
        first = np.repeat(np.cumsum(counts) - counts, counts)
        row = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
        lists = np.full((counts.size, width), -1, dtype=np.int64)
        lists[row, np.arange(row.size, dtype=np.int64) - first] = live[order].ravel()
        return cls(
            physical_to_logical=slots,
            logical_to_physical=lists.reshape(num_layers, num_logical_experts, width),
            replica_counts=counts.reshape(num_layers, num_logical_experts),
            notes=notes,
            are_derived=True,
        )

    @property
    def num_layers(self) -> int:
        return int(self.physical_to_logical.shape[0])

    @property
    def num_physical_experts(self) -> int:
        return int(self.physical_to_logical.shape[1])

    @property
    def num_logical_experts(self) -> int:
        return int(self.replica_counts.shape[1])


class EplbAlgo(Protocol):
    """A placement planner."""

    def plan(self, load: ExpertLoad, topology: Topology, current: Placement | None) -> Placement:
        """A valid placement for this load; deterministic, one thread, no collective."""
        ...
