"""Facts about this environment for ``crossdock env``: versions, devices, and what to install for the optional plugins."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from typing import Any

import attrs

from crossdock.native_code import native_code
from crossdock.observe.receipt import package_versions


@attrs.frozen(kw_only=True)
class OptionalWheel:
    """A distribution that provides an optional module, and the releases of torch that its binary fits.

    Both were run on two H200s. Newer releases of the same names have symbols that torch 2.11 and its NCCL lack.
    """

    module: str
    extra: str
    requirement: str
    torch_minor: str
    python_tag: str = "cp312"


OPTIONAL_WHEELS = (
    OptionalWheel(
        module="deep_ep", extra="deepep", requirement="tokenspeed-deepep==1.2.1.post20251110", torch_minor="2.11"
    ),
    OptionalWheel(module="deep_gemm", extra="deepgemm", requirement="sgl-deep-gemm==0.1.5", torch_minor="2.11"),
)


def environment_report() -> Mapping[str, Mapping[str, Any]]:
    """Sections of names and values; imports torch, because only torch knows what it was built with."""
    return {
        "versions": package_versions(),
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "processor": platform.machine(),
            "cpu_kernels": _cpu_kernels(),
        },
        "torch": _torch_facts(),
        "optional": {wheel.module: _wheel_advice(wheel) for wheel in OPTIONAL_WHEELS},
    }


def _cpu_kernels() -> str:
    code = native_code()
    return code.reason if code.library else f"absent, torch operators run instead and are slower: {code.reason}"


def _torch_facts() -> dict[str, Any]:
    import torch
    import torch.distributed

    cuda: Any = torch.cuda
    facts: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "cuda": cuda.is_available(),
    }
    if facts["nccl"]:
        facts["nccl_version"] = ".".join(map(str, cuda.nccl.version()))
    if facts["cuda"]:
        facts["cuda_runtime"] = torch.version.cuda
        for index in range(cuda.device_count()):
            properties = cuda.get_device_properties(index)
            facts[f"gpu_{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return facts


def _wheel_advice(wheel: OptionalWheel) -> str:
    if importlib.util.find_spec(wheel.module) is not None:
        return "installed"
    torch_version = importlib.metadata.version("torch")
    python_tag = "cp" + "".join(platform.python_version_tuple()[:2])
    obstacles: list[str] = []
    if not torch_version.startswith(f"{wheel.torch_minor}."):
        obstacles.append(f"it needs torch {wheel.torch_minor}, found {torch_version}")
    if python_tag != wheel.python_tag:
        obstacles.append(f"it needs Python {wheel.python_tag}, found {python_tag}")
    if "+cpu" in torch_version:
        obstacles.append("it needs a CUDA build of torch")
    command = f"pip install 'crossdock[{wheel.extra}]' ({wheel.requirement})"
    return f"{command}: {'; '.join(obstacles)}" if obstacles else f"fits, install it with {command}"
