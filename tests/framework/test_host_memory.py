"""Keeping freed memory is safe to ask for, and works where there is a glibc."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys

import torch
from crossdock.host_memory import advise_huge_pages, set_aside_built_objects

CODE = """
import resource, torch
from crossdock.host_memory import keep_freed_memory
assert keep_freed_memory() is {expected}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    for _ in range(20):
        torch.zeros(4 << 20)
work()
before = faults()
work()
print(faults() - before)
"""


def test_a_freed_block_is_used_again_without_page_faults() -> None:
    expected = platform.libc_ver()[0] == "glibc"
    code = CODE.format(expected=expected)
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    if expected:
        assert int(output) < 2000, "20 blocks of 16 MiB mapped afresh would take 4096 faults each"


def test_asking_for_huge_pages_changes_no_value_and_small_blocks_are_left_alone() -> None:
    block = torch.empty(8 << 20, dtype=torch.uint8)
    advise_huge_pages(block.data_ptr(), block.numel())
    block.fill_(3)
    assert int(block.sum()) == 3 * block.numel()
    small = torch.zeros(16)
    assert not advise_huge_pages(small.data_ptr(), 64)


def test_what_was_built_is_no_longer_walked_over_and_later_garbage_still_is() -> None:
    built: list[list[int]] = [[] for _ in range(1000)]
    set_aside_built_objects()
    try:
        later: list[object] = []
        watched = {id(entry) for entry in gc.get_objects()}
        assert id(built) not in watched and id(later) in watched
    finally:
        gc.unfreeze()
