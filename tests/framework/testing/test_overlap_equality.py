"""Overlapped steps have the bits of sequential ones: every mode, one token, one sequence, idle and uneven replicas, every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import pytest
from crossdock.comm import create_comms
from crossdock.groups import resolve_sizes
from crossdock.testing.model_driver import Work
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.overlap_equality import OverlapFinding, compare_with_sequential
from crossdock.testing.tiny_models import FAMILY_FIELDS, save_tiny_model
from crossdock.testing.world import RankContext, RankPool
from crossdock.types.parallel import ParallelSizes
from crossdock.types.step import PaddingMode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

STRATEGIES = ("two_batch", "two_batch_mixed")
WIDE_FIELDS: dict[str, dict[str, object]] = {
    "qwen3_moe": {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 32},
    "mixtral": {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "num_local_experts": 32},
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 32},
}
"""Sizes that all C kernels take; those of the tiny models are computed row by row in torch operators where they do not."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    wide = {
        f"wide {family}": save_tiny_model(folder / f"wide_{family}", family, **WIDE_FIELDS[family])
        for family in WIDE_FIELDS
    }
    return wide | {family: save_tiny_model(folder / family, family) for family in FAMILY_FIELDS}


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
                rows[sequence] = [
                    (13 * place + 7 * sequence + 5 * replica) % 96 for place in range(start, start + count)
                ]
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
@pytest.mark.parametrize("family", [*FAMILY_FIELDS, *(f"wide {family}" for family in WIDE_FIELDS)])
def test_overlapped_steps_have_the_bits_of_sequential_ones(
    rank_pool: Callable[[int], RankPool], checkpoints: Mapping[str, Path], family: str, strategy: str
) -> None:
    choice = DriverChoice(
        folder=str(checkpoints[family]), dispatcher="alltoallv", strategy=strategy, always_overlaps=True
    )
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    findings = rank_pool(2).run(compare_with_sequential, choice, sizes, steps_of(TWO_REPLICAS), timeout_s=90)
    check(findings, DECIDED[strategy])


