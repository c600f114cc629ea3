"""A list of prompts to score or continue, its share for each replica, and its results, within and between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from crossdock.config import Config
from crossdock.errors import RuntimeFault, UsageError
from crossdock.groups import leader_ranks
from crossdock.types.parallel import ParallelSizes
from crossdock.types.request import EngineOutput, EngineRequest, SamplingParams

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from crossdock.comm import RankComms
    from crossdock.rank_plan import RankPlan

_JOB_FILE = "job.json"


@attrs.frozen(kw_only=True)
class OfflineJob:
    """Prompts with their sampling. Request ids are the prompts' numbers."""

    config: Config
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]
    keeps_logits: bool = False
    """The result is the logits of every prompt row."""

    def check(self, vocab_size: int, max_sequence_tokens: int) -> None:
        """Raises ``UsageError`` naming the first prompt that cannot run and the number that is wrong."""
        for index, (prompt, sampling) in enumerate(zip(self.prompts, self.sampling, strict=True)):
            if not prompt:
                raise UsageError(f"prompt {index} has length 0; every prompt needs at least one token id")
            wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise UsageError(f"prompt {index}: token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})")
            needed = len(prompt) + min(1, sampling.max_new_tokens)
            if needed > max_sequence_tokens:
                raise UsageError(
                    f"prompt {index} has {len(prompt)} tokens and needs {needed}, but the context holds {max_sequence_tokens}"
                )

    def requests(self, replica: int, num_replicas: int) -> list[EngineRequest]:
        """The share of one replica."""
        owners = spread(self.prompts, num_replicas)
        return [
            EngineRequest(rid=str(index), prompt_ids=prompt, sampling=sampling)
            for index, (prompt, sampling, owner) in enumerate(zip(self.prompts, self.sampling, owners, strict=True))
            if owner == replica
        ]


@attrs.frozen(kw_only=True, eq=False)
class OfflineResult:
    """Results by request id."""

    outputs: Mapping[str, Sequence[EngineOutput]] = attrs.field(factory=dict[str, list[EngineOutput]])
    logits: Mapping[str, npt.NDArray[np.float32]] = attrs.field(factory=dict[str, npt.NDArray[np.float32]])
    receipt: dict[str, Any] = attrs.field(factory=dict[str, Any])
    """What rank 0 ran with, and how often each mode ran."""

    def ordered_logits(self) -> list[npt.NDArray[np.float32]]:
        """Logits in the order of the prompts."""
        return [self.logits[str(index)] for index in range(len(self.logits))]

    def ordered_outputs(self) -> list[list[EngineOutput]]:
        """Outputs in the order of the prompts."""
        return [list(self.outputs[str(index)]) for index in range(len(self.outputs))]


def spread(prompts: Sequence[Sequence[int]], num_replicas: int) -> list[int]:
    """The replica of each prompt: in order, each goes where the fewest tokens are, as the router's ``least_tokens`` does."""
    tokens = [0] * num_replicas
    owners: list[int] = []
    for prompt in prompts:
        owner = min(range(num_replicas), key=tokens.__getitem__)
        tokens[owner] += len(prompt)
        owners.append(owner)
    return owners


class PromptLogits:
    """Collects the logits of prompt rows as they come, chunk by chunk; a ``LogitSink``."""

    def __init__(self, requests: Sequence[EngineRequest]) -> None:
        self._lengths = {request.rid: len(request.prompt_ids) for request in requests}
        self.arrays: dict[str, npt.NDArray[np.float32]] = {}

    def __call__(self, rid: str, start: int, logits: torch.Tensor) -> None:
        rows = logits.float().cpu().numpy()
        if rid not in self.arrays:
            self.arrays[rid] = np.empty((self._lengths[rid], rows.shape[1]), dtype=np.float32)
        self.arrays[rid][start : start + rows.shape[0]] = rows


def run_job_on_rank(
    job: OfflineJob, plan: RankPlan, comms: RankComms | None = None, store: Store | None = None
) -> OfflineResult:
    """One rank's part of a job, in this process; a collective when ``comms`` has several ranks.

    Args:
        job: equal on all ranks.
        plan: of this rank.
        comms: its groups; None for a job of one rank.
        store: where the ranks met; None for a job of one rank.
    """
    from crossdock.comm import local_comms
    from crossdock.engine_build import build_engine
    from crossdock.observe.receipt import make_receipt
    from crossdock.offline_link import OfflineLink

    is_leader = plan.place.rank in leader_ranks(plan.sizes)
    requests = job.requests(plan.place.attn_dp_rank, plan.sizes.attn_dp_size) if is_leader else []
    link = OfflineLink(requests)
    sink = PromptLogits(requests) if job.keeps_logits else None
    with build_engine(plan, comms or local_comms(), link, store=store, on_prompt_logits=sink) as engine:
        engine.run()
        receipt = make_receipt(plan.config, plan.selection, engine.counters)
    for outputs in link.outputs.values():
        if outputs[-1].error is not None:
            raise UsageError(f"prompt {outputs[-1].rid}: {outputs[-1].error}")
    return OfflineResult(outputs=link.outputs, logits={} if sink is None else sink.arrays, receipt=receipt)


def write_job(folder: Path, job: OfflineJob) -> None:
    """Hands a job to rank processes."""
    (folder / _JOB_FILE).write_bytes(msgspec.json.encode(job))


def read_job(folder: Path) -> OfflineJob:
    """The job of ``write_job``."""
    return msgspec.json.decode((folder / _JOB_FILE).read_bytes(), type=OfflineJob)


def write_result(folder: Path, rank: int, result: OfflineResult) -> None:
    """Hands a leader's results back."""
    (folder / f"outputs_{rank}.json").write_bytes(msgspec.json.encode(dict(result.outputs)))
    (folder / f"receipt_{rank}.json").write_bytes(msgspec.json.encode(result.receipt))
    for rid, array in result.logits.items():
        np.save(folder / f"logits_{rid}.npy", array)


def read_results(folder: Path, sizes: ParallelSizes) -> OfflineResult:
    """Results of all replicas.

    Raises:
        RuntimeFault: a leader left none although it ended well.
    """
    outputs: dict[str, list[EngineOutput]] = {}
    for leader in leader_ranks(sizes):
        path = folder / f"outputs_{leader}.json"
        if not path.exists():
            raise RuntimeFault(f"rank {leader} ended without results; see its log")
        outputs |= msgspec.json.decode(path.read_bytes(), type=dict[str, list[EngineOutput]])
    arrays = {path.stem.removeprefix("logits_"): np.load(path) for path in folder.glob("logits_*.npy")}
    receipt = msgspec.json.decode((folder / "receipt_0.json").read_bytes(), type=dict[str, Any])
    return OfflineResult(outputs=outputs, logits=arrays, receipt=receipt)
