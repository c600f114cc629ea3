"""Keeping freed memory is safe to ask for, and works where there is a glibc."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys

import pytest
import torch
from crossdock.host_memory import (
    KERNEL_CACHE_BYTES,
    advise_huge_pages,
    bound_kernel_caches,
    set_aside_built_objects,
)

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

KERNELS = """
import ctypes, torch
from crossdock.host_memory import bound_kernel_caches
torch.set_num_threads(1)
class Information(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used f g".split()]
ask = getattr(ctypes.CDLL(None), "mallinfo2", Information)
ask.restype = Information
def used_bytes():
    information = ask()
    return information.used + information.mapped
{bound}
matrix = torch.ones(1, 64, 256, dtype=torch.bfloat16)
torch.bmm(matrix.transpose(1, 2), matrix)
before = used_bytes()
for rows in range(1, 400):
    torch.bmm(torch.ones(1, rows, 64, dtype=torch.bfloat16), matrix)
print(used_bytes() - before)
"""


def grown_bytes(bound: str) -> int:
    code = KERNELS.format(bound=bound)
    clean = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60, env=clean
    )
    return int(ran.stdout)


def test_products_of_many_sizes_keep_no_more_kernels_than_the_plan_counts() -> None:
    bounded = grown_bytes("bound_kernel_caches()")
    assert bounded <= KERNEL_CACHE_BYTES
    # The tried limit is the reason for it: oneDNN keeps them all where it has kernels for this processor.
    assert bounded <= grown_bytes("")


def test_what_the_user_has_set_for_the_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    bound_kernel_caches()
    assert (os.environ["LRU_CACHE_CAPACITY"], os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("7", "128")


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
