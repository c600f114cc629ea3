"""What a benchmark measures: plain data that rank processes read, and what each of them found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import msgspec

from crossdock.config import Config
from crossdock.errors import RuntimeFault

_JOB_FILE = "bench.json"


@attrs.frozen(kw_only=True)
class MoeShape:
    """A MoE layer without a checkpoint."""

    hidden_size: int = 512
    intermediate_size: int = 256
    num_experts: int = 32
    top_k: int = 4


@attrs.frozen(kw_only=True)
class BenchJob:
    """One benchmark of the configured selection."""

    kind: str
    """``dispatch``, ``experts`` or ``engine``."""
    config: Config
    num_iters: int
    num_iters_warmup: int
    shape: MoeShape = MoeShape()
    num_tokens: tuple[int, ...] = ()
    """Rows a rank, one measurement each (``dispatch``, ``experts``)."""
    weight_dtype: str = "native"
    """Form of the weights (``experts``)."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Of all replicas together (``engine``); empty: random ones of ``num_prompts`` and ``input_len``."""
    num_prompts: int = 0
    input_len: int = 0
    output_len: int = 0
    seed: int = 0


def write_bench_job(folder: Path, job: BenchJob) -> None:
    """Hands a job to rank processes."""
    (folder / _JOB_FILE).write_bytes(msgspec.json.encode(job))


def read_bench_job(folder: Path) -> BenchJob:
    """The job of ``write_bench_job``."""
    return msgspec.json.decode((folder / _JOB_FILE).read_bytes(), type=BenchJob)


def write_found(folder: Path, rank: int, found: dict[str, Any]) -> None:
    """Hands back what a rank found."""
    (folder / f"found_{rank}.json").write_bytes(msgspec.json.encode(found))


def read_found(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What every rank found, in rank order.

    Raises:
        RuntimeFault: a rank left nothing although it ended well.
    """
    found: list[dict[str, Any]] = []
    for rank in range(ranks):
        path = folder / f"found_{rank}.json"
        if not path.exists():
            raise RuntimeFault(f"rank {rank} ended without results; see its log")
        found.append(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    return found
