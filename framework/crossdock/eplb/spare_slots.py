"""Where a layer's new experts wait for the switch, and a slot's tensors as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from crossdock.errors import MisuseError
from crossdock.types.experts import ExpertTensors


def slot_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of one slot over all tensors of a layer."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors.values())


class SpareSlots:
    """One spare slot for each local slot of one layer; reused for every layer, so the memory is that of one layer."""

    def __init__(self, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Made for the tensors of all layers, which must be alike.

        Raises:
            MisuseError: a layer has tensors of another name, shape or dtype.
        """
        forms = [{name: (tuple(t.shape), t.dtype) for name, t in sorted(layer.items())} for layer in layers]
        for row, form in enumerate(forms):
            if form != forms[0]:
                raise MisuseError(f"expert tensors of MoE layer {row} are {form}, those of layer 0 {forms[0]}")
        self._tensors = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            for name, tensor in layers[0].items()
        }

    @property
    def total_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self._tensors)

    def read(self, name: str, slot: int) -> torch.Tensor:
        """The tensor ``name`` of a spare slot."""
        return self._tensors[name][slot]

    def write(self, slot: int, begin: int, data: torch.Tensor) -> None:
        """Puts uint8 ``data`` [n] at byte ``begin`` of a spare slot."""
        write_bytes(self._tensors, slot, begin, data)

    def fill(self, slot: int, content: Mapping[str, torch.Tensor]) -> None:
        """Puts a whole expert, tensors by name, into a spare slot."""
        for name, tensor in content.items():
            self._tensors[name][slot].copy_(tensor)

    def copy_to(self, live: Mapping[str, torch.Tensor], sources: Mapping[int, int]) -> None:
        """Overwrites live slots in place; ``sources`` says which spare slot each local slot takes."""
        if not sources:
            return
        slots, spares = list(sources), list(sources.values())
        for name, tensor in live.items():
            spare = self._tensors[name]
            if slots == spares and len(slots) == tensor.shape[0]:
                tensor.copy_(spare)
                continue
            for slot, source in sources.items():
                tensor[slot].copy_(spare[source])


def moved_tensors(tensors: ExpertTensors, canary: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Everything that moves with the experts of a layer, by name: all of ``tensors``, and the canary where there is one."""
    moved = dict(tensors.tensors)
    if canary is not None:
        moved[CANARY] = canary
    return moved


CANARY = "canary"
"""Name of the tensor of expert numbers that travels along in debug mode."""


def read_bytes(tensors: Mapping[str, torch.Tensor], slot: int, begin: int, end: int) -> torch.Tensor:
    """Bytes ``begin`` to ``end - 1`` of a slot's tensors, laid end to end in the order of their names; a copy."""
    parts: list[torch.Tensor] = []
    for view, start in _views(tensors, slot):
        low, high = max(begin - start, 0), min(end - start, view.shape[0])
        if low < high:
            parts.append(view[low:high])
    return torch.cat(parts)


def write_bytes(tensors: Mapping[str, torch.Tensor], slot: int, begin: int, data: torch.Tensor) -> None:
    """The opposite of ``read_bytes``, into contiguous tensors."""
    end = begin + data.shape[0]
    for view, start in _views(tensors, slot):
        low, high = max(begin - start, 0), min(end - start, view.shape[0])
        if low < high:
            view[low:high] = data[start + low - begin : start + high - begin]


def _views(tensors: Mapping[str, torch.Tensor], slot: int) -> list[tuple[torch.Tensor, int]]:
    """Flat uint8 views (copies where a slot is not contiguous) with the place where each begins."""
    views: list[tuple[torch.Tensor, int]] = []
    start = 0
    for name in sorted(tensors):
        view = tensors[name][slot].contiguous().view(-1).view(torch.uint8)
        views.append((view, start))
        start += view.shape[0]
    return views
