"""NVIDIA's compute-sanitizer over the tests of every Triton and Gluon kernel: accesses out of bounds (memcheck), races in shared memory
(racecheck), barriers that not all threads reach (synccheck).

    python tests/benchmarks/gpu/sanitize.py --out FOLDER [--tool memcheck|racecheck|synccheck|initcheck] [--keep EXPRESSION] [FILE ...]

One process a test file, all at once. Each tensor is an allocation of its own, so that a byte past its end is found and not taken for a
neighbour's; only our kernels are watched, by their names. Left out are tests in which kernels wait for one another: under the tool launches
come one after the other. Ends with 1 when an error was found or a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

FILES = (
    "tests/plugins/dispatchers/nvlink/test_nvlink_kernels.py",
    "tests/plugins/models/experts/triton/test_triton_experts_kernels.py",
    "tests/plugins/models/experts/triton/test_hopper_products.py",
    "tests/plugins/models/experts/triton/test_fp8_products.py",
    "tests/plugins/models/experts/deep_gemm/test_deep_gemm_kernels.py",
    "tests/plugins/attention/triton/test_triton_attention_kernels.py",
    "tests/plugins/attention/triton/test_prefill_ahead.py",
    "tests/plugins/eplb_algos/_shared/test_copy_ends.py",
    "tests/plugins/eplb_algos/_shared/test_water_fill.py",
    "tests/framework/ops/test_fused_ops.py",
    "tests/framework/ops/test_topk_routing.py",
    "tests/framework/ops/test_unpack_step.py",
    "tests/framework/ops/test_fp8_linear.py",
    "tests/framework/ops/test_quantise_rows.py",
)
WAITING = "not same_time and not capture and not graph"
"""Kernels that spin until another has run, and captures, which allocations of their own (no caching) do not allow."""
MANGLED = "kns=_ZN"
"""In the names of C++ kernels; Triton's are those of the functions."""
LOCATIONS = (Path("/usr/local/cuda/bin/compute-sanitizer"),)


@attrs.frozen(kw_only=True)
class Finding:
    """What one file's run came to."""

    file: str
    errors: int
    """As the tool counts them; -1 where it said nothing."""
    tests: str
    """Last line of pytest."""
    exit_code: int


def sanitizer() -> str:
    """Path of the tool."""
    found = shutil.which("compute-sanitizer") or next((str(path) for path in LOCATIONS if path.exists()), None)
    if found is None:
        raise SystemExit("compute-sanitizer is not installed; it is part of the CUDA toolkit (cuda-sanitizer-api)")
    return found


def started(file: str, tool: str, keep: str, out: Path) -> subprocess.Popen[bytes]:
    """The tool over one file, writing to ``out``. torch's own kernels are loaded when they are needed: all of them at once took most of the time."""
    name = Path(file).stem
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "9", "--kernel-name-exclude", MANGLED]
    command += ["--max-connections", "64", "--launch-timeout", "60"]
    command += ["--log-file", str(out / f"{name}.{tool}.txt"), sys.executable, "-m", "pytest", "-q", "-W", "ignore"]
    command += ["-p", "no:cacheprovider", "--maxfail", "5", "--timeout", "0", "-k", keep, file]
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1", CUDA_MODULE_LOADING="LAZY")
    with open(out / f"{name}.{tool}.pytest.txt", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def finding(file: str, tool: str, out: Path, exit_code: int) -> Finding:
    """Reads back what the tool and pytest wrote."""
    name = Path(file).stem
    log = out / f"{name}.{tool}.txt"
    text = log.read_text(encoding="utf8", errors="replace") if log.exists() else ""
    counts = [int(count) for count in re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)]
    lines = (out / f"{name}.{tool}.pytest.txt").read_text(encoding="utf8", errors="replace").strip().splitlines()
    return Finding(file=file, errors=max(counts, default=-1), tests=lines[-1] if lines else "", exit_code=exit_code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "synccheck", "initcheck"))
    parser.add_argument("--keep", default=WAITING, help="pytest's -k")
    parser.add_argument("files", nargs="*", default=list(FILES))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs = [(file, started(file, arguments.tool, arguments.keep, arguments.out)) for file in arguments.files]
    found = [finding(file, arguments.tool, arguments.out, run.wait()) for file, run in runs]
    for one in found:
        print(f"{arguments.tool} {one.file}: {one.errors} errors, exit {one.exit_code}; {one.tests}", flush=True)
    sys.exit(int(any(one.exit_code for one in found)))


if __name__ == "__main__":
    main()
