"""A slot's tensors as bytes, and the copy from spare to live slots."""

from __future__ import annotations

import pytest
import torch
from crossdock.eplb.spare_slots import SlotBytes, SpareSlots, slot_bytes
from crossdock.errors import MisuseError
from crossdock.testing.rebalance_rig import layer_tensors


@pytest.mark.parametrize("part", [1, 3, 50, 1000])
def test_parts_of_any_size_put_together_are_the_slot(part: int) -> None:
    source, target = (dict(layer_tensors(1, experts).tensors) for experts in ([4, 5], [0, 1]))
    total = slot_bytes(source)
    for begin in range(0, total, part):
        end = min(begin + part, total)
        for into, out in zip(
            SlotBytes(target).parts(0, begin, end), SlotBytes(source).parts(1, begin, end), strict=True
        ):
            into.copy_(out)
    for name, tensor in target.items():
        assert torch.equal(tensor[0].view(torch.uint8), source[name][1].view(torch.uint8))
        assert torch.equal(tensor[1].view(torch.uint8), layer_tensors(1, [1]).tensors[name][0].view(torch.uint8))


def test_a_slot_that_does_not_lie_in_one_piece_is_read_all_the_same() -> None:
    strided = torch.arange(24.0).view(2, 4, 3).transpose(1, 2)
    assert not strided[0].is_contiguous()
    (data,) = SlotBytes({"w": strided}).parts(1, 0, 48)
    assert torch.equal(data.view(torch.float32).view(3, 4), strided[1])


def test_spare_slots_overwrite_live_ones_in_place() -> None:
    live = dict(layer_tensors(0, [0, 1, 2]).tensors)
    addresses = [tensor.data_ptr() for tensor in live.values()]
    spare = SpareSlots([live])
    for slot, expert in enumerate([7, 6, 5]):
        content = dict(layer_tensors(0, [expert]).tensors)
        end = slot_bytes(content)
        for into, out in zip(spare.slots.parts(slot, 0, end), SlotBytes(content).parts(0, 0, end), strict=True):
            into.copy_(out)
    spare.copy_to(live, {2: 0, 0: 0})
    for name, tensor in layer_tensors(0, [7, 1, 7]).tensors.items():
        assert torch.equal(live[name].view(torch.uint8), tensor.view(torch.uint8))
    spare.copy_to(live, {0: 0, 1: 1, 2: 2})
    for name, tensor in layer_tensors(0, [7, 6, 5]).tensors.items():
        assert torch.equal(live[name].view(torch.uint8), tensor.view(torch.uint8))
    assert addresses == [tensor.data_ptr() for tensor in live.values()]


def test_layers_that_are_not_alike_are_refused() -> None:
    with pytest.raises(MisuseError, match="expert tensors of MoE layer 1"):
        SpareSlots([{"w": torch.zeros(2, 3)}, {"w": torch.zeros(2, 4)}])


def test_the_slots_of_another_rank_are_laid_out_like_the_own_ones() -> None:
    live = dict(layer_tensors(0, [3, 4]).tensors)
    spare = SpareSlots([live], lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    other = torch.zeros_like(spare.memory)
    end = slot_bytes(live)
    for into, out in zip(spare.peer(other).parts(1, 0, end), SlotBytes(live).parts(0, 0, end), strict=True):
        into.copy_(out)
    spare.memory.copy_(other)
    for name, tensor in live.items():
        assert torch.equal(spare.read(name, 1).view(torch.uint8), tensor[0].view(torch.uint8))
    assert spare.total_bytes == 2 * slot_bytes(live)
