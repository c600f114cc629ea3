"""Where a layer's new experts wait for the switch, and a slot's tensors as bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from crossdock.errors import MisuseError
from crossdock.types.experts import ExpertTensors


def slot_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of one slot over all tensors of a layer."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors.values())


class SpareSlots:
    """One spare slot for each local slot of one layer; reused for every layer, so the memory is that of one layer."""

    def __init__(
        self,
        layers: Sequence[Mapping[str, torch.Tensor]],
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """Made for the tensors of all layers, which must be alike.

        Args:
            layers: tensors of each layer by name.
            allocate: gives uint8 [n] for n bytes; None: any memory beside those tensors.

        Raises:
            MisuseError: a layer has tensors of another name, shape or dtype.
        """
        forms = [{name: (tuple(t.shape), t.dtype) for name, t in sorted(layer.items())} for layer in layers]
        for row, form in enumerate(forms):
            if form != forms[0]:
                raise MisuseError(f"expert tensors of MoE layer {row} are {form}, those of layer 0 {forms[0]}")
        self._form = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in layers[0].items()}
        device = next(iter(layers[0].values())).device
        num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._form.values())
        self.memory = (
            torch.empty(num_bytes, dtype=torch.uint8, device=device) if allocate is None else allocate(num_bytes)
        )
        self._tensors = self._laid_over(self.memory)
        self.slots = SlotBytes(self._tensors)
        """To be written."""

    def move_to(self, memory: torch.Tensor) -> None:
        """Takes other memory, uint8 [total_bytes], and forgets what lay in the slots."""
        self.memory = memory
        self._tensors = self._laid_over(memory)
        self.slots = SlotBytes(self._tensors)

    def peer(self, memory: torch.Tensor) -> SlotBytes:
        """The spare slots of another rank, whose ``memory`` can be written from here."""
        return SlotBytes(self._laid_over(memory))

    def _laid_over(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of flat memory, one behind the other; widest elements first, so that all are aligned without gaps."""
        tensors: dict[str, torch.Tensor] = {}
        begin = 0
        for name, (shape, dtype) in sorted(self._form.items(), key=lambda one: -one[1][1].itemsize):
            end = begin + math.prod(shape) * dtype.itemsize
            tensors[name] = memory[begin:end].view(dtype).view(shape)
            begin = end
        return tensors

    @property
    def total_bytes(self) -> int:
        return self.memory.numel()

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self._tensors)

    def read(self, name: str, slot: int) -> torch.Tensor:
        """The tensor ``name`` of a spare slot."""
        return self._tensors[name][slot]

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


class SlotBytes:
    """The tensors of each slot laid end to end, in the order of their names, to be read and written as bytes. Made once for many chunks."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors``: by name, dim 0 = slot."""
        self._tensors = [tensors[name] for name in sorted(tensors)]
        self._flat = [
            tensor.view(tensor.shape[0], -1).view(torch.uint8) if tensor.is_contiguous() else None
            for tensor in self._tensors
        ]

    def parts(self, slot: int, begin: int, end: int) -> list[torch.Tensor]:
        """uint8 views of bytes ``begin`` to ``end - 1`` of a slot.

        A slot that does not lie in one piece is copied first, so it can be read this way and not written.
        """
        found: list[torch.Tensor] = []
        start = 0
        for tensor, flat in zip(self._tensors, self._flat, strict=True):
            size = tensor[0].numel() * tensor.element_size() if flat is None else flat.shape[1]
            low, high = max(begin - start, 0), min(end - start, size)
            start += size
            if low >= high:
                continue
            row = tensor[slot].contiguous().view(-1).view(torch.uint8) if flat is None else flat[slot]
            found.append(row if high - low == size else row[low:high])
        return found
