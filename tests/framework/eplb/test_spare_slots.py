"""A slot's tensors as bytes, and the copy from spare to live slots."""

from __future__ import annotations

import pytest
import torch
from crossdock.eplb.spare_slots import SpareSlots, read_bytes, slot_bytes, write_bytes
from crossdock.errors import MisuseError
from crossdock.testing.rebalance_rig import layer_tensors


@pytest.mark.parametrize("part", [1, 3, 50, 1000])
def test_parts_of_any_size_put_together_are_the_slot(part: int) -> None:
    source, target = (dict(layer_tensors(1, experts).tensors) for experts in ([4, 5], [0, 1]))
    total = slot_bytes(source)
    for begin in range(0, total, part):
        write_bytes(target, 0, begin, read_bytes(source, 1, begin, min(begin + part, total)))
    for name, tensor in target.items():
        assert torch.equal(tensor[0].view(torch.uint8), source[name][1].view(torch.uint8))
        assert torch.equal(tensor[1].view(torch.uint8), layer_tensors(1, [1]).tensors[name][0].view(torch.uint8))


def test_a_slot_that_does_not_lie_in_one_piece_is_read_all_the_same() -> None:
    strided = torch.arange(24.0).view(2, 4, 3).transpose(1, 2)
    assert not strided[0].is_contiguous()
    data = read_bytes({"w": strided}, 1, 0, 48)
    assert torch.equal(data.view(torch.float32).view(3, 4), strided[1])


def test_spare_slots_overwrite_live_ones_in_place() -> None:
    live = dict(layer_tensors(0, [0, 1, 2]).tensors)
    addresses = [tensor.data_ptr() for tensor in live.values()]
    spare = SpareSlots([live])
    for slot, expert in enumerate([7, 6, 5]):
        content = dict(layer_tensors(0, [expert]).tensors)
        spare.write(slot, 0, read_bytes(content, 0, 0, slot_bytes(content)))
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
