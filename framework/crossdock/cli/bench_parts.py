"""``crossdock bench dispatch`` and ``bench experts``: one part of a MoE layer, without a checkpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from crossdock.bench.jobs import BenchJob, MoeShape
from crossdock.cli.bench_flags import LayerFlags, RoundFlags, positive
from crossdock.cli.flags import ConfigFlags, whole_number
from crossdock.errors import UsageError

_NO_FLAGS = ConfigFlags()
_LAYER = LayerFlags()
_ROUNDS = RoundFlags()
_WHOLE = Parameter(converter=whole_number)


def bench_dispatch(*, layer: LayerFlags = _LAYER, rounds: RoundFlags = _ROUNDS, flags: ConfigFlags = _NO_FLAGS) -> None:
    """Time dispatch and combine of random rows, experts left out; prints a JSON list, one object a number of tokens and protocol.

    The dispatcher, its options, the ranks and the device come from the configuration, as for serve. The slowest rank counts.
    """
    job = _job("dispatch", flags, layer, rounds)
    ranks = job.config.parallel.ranks
    if layer.num_experts % ranks:
        raise UsageError(f"--num-experts {layer.num_experts} cannot be split over {ranks} ranks; give a multiple of it")
    from crossdock.bench.dispatch import dispatch_report
    from crossdock.bench.run import run_bench

    rounds.answer(dispatch_report(job, run_bench(job)))


def bench_experts(
    *,
    intermediate_size: Annotated[int, _WHOLE] = 256,
    weight_dtype: Literal["native", "fp8_block"] = "native",
    layer: LayerFlags = _LAYER,
    rounds: RoundFlags = _ROUNDS,
    flags: ConfigFlags = _NO_FLAGS,
) -> None:
    """Time the experts of one layer on random rows, all of them here; prints a JSON list, one object a number of tokens.

    The plugin, its options and the device come from the configuration, as for serve.

    Parameters
    ----------
    intermediate_size
        Inner size of an expert.
    weight_dtype
        native, or fp8_block for float8 with scales of 128 x 128 blocks.
    """
    positive("--intermediate-size", intermediate_size)
    job = _job("experts", flags, layer, rounds, intermediate_size, weight_dtype)
    import torch

    from crossdock.bench import experts
    from crossdock.comm import take_device

    take_device(job.config.launch.device, 0)
    rounds.answer(experts.bench_experts(job, torch.device(job.config.launch.device)))


def _job(
    kind: str,
    flags: ConfigFlags,
    layer: LayerFlags,
    rounds: RoundFlags,
    intermediate_size: int = MoeShape().intermediate_size,
    weight_dtype: str = "native",
) -> BenchJob:
    rounds.prepare()
    layer.check()
    return BenchJob(
        kind=kind,
        config=flags.load().config,
        num_iters=rounds.num_iters,
        num_iters_warmup=rounds.num_iters_warmup,
        shape=MoeShape(
            hidden_size=layer.hidden_size,
            intermediate_size=intermediate_size,
            num_experts=layer.num_experts,
            top_k=layer.top_k,
        ),
        num_tokens=layer.num_tokens,
        weight_dtype=weight_dtype,
        seed=rounds.seed,
    )
