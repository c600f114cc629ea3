"""How much memory a process may take, and how a rank holds it: freed blocks stay, and large ones lie on huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 30
"""Blocks below this stay in the heap, and as much of it stays when it is freed."""
_TOP_PAD_BYTES = 64 << 20
HEAP_MARGIN_BYTES = 2 * _TOP_PAD_BYTES
"""The heap grows by more than it must, and as much lies free between its blocks: 3,000 requests of all lengths to the bundled model took a
rank 320 MiB beyond what it had before it was built, 154 of them weights and KV cache and 70 kernels."""
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's own, and that of the layer between it and torch; both hold the same kernels."""
_KEPT_KERNELS = 128
KERNEL_CACHE_BYTES = _KEPT_KERNELS * (600 << 10)
"""540 KiB of code and descriptors each (torch 2.13, AVX-512), and some air."""
_MADV_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2 << 20
_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Limit, use and details of a control group, in versions 2 and 1."""
_CACHES = ("active_file", "inactive_file")


def machine_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that the processes of this machine or container may take in all."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(limit for limit, _ in _group_limits(groups))])


def available_bytes(groups: Path = Path("/sys/fs/cgroup"), memory_info: Path = Path("/proc/meminfo")) -> int:
    """What is left of it now, caches that the system would give up counted as free."""
    left = [limit - used for limit, used in _group_limits(groups)]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = memory_info.read_text(encoding="ascii").splitlines()
        left.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    return max(0, min(left, default=machine_bytes(groups)))


def _group_limits(groups: Path) -> list[tuple[int, int]]:
    """(limit, in use without file caches) of this process's control group, where it has one."""
    found: list[tuple[int, int]] = []
    for limit, used, details in _GROUP_FILES:
        with contextlib.suppress(OSError, ValueError):
            rows = [line.split() for line in (groups / details).read_text(encoding="ascii").splitlines()]
            caches = sum(int(row[1]) for row in rows if row[0] in _CACHES)
            found.append((int((groups / limit).read_text()), int((groups / used).read_text()) - caches))
    return found


def keep_freed_memory() -> bool:
    """Asks glibc to keep freed blocks instead of handing them back to the system; True where it did.

    A forward pass on a CPU allocates and frees the same activations again and again; mapped afresh each time, every page of them costs a
    fault. Measured with torch 2.13 on Zen 4, 1 thread: a norm of 4096 x 512 fp32 takes 1.4 ms instead of 5.6 to 9, gathering the pages
    of 32 decode sequences 0.19 ms instead of 1.3. For the whole process and its life; called once when a rank starts.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another libc, for instance musl
        return False
    settings = ((_M_MMAP_THRESHOLD, _KEPT_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_TOP_PAD, _TOP_PAD_BYTES))
    refused = [option for option, value in settings if not mallopt(ctypes.c_int(option), ctypes.c_int(value))]
    return not refused


def set_aside_built_objects() -> None:
    """Tells Python's garbage collector to look no more at what exists now: modules, weights and graphs stay until the process ends.

    Otherwise a full collection walks over all of it in the middle of a step. For the whole process; called once when a rank is built.
    """
    gc.collect()
    gc.freeze()


def bound_kernel_caches() -> None:
    """Lets oneDNN keep 128 of the kernels that it makes instead of 1024; called once when a rank starts, before its first product.

    Each combination of sizes gets a kernel of its own of half a MiB, and prompts come in every length: a rank of the bundled model grew by
    600 MiB within 400 requests. With 128 the same requests took no more CPU (15.4 s; 18.0 s with 1024, 16.4 s with 64; bf16, Zen 4).
    Both libraries read the environment only, at their first use; what the user has set there stays.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_KEPT_KERNELS))


def advise_huge_pages(address: int, num_bytes: int) -> bool:
    """Asks for 2 MiB pages under a block that was allocated and not written yet; True where the system agreed.

    Weights that are read once a step miss the page tables' cache on every 4 KiB page otherwise. Measured on Zen 4, 1 thread: experts of 8
    decode tokens take 15 to 25 % less time, of 32 tokens 3 to 7 %. Costs at most one page at either end of the block.
    """
    first = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    last = (address + num_bytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if not sys.platform.startswith("linux") or last <= first:
        return False
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return False
    failed: int = madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(_MADV_HUGEPAGE))
    return failed == 0
