"""Overlapped steps have the bits of sequential ones: every mode, one token, one sequence, idle and uneven replicas, every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from crossdock.groups import resolve_sizes
from crossdock.testing.model_driver import Work
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.overlap_equality import WIDE_FIELDS, OverlapFinding, compare_with_sequential
from crossdock.testing.tiny_models import save_tiny_model
from crossdock.testing.world import RankPool

ALWAYS: dict[str, object] = {"gate": "always"}
STRATEGIES = ("two_batch", "two_batch_mixed")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        family: save_tiny_model(folder / family, family, **WIDE_FIELDS[family])
        for family in ("qwen3_moe", "deepseek_v3")
    }


def steps_of(lengths: Sequence[Sequence[Mapping[int, int]]]) -> list[list[Work]]:
    """Steps from rows: for each step and replica, sequence -> number of tokens. Token ids follow from place and sequence."""
    seen: dict[tuple[int, int], int] = {}
    steps: list[list[Work]] = []
    for step in lengths:
        work: list[Work] = []
        for replica, sequences in enumerate(step):
            rows: dict[int, list[int]] = {}
            for sequence, count in sequences.items():
                start = seen.get((replica, sequence), 0)
                seen[replica, sequence] = start + count
                rows[sequence] = [(13 * place + 7 * sequence + 5 * replica) % 96 for place in range(start, start + count)]
            work.append(rows)
        steps.append(work)
    return steps


def lens(*counts: int, first: int = 0) -> dict[int, int]:
    return {first + index: count for index, count in enumerate(counts)}


TWO_REPLICAS = [
    [lens(3, 5), lens(9)],  # prefill, the second replica inside its only sequence
    [lens(1, 1), lens(1)],  # decode: one sequence cannot be halved, nobody overlaps
    [lens(1, 1), {}],  # decode with an idle replica
    [lens(1), {}],  # one token, all idle but one
    [lens(1, first=4), lens(4, 1, first=4)],  # one token here: no cut
    [lens(6, 1), lens(1, 6)],  # mixed on both, [n, 1] and [1, n]
    [lens(8, first=10), lens(1, 1)],  # prefill here, decode there
    [lens(2, 1, first=20), lens(7, 1, 1, first=20)],
]
DECIDED = {
    "two_batch": ["", "vote", "", "vote", "modes_differ", "", "modes_differ", ""],
    "two_batch_mixed": ["", "vote", "", "vote", "vote", "", "", ""],
}


def check(
    findings: Sequence[OverlapFinding],
    reasons: Sequence[str] | None = None,
) -> None:
    for rank, finding in enumerate(findings):
        assert finding.differences == (), f"rank {rank}: {finding.differences}"
        assert finding.reasons == findings[0].reasons
        if reasons is not None:
            assert list(finding.reasons) == list(reasons)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_overlapped_steps_have_the_bits_of_sequential_ones(
    rank_pool: Callable[[int], RankPool], checkpoints: Mapping[str, Path], family: str, strategy: str
) -> None:
    choice = DriverChoice(
        folder=str(checkpoints[family]), dispatcher="alltoallv", strategy=strategy, strategy_options=ALWAYS
    )
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    findings = rank_pool(2).run(compare_with_sequential, choice, sizes, steps_of(TWO_REPLICAS), timeout_s=90)
    check(findings, DECIDED[strategy])
