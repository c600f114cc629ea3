"""Logits and generation without a server: the same engine, scheduler and ranks as serving, for a list of prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from crossdock.config import Config
from crossdock.config_rules import parallel_sizes
from crossdock.errors import UsageError
from crossdock.launch.rank_logs import pass_logs_on
from crossdock.launch.runtime_folder import runtime_folder
from crossdock.local_ranks import run_local_ranks
from crossdock.offline_job import OfflineJob, OfflineResult, read_results, run_job_on_rank, write_job
from crossdock.rank_plan import plan_rank
from crossdock.types.request import EngineOutput, SamplingParams

RANK_MODULE = "crossdock.offline_rank"
_SCORING = SamplingParams(max_new_tokens=0, temperature=0.0)


def logits(
    model: str | os.PathLike[str], ids: Sequence[Sequence[int]], config: Config | None = None
) -> list[npt.NDArray[np.float32]]:
    """Logits of every position of every prompt.

    Args:
        model: folder of a checkpoint; empty for the bundled one.
        ids: prompts as token ids, any lengths from 1 on; they are spread over the replicas as serving would.
        config: everything else; its ranks are started as processes when it has more than one.

    Returns:
        One array [length, vocab] float32 a prompt, in the order of ``ids``.

    Raises:
        UsageError: a prompt is empty, too long or has ids outside the vocabulary, or the configuration cannot run.
        RuntimeFault: a rank failed.
    """
    return run_job(logits_job(model, ids, config)).ordered_logits()


def generate(
    model: str | os.PathLike[str],
    ids: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    config: Config | None = None,
) -> list[list[EngineOutput]]:
    """Outputs of every prompt, in the order they came; see ``new_tokens``.

    Args:
        model: folder of a checkpoint; empty for the bundled one.
        ids: prompts as token ids.
        sampling: one for all prompts, or one each.
        config: as for ``logits``.

    Raises:
        As ``logits``.
    """
    return run_job(offline_job(model, ids, sampling, config)).ordered_outputs()


def new_tokens(outputs: Sequence[EngineOutput]) -> list[int]:
    """The generated token ids of one prompt."""
    return [token for output in outputs for token in output.token_ids]


def run_job(job: OfflineJob) -> OfflineResult:
    """Runs a job on its ranks: in this process when there is one, else in processes of this machine."""
    pass_logs_on()
    ranks = job.config.parallel.ranks
    if job.config.launch.nnodes > 1:
        raise UsageError("logits and generate run on one machine; set launch.nnodes to 1")
    plan = plan_rank(job.config, 0)
    job.check(plan.info.vocab_size, plan.max_sequence_tokens)
    if ranks == 1:
        from crossdock.comm import take_device

        take_device(job.config.launch.device, 0)
        return run_job_on_rank(job, plan)
    threads = job.config.launch.threads_per_rank or max(1, (os.cpu_count() or 1) // ranks)
    with runtime_folder() as folder:
        write_job(folder, job)
        run_local_ranks(RANK_MODULE, folder, ranks, threads)
        return read_results(folder, parallel_sizes(job.config.parallel))


def logits_job(model: str | os.PathLike[str], ids: Sequence[Sequence[int]], config: Config | None = None) -> OfflineJob:
    """The job that ``logits`` runs, for those who start the ranks themselves or want the receipt."""
    job = offline_job(model, ids, _SCORING, config)
    return attrs.evolve(job, keeps_logits=True)


def offline_job(
    model: str | os.PathLike[str],
    ids: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    config: Config | None = None,
) -> OfflineJob:
    """The job that ``generate`` runs, for those who start the ranks themselves or want the receipt."""
    config = Config() if config is None else config
    checkpoint = attrs.evolve(config.checkpoint, path=os.fspath(model))
    each = (sampling,) * len(ids) if isinstance(sampling, SamplingParams) else tuple(sampling)
    if len(each) != len(ids):
        raise UsageError(f"{len(ids)} prompts and {len(each)} sampling parameters; give one for all or one each")
    queue = max(config.scheduler.max_queued_requests, len(ids))
    scheduler = attrs.evolve(config.scheduler, max_queued_requests=queue)
    return OfflineJob(
        config=attrs.evolve(config, checkpoint=checkpoint, scheduler=scheduler),
        prompts=tuple(tuple(int(token) for token in prompt) for prompt in ids),
        sampling=each,
    )