LAYOUTS = {
    # Attention TP without an all-to-all: gathers must not take copies for shards.
    "dp2 tp2 allgatherv": (resolve_sizes(ranks=4, attn_dp_size=2), "allgatherv", PaddingMode.SUM_LEN),
    "dp2 tp2 alltoallv": (resolve_sizes(ranks=4, attn_dp_size=2), "alltoallv", PaddingMode.MAX_LEN),
    "dp4 ep2 mtp2": (
        resolve_sizes(ranks=4, attn_dp_size=4, moe_ep_size=2, moe_tp_size=2),
        "allgatherv",
        PaddingMode.MAX_LEN,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_padding_keeps_the_bits_with_uneven_and_idle_replicas(
    rank_pool: Callable[[int], RankPool], checkpoints: Mapping[str, Path], layout: str
) -> None:
    sizes, dispatcher, padding = LAYOUTS[layout]
    choice = DriverChoice(
        folder=str(checkpoints["wide qwen3_moe"]),
        dispatcher=dispatcher,
        padding_mode=padding,
        strategy="two_batch_mixed",
        always_overlaps=True,
    )
    rest: list[Mapping[int, int]] = [{} for _ in range(sizes.attn_dp_size - 2)]
    counts = [
        [lens(5), lens(2)],
        [lens(1, 1, 1, first=3), lens(1, 1, first=3)],
        [lens(3, 4), {}],
        [lens(2, 1), lens(1, 1)],
    ]
    steps = steps_of([[*step, *rest] for step in counts])
    findings = rank_pool(4).run(compare_with_sequential, choice, sizes, steps, timeout_s=90)
    check(findings, ["", "", "", ""])


def test_the_golden_lengths_are_cut_inside_the_longest_and_keep_the_bits(
    rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """[10, 900, 20, 30] becomes [10, 470] and [430, 20, 30]."""
    fields = {**WIDE_FIELDS["qwen3_moe"], "num_hidden_layers": 1, "max_position_embeddings": 1024}
    folder = save_tiny_model(tmp_path, "qwen3_moe", **fields)
    choice = DriverChoice(
        folder=str(folder),
        dispatcher="alltoallv",
        strategy="two_batch",
        always_overlaps=True,
        max_rows=1024,
        num_pages=300,
    )
    steps = steps_of([[lens(10, 900, 20, 30), {}]])
    findings = rank_pool(2).run(compare_with_sequential, choice, SIZES, steps, timeout_s=100)
    check(findings, [""])


SIZES: ParallelSizes = resolve_sizes(ranks=2, attn_dp_size=2)
ROWS = st.lists(st.integers(1, 9), max_size=4)
DECODES = st.integers(0, 5).map(lambda count: [1] * count)
STEP = st.tuples(st.one_of(ROWS, DECODES), st.one_of(ROWS, DECODES)).filter(any)


@pytest.mark.parametrize(
    ("family", "strategy"), [("wide qwen3_moe", "two_batch_mixed"), ("wide deepseek_v3", "two_batch")]
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(drawn=st.lists(STEP, min_size=3, max_size=8))
def test_drawn_batches_keep_the_bits(
    rank_pool: Callable[[int], RankPool],
    checkpoints: Mapping[str, Path],
    family: str,
    strategy: str,
    drawn: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> None:
    """Sequences go on from step to step: a decode row or a chunk behind a prefix, as drawn."""
    choice = DriverChoice(
        folder=str(checkpoints[family]),
        dispatcher="alltoallv",
        strategy=strategy,
        always_overlaps=True,
        num_pages=256,
    )
    steps = steps_of([[lens(*first), lens(*second)] for first, second in drawn])
    check(rank_pool(2).run(compare_with_sequential, choice, SIZES, steps, timeout_s=90))


FOUR = st.lists(
    st.one_of(st.just([]), ROWS, DECODES, st.just([1]), st.integers(2, 40).map(lambda n: [n, 1])),
    min_size=4,
    max_size=4,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(drawn=st.lists(FOUR.filter(any), min_size=2, max_size=4), padding=st.sampled_from(list(PaddingMode)))
def test_four_replicas_as_uneven_as_drawn_keep_the_bits(
    rank_pool: Callable[[int], RankPool],
    checkpoints: Mapping[str, Path],
    drawn: Sequence[Sequence[Sequence[int]]],
    padding: PaddingMode,
) -> None:
    """Idle ones, one row, [n, 1] and decode beside each other; whether a step overlaps is decided from all of them."""
    choice = DriverChoice(
        folder=str(checkpoints["wide qwen3_moe"]),
        dispatcher="alltoallv",
        padding_mode=padding,
        strategy="two_batch_mixed",
        always_overlaps=True,
        num_pages=256,
    )
    sizes = resolve_sizes(ranks=4, attn_dp_size=4)
    steps = steps_of([[lens(*replica) for replica in step] for step in drawn])
    check(rank_pool(4).run(compare_with_sequential, choice, sizes, steps, timeout_s=90))


@pytest.mark.parametrize("options", [{"hides": "dispatch"}, {"hides": "combine"}])
def test_shared_experts_behind_either_transfer_keep_the_bits(
    rank_pool: Callable[[int], RankPool], checkpoints: Mapping[str, Path], options: dict[str, object]
) -> None:
    choice = DriverChoice(
        folder=str(checkpoints["deepseek_v3"]),
        dispatcher="alltoallv",
        strategy="single_batch",
        strategy_options=options,
    )
    findings = rank_pool(2).run(compare_with_sequential, choice, SIZES, steps_of(TWO_REPLICAS[:4]), timeout_s=90)
    check(findings, ["off"] * 4)


TINY = [(1, 1), (1, 0), (2, 0), (2, 1), (8, 1)]


def compare_over_gloo(
    context: RankContext, choice: DriverChoice, sizes: ParallelSizes, steps: Sequence[Sequence[Work]]
) -> OverlapFinding:
    """As ``compare_with_sequential``, with transfers in flight that are gloo's own."""
    comms = create_comms(sizes, context.rank, transport="gloo")
    return compare_with_sequential(attrs.evolve(context, comms_of=lambda _: comms), choice, sizes, steps)


@pytest.mark.parametrize("padding", list(PaddingMode))
def test_tiny_and_idle_replicas_end_over_gloo_and_keep_the_bits(
    rank_pool: Callable[[int], RankPool], checkpoints: Mapping[str, Path], padding: PaddingMode
) -> None:
    """Where one replica's rows cannot be cut nobody overlaps; a rank that decided alone would hang the others."""
    prefill = [[lens(*[3] * own, first=10 * place), lens(*[2] * other)] for place, (own, other) in enumerate(TINY)]
    decode = [[lens(*[1] * own, first=10 * place), lens(*[1] * other)] for place, (own, other) in enumerate(TINY)]
    choice = DriverChoice(
        folder=str(checkpoints["wide qwen3_moe"]),
        dispatcher="alltoallv",
        padding_mode=padding,
        strategy="two_batch",
        always_overlaps=True,
    )
    findings = rank_pool(2).run(compare_over_gloo, choice, SIZES, steps_of([*prefill, *decode]), timeout_s=90)
    check(findings, ["", "", "", "", "", "vote", "vote", "", "vote", "vote"])
