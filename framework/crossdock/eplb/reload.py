"""Experts read from the checkpoint again, under the placement in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from crossdock.types.experts import Experts, ExpertTensors
from crossdock.types.location import PlacementMaps
from crossdock.types.model import ExpertReader


@attrs.frozen(kw_only=True, eq=False)
class ExpertReload:
    """Of one rank. Between two steps: every slot gets the expert that the maps say, in the tensor that it has."""

    reader: ExpertReader
    maps: PlacementMaps
    tensors: Sequence[ExpertTensors]
    """One a MoE layer, in row order."""
    experts: Experts
    ep_rank: int

    def run(self) -> int:
        """Reads everything; returns how many slots were filled.

        Raises:
            CheckpointError, OSError: the checkpoint cannot be read any more. Slots that were filled before keep the new content.
        """
        filled = 0
        for row, layer in enumerate(self.tensors):
            first = self.ep_rank * layer.num_slots
            held: list[int] = self.maps.host.physical_to_logical[row, first : first + layer.num_slots].tolist()
            read: dict[int, Mapping[str, torch.Tensor]] = {}
            for slot, expert in enumerate(held):
                if expert not in read:
                    read[expert] = self.reader.read_expert(row, expert)
                for name, tensor in layer.tensors.items():
                    tensor[slot].copy_(read[expert][name])
            self.experts.refresh(layer.layer, list(range(layer.num_slots)))
            filled += layer.num_slots
        return filled
