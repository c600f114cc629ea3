"""``crossdock bench latency`` and ``bench throughput``: the engine without HTTP."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from crossdock.bench.jobs import BenchJob
from crossdock.cli.flags import ConfigFlags, whole_number
from crossdock.cli.token_files import check_output, write_json
from crossdock.errors import UsageError
from crossdock.launch.rank_logs import set_up_logs

_NO_FLAGS = ConfigFlags()
_WHOLE = Parameter(converter=whole_number)


def bench_latency(
    model: Path | None = None,
    /,
    *,
    batch_size: Annotated[int, _WHOLE] = 8,
    input_len: Annotated[int, _WHOLE] = 32,
    output_len: Annotated[int, _WHOLE] = 128,
    num_iters: Annotated[int, _WHOLE] = 10,
    num_iters_warmup: Annotated[int, _WHOLE] = 3,
    seed: Annotated[int, _WHOLE] = 0,
    out: Path | None = None,
    flags: ConfigFlags = _NO_FLAGS,
) -> None:
    """Time a batch of equal requests from its start to its last token, greedy, ends of text ignored; prints JSON.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint; without it the bundled crossdock-mini.
    batch_size
        Requests of all replicas together.
    input_len
        Tokens of each prompt.
    output_len
        Tokens to generate for each.
    num_iters
        Measured rounds.
    num_iters_warmup
        Rounds before them.
    seed
        Of the prompts.
    out
        JSON file for the result, instead of standard output.
    """
    from crossdock.bench.engine import latency_report

    job, found = _run(model, flags, batch_size, input_len, output_len, num_iters, num_iters_warmup, seed, out)
    answer(latency_report(job, found), out)


def bench_throughput(
    model: Path | None = None,
    /,
    *,
    num_prompts: Annotated[int, _WHOLE] = 64,
    input_len: Annotated[int, _WHOLE] = 128,
    output_len: Annotated[int, _WHOLE] = 64,
    num_iters: Annotated[int, _WHOLE] = 1,
    num_iters_warmup: Annotated[int, _WHOLE] = 1,
    seed: Annotated[int, _WHOLE] = 0,
    out: Path | None = None,
    flags: ConfigFlags = _NO_FLAGS,
) -> None:
    """Tokens a second of many requests that are all there from the start, greedy, ends of text ignored; prints JSON.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint; without it the bundled crossdock-mini.
    num_prompts
        Requests of all replicas together.
    input_len
        Tokens of each prompt.
    output_len
        Tokens to generate for each.
    num_iters
        Measured rounds; the median counts.
    num_iters_warmup
        Rounds before them.
    seed
        Of the prompts.
    out
        JSON file for the result, instead of standard output.
    """
    from crossdock.bench.engine import throughput_report

    job, found = _run(model, flags, num_prompts, input_len, output_len, num_iters, num_iters_warmup, seed, out)
    answer(throughput_report(job, found), out)


def _run(
    model: Path | None,
    flags: ConfigFlags,
    num_prompts: int,
    input_len: int,
    output_len: int,
    num_iters: int,
    num_iters_warmup: int,
    seed: int,
    out: Path | None,
) -> tuple[BenchJob, list[dict[str, Any]]]:
    set_up_logs(rank=None, log_file=None, level=logging.WARNING)
    check_output(out)
    positive("requests", num_prompts)
    positive("--input-len", input_len)
    positive("--output-len", output_len)
    positive("--num-iters", num_iters)
    from crossdock.bench.run import run_bench

    job = BenchJob(
        kind="engine",
        config=flags.load(model).config,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        seed=seed,
    )
    return job, run_bench(job)


def positive(flag: str, value: int) -> None:
    """Raises ``UsageError`` for a number below 1."""
    if value < 1:
        raise UsageError(f"{flag} must be at least 1, found {value}")


def answer(report: object, out: Path | None) -> None:
    """The report as JSON, to a file or to standard output."""
    if out is None:
        print(json.dumps(report, indent=1))
    else:
        write_json(out, report)
