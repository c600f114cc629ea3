"""``crossdock bench dispatch`` and ``bench experts``: one part of a MoE layer, without a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from crossdock.bench.jobs import BenchJob, MoeShape
from crossdock.cli.bench_engine import answer, positive
from crossdock.cli.flags import ConfigFlags, whole_number
from crossdock.cli.token_files import check_output
from crossdock.errors import UsageError
from crossdock.launch.rank_logs import set_up_logs

_NO_FLAGS = ConfigFlags()
_WHOLE = Parameter(converter=whole_number)


def bench_dispatch(
    *,
    num_tokens: Annotated[tuple[int, ...], Parameter(negative="")] = (1, 32, 128),
    hidden_size: Annotated[int, _WHOLE] = 512,
    num_experts: Annotated[int, _WHOLE] = 32,
    top_k: Annotated[int, _WHOLE] = 4,
    num_iters: Annotated[int, _WHOLE] = 20,
    num_iters_warmup: Annotated[int, _WHOLE] = 5,
    seed: Annotated[int, _WHOLE] = 0,
    out: Path | None = None,
    flags: ConfigFlags = _NO_FLAGS,
) -> None:
    """Time dispatch and combine of random rows, experts left out; prints a JSON list, one object a number of tokens and protocol.

    The dispatcher, its options, the ranks and the device come from the configuration, as for serve. The slowest rank counts.

    Parameters
    ----------
    num_tokens
        Rows that every rank brings; may be repeated.
    hidden_size
        Elements of a row.
    num_experts
        Experts of all ranks together.
    top_k
        Experts of a row.
    num_iters
        Measured round trips.
    num_iters_warmup
        Round trips before them.
    seed
        Of rows and routing.
    out
        JSON file for the result, instead of standard output.
    """
    shape = MoeShape(hidden_size=hidden_size, num_experts=num_experts, top_k=top_k)
    job = _job("dispatch", flags, shape, num_tokens, num_iters, num_iters_warmup, seed, out)
    from crossdock.bench.dispatch import dispatch_report
    from crossdock.bench.run import run_bench

    answer(dispatch_report(job, run_bench(job)), out)


def bench_experts(
    *,
    num_tokens: Annotated[tuple[int, ...], Parameter(negative="")] = (1, 32, 512),
    hidden_size: Annotated[int, _WHOLE] = 512,
    intermediate_size: Annotated[int, _WHOLE] = 256,
    num_experts: Annotated[int, _WHOLE] = 32,
    top_k: Annotated[int, _WHOLE] = 4,
    weight_dtype: Literal["native", "fp8_block"] = "native",
    num_iters: Annotated[int, _WHOLE] = 20,
    num_iters_warmup: Annotated[int, _WHOLE] = 5,
    seed: Annotated[int, _WHOLE] = 0,
    out: Path | None = None,
    flags: ConfigFlags = _NO_FLAGS,
) -> None:
    """Time the experts of one layer on random rows; prints a JSON list, one object a number of tokens.

    The plugin, its options and the device come from the configuration, as for serve.

    Parameters
    ----------
    num_tokens
        Rows; may be repeated.
    hidden_size
        Elements of a row.
    intermediate_size
        Inner size of an expert.
    num_experts
        Experts of this rank.
    top_k
        Experts of a row, all of them here.
    weight_dtype
        native, or fp8_block for float8 with scales of 128 x 128 blocks.
    num_iters
        Measured calls.
    num_iters_warmup
        Calls before them.
    seed
        Of weights, rows and routing.
    out
        JSON file for the result, instead of standard output.
    """
    positive("--intermediate-size", intermediate_size)
    shape = MoeShape(hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts, top_k=top_k)
    job = _job("experts", flags, shape, num_tokens, num_iters, num_iters_warmup, seed, out, weight_dtype)
    import torch

    from crossdock.bench import experts
    from crossdock.comm import take_device

    take_device(job.config.launch.device, 0)
    answer(experts.bench_experts(job, torch.device(job.config.launch.device)), out)


def _job(
    kind: str,
    flags: ConfigFlags,
    shape: MoeShape,
    num_tokens: tuple[int, ...],
    num_iters: int,
    num_iters_warmup: int,
    seed: int,
    out: Path | None,
    weight_dtype: str = "native",
) -> BenchJob:
    set_up_logs(rank=None, log_file=None, level=logging.WARNING)
    check_output(out)
    for flag, value in (("--hidden-size", shape.hidden_size), ("--top-k", shape.top_k), ("--num-iters", num_iters)):
        positive(flag, value)
    for count in num_tokens:
        positive("--num-tokens", count)
    if shape.top_k > shape.num_experts:
        raise UsageError(f"--top-k {shape.top_k} is more than --num-experts {shape.num_experts}")
    config = flags.load().config
    if kind == "dispatch" and shape.num_experts % config.parallel.ranks:
        raise UsageError(
            f"--num-experts {shape.num_experts} cannot be split over {config.parallel.ranks} ranks; give a multiple of it"
        )
    return BenchJob(
        kind=kind,
        config=config,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        shape=shape,
        num_tokens=num_tokens,
        weight_dtype=weight_dtype,
        seed=seed,
    )
