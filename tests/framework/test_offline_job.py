"""Offline jobs: shares of the replicas, checks with numbers, files between processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from crossdock.config import Config
from crossdock.errors import RuntimeFault, UsageError
from crossdock.groups import resolve_sizes
from crossdock.offline_job import (
    OfflineJob,
    OfflineResult,
    PromptLogits,
    read_job,
    read_results,
    spread,
    write_job,
    write_result,
)
from crossdock.offline_link import OfflineLink
from crossdock.types.link import AddRequests, Outputs, Stop
from crossdock.types.request import EngineOutput, SamplingParams


def job(*lengths: int, max_new_tokens: int = 1) -> OfflineJob:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return OfflineJob(
        config=Config(),
        prompts=tuple(tuple(range(length)) for length in lengths),
        sampling=(params,) * len(lengths),
    )


def test_prompts_go_where_the_fewest_tokens_are() -> None:
    assert spread([[0] * 5, [0] * 2, [0] * 2, [0] * 2], 2) == [0, 1, 1, 1]
    assert spread([[0]] * 5, 2) == [0, 1, 0, 1, 0]
    assert spread([[0]] * 2, 4) == [0, 1]


def test_every_prompt_is_in_exactly_one_share() -> None:
    shares = [job(4, 1, 1, 9, 2).requests(replica, 3) for replica in range(3)]
    assert sorted(request.rid for share in shares for request in share) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ((2, 0), "prompt 1 has length 0"),
        ((3, 9), "prompt 1: token id 8 is outside the vocabulary"),
        ((8,), "prompt 0 has 8 tokens and needs 9, but the context holds 8"),
    ],
)
def test_prompts_that_cannot_run_are_refused_with_the_numbers(lengths: tuple[int, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        job(*lengths).check(vocab_size=8, max_sequence_tokens=8)


def test_a_prompt_as_long_as_the_context_can_be_scored() -> None:
    job(8, max_new_tokens=0).check(vocab_size=8, max_sequence_tokens=8)


def test_jobs_and_results_survive_their_files(tmp_path: Path) -> None:
    written = job(3, 1)
    write_job(tmp_path, written)
    assert read_job(tmp_path) == written
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    output = EngineOutput(rid="0", token_ids=(4, 5), finish_reason="length")
    first = OfflineResult(outputs={"0": [output]}, logits={"0": np.ones((2, 3), np.float32)}, receipt={"counts": 7})
    write_result(tmp_path, 0, first)
    with pytest.raises(RuntimeFault, match="rank 1 ended without results"):
        read_results(tmp_path, sizes)
    write_result(tmp_path, 1, OfflineResult(logits={"11": np.zeros((1, 3), np.float32)}))
    result = read_results(tmp_path, sizes)
    assert result.outputs == {"0": [output]}
    assert result.receipt == {"counts": 7}
    assert {rid: array.shape for rid, array in result.logits.items()} == {"0": (2, 3), "11": (1, 3)}


def test_chunks_of_prompt_logits_are_put_together_by_position() -> None:
    requests = job(5).requests(0, 1)
    sink = PromptLogits(requests)
    whole = torch.randn(5, 4)
    sink("0", 0, whole[:2])
    sink("0", 2, whole[2:])
    assert np.array_equal(sink.arrays["0"], whole.numpy())


def test_the_link_gives_all_requests_once_and_stops_when_all_have_ended() -> None:
    link = OfflineLink(job(1, 1).requests(0, 1))
    (first,) = link.poll(0)
    assert isinstance(first, AddRequests)
    assert len(first.requests) == 2
    assert link.poll(0) == ()
    link.send(Outputs(outputs=(EngineOutput(rid="0", token_ids=(1,), finish_reason="length"),)))
    assert link.poll(None) == ()
    link.send(Outputs(outputs=(EngineOutput(rid="1", token_ids=(1,)),)))
    link.send(Outputs(outputs=(EngineOutput(rid="1", token_ids=(2,), finish_reason="stop"),)))
    assert link.poll(0) == (Stop(),)
    assert [output.token_ids for output in link.outputs["1"]] == [(1,), (2,)]


def test_a_rank_without_requests_stops_at_once() -> None:
    assert OfflineLink().poll(None) == (Stop(),)
