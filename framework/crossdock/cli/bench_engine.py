"""``crossdock bench latency`` and ``bench throughput``: the engine without HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Parameter

from crossdock.bench.jobs import BenchJob
from crossdock.cli.bench_flags import LengthFlags, RoundFlags, positive
from crossdock.cli.flags import ConfigFlags, whole_number

_LENGTHS = LengthFlags()
_ROUNDS = RoundFlags()
_NO_FLAGS = ConfigFlags()
_WHOLE = Parameter(converter=whole_number)


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class EngineFlags:
    """What both benchmarks take besides the number of requests."""

    lengths: LengthFlags = _LENGTHS
    rounds: RoundFlags = _ROUNDS
    config: ConfigFlags = _NO_FLAGS

    def run(self, model: Path | None, num_prompts: int) -> tuple[BenchJob, list[dict[str, Any]]]:
        """The job of so many equal requests, and what its ranks measured.

        Raises:
            UsageError: a number cannot be.
        """
        rounds, lengths = self.rounds, self.lengths
        rounds.prepare()
        positive("--input-len", lengths.input_len)
        positive("--output-len", lengths.output_len)
        from crossdock.bench.run import run_bench

        job = BenchJob(
            kind="engine",
            config=self.config.load(model).config,
            num_iters=rounds.num_iters,
            num_iters_warmup=rounds.num_iters_warmup,
            num_prompts=num_prompts,
            input_len=lengths.input_len,
            output_len=lengths.output_len,
            seed=rounds.seed,
        )
        return job, run_bench(job)


_ENGINE = EngineFlags()


def bench_latency(
    model: Path | None = None, /, *, batch_size: Annotated[int, _WHOLE] = 8, engine: EngineFlags = _ENGINE
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
    engine.rounds.answer(latency_report(*engine.run(model, batch_size)))


def bench_throughput(
    model: Path | None = None, /, *, num_prompts: Annotated[int, _WHOLE] = 64, engine: EngineFlags = _ENGINE
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
    engine.rounds.answer(throughput_report(*engine.run(model, num_prompts)))
