"""``crossdock bench latency`` and ``bench throughput``: the engine without HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from crossdock.bench.jobs import BenchJob
from crossdock.cli.bench_flags import LengthFlags, RoundFlags, positive
from crossdock.cli.flags import ConfigFlags, whole_number

_NO_FLAGS = ConfigFlags()
_LENGTHS = LengthFlags()
_ROUNDS = RoundFlags()
_WHOLE = Parameter(converter=whole_number)


def bench_latency(
    model: Path | None = None,
    /,
    *,
    batch_size: Annotated[int, _WHOLE] = 8,
    lengths: LengthFlags = _LENGTHS,
    rounds: RoundFlags = _ROUNDS,
    flags: ConfigFlags = _NO_FLAGS,
) -> None:
    """Time a batch of equal requests from its start to its last token, greedy, ends of text ignored; prints JSON.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint; without it the bundled crossdock-mini.
    batch_size
        Requests of all replicas together.
    """
    from crossdock.bench.engine import latency_report

    positive("--batch-size", batch_size)
    rounds.answer(latency_report(*_run(model, flags, batch_size, lengths, rounds)))


def bench_throughput(
    model: Path | None = None,
    /,
    *,
    num_prompts: Annotated[int, _WHOLE] = 64,
    lengths: LengthFlags = _LENGTHS,
    rounds: RoundFlags = _ROUNDS,
    flags: ConfigFlags = _NO_FLAGS,
) -> None:
    """Tokens a second of many requests that are all there from the start, greedy, ends of text ignored; the median round; prints JSON.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint; without it the bundled crossdock-mini.
    num_prompts
        Requests of all replicas together.
    """
    from crossdock.bench.engine import throughput_report

    positive("--num-prompts", num_prompts)
    rounds.answer(throughput_report(*_run(model, flags, num_prompts, lengths, rounds)))


def _run(
    model: Path | None, flags: ConfigFlags, num_prompts: int, lengths: LengthFlags, rounds: RoundFlags
) -> tuple[BenchJob, list[dict[str, Any]]]:
    rounds.prepare()
    positive("--input-len", lengths.input_len)
    positive("--output-len", lengths.output_len)
    from crossdock.bench.run import run_bench

    job = BenchJob(
        kind="engine",
        config=flags.load(model).config,
        num_iters=rounds.num_iters,
        num_iters_warmup=rounds.num_iters_warmup,
        num_prompts=num_prompts,
        input_len=lengths.input_len,
        output_len=lengths.output_len,
        seed=rounds.seed,
    )
    return job, run_bench(job)
