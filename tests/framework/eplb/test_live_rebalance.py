"""Experts move while requests run: logits stay those of one process, whatever dispatches, picks, plans and decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import structlog
from crossdock.config import Config, EplbConfig, PluginChoice, RecorderConfig
from crossdock.errors import UsageError
from crossdock.offline import logits, logits_job, new_tokens, offline_job
from crossdock.testing.balanced_ranks import BalancedResult, run_balanced
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.testing.world import RankPool
from crossdock.types.request import SamplingParams

Pool = Callable[[int], RankPool]
TOLERANCE = 1e-5
"""Relative to the largest logit: the same sums in another order, fp32."""
PROMPTS = [[(7 * place + 3 * index) % 96 for place in range(length)] for index, length in enumerate((24, 1, 31, 28, 9))]
BALANCING = EplbConfig(enabled=True, slots=12, interval=1, max_step_bytes=100_000, canary=True)
"""As many rebalances as there can be: a layer's new experts fit into one slice."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[npt.NDArray[np.float32]]:
    """One process, no redundant experts, nothing moves."""
    with structlog.testing.capture_logs():
        return logits(folder, PROMPTS, random_model_config(folder))


def balanced(folder: Path, *, eplb: EplbConfig = BALANCING, algo: str = "global", **layout: object) -> Config:
    """One token a step and sequence, so that many steps run."""
    config = random_model_config(folder, chunk_tokens=1, max_step_tokens=4, max_running_requests=2, **layout)  # type: ignore[arg-type]
    return attrs.evolve(config, eplb=eplb, eplb_algo=PluginChoice(name=algo))


def scored(pool: RankPool, folder: Path, config: Config) -> BalancedResult:
    return run_balanced(pool, logits_job(folder, PROMPTS, config))


def assert_equal_to(expected: list[npt.NDArray[np.float32]], found: BalancedResult) -> None:
    for index, array in enumerate(expected):
        ours = found.result.logits[str(index)]
        assert float(np.abs(ours - array).max() / np.abs(array).max()) < TOLERANCE


CASES = [
    (2, "allgatherv", "dynamic"),
    (2, "allgatherv", "lp"),
    (2, "allgatherv", "locality"),
    (2, "alltoallv", "static"),
    (2, "alltoallv", "dynamic"),
    (2, "alltoallv", "lp"),
    (2, "alltoallv", "locality"),
    (4, "allgatherv", "dynamic"),
    (4, "allgatherv", "lp"),
    (4, "allgatherv", "locality"),
    (4, "alltoallv", "static"),
    (4, "alltoallv", "dynamic"),
    (4, "alltoallv", "lp"),
    (4, "alltoallv", "locality"),
]
"""Every dispatcher of CPU ranks with every picker that it can have; ``fake`` routes otherwise by design."""


@pytest.mark.parametrize(("ranks", "dispatcher", "picker"), CASES)
def test_logits_are_those_of_one_process_while_experts_move(
    ranks: int,
    dispatcher: str,
    picker: str,
    folder: Path,
    expected: list[npt.NDArray[np.float32]],
    rank_pool: Pool,
) -> None:
    config = balanced(folder, ranks=ranks, attn_dp=ranks, dispatcher=dispatcher)
    found = scored(rank_pool(ranks), folder, attrs.evolve(config, expert_location=PluginChoice(name=picker)))
    assert_equal_to(expected, found)
    applied = [entry for entry in found.rebalances if entry.outcome == "applied"]
    assert applied == list(found.rebalances)
    assert any(entry.moved_slots for entry in applied), "nothing moved, so nothing is proved"


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_from_the_checkpoint_are_those_of_other_ranks(family: str, tmp_path: Path, rank_pool: Pool) -> None:
    folder = write_random_model(tmp_path / "model", family)
    with structlog.testing.capture_logs():
        expected = logits(folder, PROMPTS, random_model_config(folder))
    eplb = attrs.evolve(BALANCING, experts_from="checkpoint")
    found = scored(rank_pool(2), folder, balanced(folder, eplb=eplb, ranks=2, attn_dp=2, dispatcher="alltoallv"))
    assert_equal_to(expected, found)
    assert any(entry.moved_slots for entry in found.rebalances)


@pytest.mark.parametrize(
    ("attn_dp", "moe_ep"), [(2, 4), (2, 2), (1, 4)], ids=["DP 2 x TP 2, EP 4", "DP 2 x TP 2, EP 2 x TP 2", "TP 4, EP 4"]
)
def test_every_layout_moves_its_own_shards(
    attn_dp: int, moe_ep: int, folder: Path, expected: list[npt.NDArray[np.float32]], rank_pool: Pool
) -> None:
    """Pitfall vllm#57465: sizes of attention and experts were mixed up. Ranks that lead no replica move experts, too."""
    config = balanced(folder, ranks=4, attn_dp=attn_dp, moe_ep=moe_ep)
    found = scored(rank_pool(4), folder, config)
    assert_equal_to(expected, found)
    assert any(entry.moved_slots for entry in found.rebalances)


@pytest.mark.parametrize(("experts", "slots"), [(64, 80), (4, 6)])
def test_greedy_tokens_stay_the_same_when_experts_move_after_every_pass(
    experts: int, slots: int, tmp_path: Path, rank_pool: Pool
) -> None:
    """Pitfall sglang#25882: wrong text on the CPU with interval 1 and redundant experts."""
    folder = write_random_model(tmp_path / "model", num_experts=experts)
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0)
    answers: list[list[list[int]]] = []
    for eplb in (EplbConfig(), EplbConfig(enabled=True, slots=slots, interval=1, canary=True)):
        config = attrs.evolve(random_model_config(folder, ranks=2, attn_dp=2, dispatcher="alltoallv"), eplb=eplb)
        found = run_balanced(rank_pool(2), offline_job(folder, PROMPTS, sampling, config))
        answers.append([new_tokens(found.result.outputs[str(index)]) for index in range(len(PROMPTS))])
    assert answers[0] == answers[1]
    assert [len(answer) for answer in answers[1]] == [16] * len(PROMPTS)
    assert any(entry.moved_slots for entry in found.rebalances)


def test_without_redundant_experts_a_rebalance_swaps_them(
    folder: Path, expected: list[npt.NDArray[np.float32]], rank_pool: Pool
) -> None:
    eplb = attrs.evolve(BALANCING, slots=8)
    config = balanced(folder, ranks=2, attn_dp=2, dispatcher="alltoallv", eplb=eplb)
    found = scored(rank_pool(2), folder, attrs.evolve(config, expert_location=PluginChoice(name="lp")))
    assert_equal_to(expected, found)
    assert any(entry.moved_slots for entry in found.rebalances)


def test_an_expert_in_many_slices_arrives_whole(
    folder: Path, expected: list[npt.NDArray[np.float32]], rank_pool: Pool
) -> None:
    """An expert of the tiny model has 13.8 kB."""
    eplb = attrs.evolve(BALANCING, max_step_bytes=5000)
    found = scored(rank_pool(2), folder, balanced(folder, ranks=2, attn_dp=2, dispatcher="alltoallv", eplb=eplb))
    assert_equal_to(expected, found)


@pytest.mark.parametrize("mode", ["stat", "stat_approx", "per_pass", "per_token"])
def test_every_recorder_mode_works_with_balancing_and_reports(
    mode: str, folder: Path, expected: list[npt.NDArray[np.float32]], rank_pool: Pool
) -> None:
    """Pitfalls sglang#7266, sglang#9501: the first rebalance or report crashed in a fine-grained mode."""
    recorder = RecorderConfig(mode=mode, buffer_steps=3, report="both", report_every=3)  # type: ignore[arg-type]
    config = balanced(
        folder, ranks=2, attn_dp=2, dispatcher="alltoallv", eplb=attrs.evolve(BALANCING, interval=4), algo="crossdock"
    )
    found = scored(rank_pool(2), folder, attrs.evolve(config, recorder=recorder))
    assert_equal_to(expected, found)
    assert any(entry.outcome == "applied" for entry in found.rebalances)
    assert 0 < found.gauges["eplb_balancedness_1000"] <= 1


@pytest.mark.parametrize(
    ("policy", "options", "moves"),
    [
        ("interval", {}, True),
        ("threshold", {"below": 0.0}, False),
        ("threshold", {"below": 1.0}, True),
        ("priced", {}, True),
        ("priced", {"min_gain_s": 1e6}, False),
    ],
)
def test_the_policy_decides_and_gain_and_price_are_in_the_receipt(
    policy: str, options: dict[str, object], moves: bool, folder: Path, rank_pool: Pool
) -> None:
    config = balanced(folder, ranks=2, attn_dp=2, dispatcher="alltoallv", algo="crossdock")
    choice = PluginChoice(name=policy, options=options)
    found = scored(rank_pool(2), folder, attrs.evolve(config, rebalance_policy=choice))
    assert found.rebalances, "there was no decision"
    assert any(entry.outcome == "applied" and entry.moved_slots for entry in found.rebalances) is moves
    if not moves:
        assert {entry.outcome for entry in found.rebalances} == {"refused"}
    if policy == "priced":
        assert all(entry.price_s is not None and entry.predicted_gain_s is not None for entry in found.rebalances)
        assert found.gauges["eplb_price_seconds"] == found.rebalances[-1].price_s


def test_the_spare_slots_are_those_of_one_layer_and_in_the_receipt(folder: Path, rank_pool: Pool) -> None:
    """Pitfall vllm#24537: staging was not part of the memory plan."""
    config = balanced(folder, ranks=2, attn_dp=2, eplb=attrs.evolve(BALANCING, canary=False))
    found = scored(rank_pool(2), folder, config)
    expert_bytes = 4 * (2 * 24 * 48 + 48 * 24)
    assert found.capacity["expert_bytes"] == expert_bytes
    assert found.capacity["eplb_spare_bytes"] == 6 * expert_bytes


def test_one_rank_has_nothing_to_send_and_works_all_the_same(
    folder: Path, expected: list[npt.NDArray[np.float32]], rank_pool: Pool
) -> None:
    found = scored(rank_pool(1), folder, balanced(folder, ranks=1))
    assert_equal_to(expected, found)
    assert all(entry.moved_bytes == 0 for entry in found.rebalances)


@pytest.mark.parametrize(
    ("location", "sentence"),
    [
        ("missing.json", "no such file"),
        ('{"physical_to_logical_map": [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]}', "1 layers"),
        ('{"physical_to_logical_map": [[0, 1, 2, 3, 4, 5, 6, 6, 0, 1, 2, 3]]}', "logical expert 7 has no replica"),
        ('{"logical_count": [[1, 2, 3]]}', "counts of"),
        (
            '{"logical_count": [[1, 2, 3, 4, 5, 6, 7, -1], [1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]]}',
            "negative",
        ),
        (
            '{"logical_count": [[1, 2, 3, 4, 5, 6, 7, NaN], [1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]]}',
            "not finite",
        ),
        ('{"something": 1}', "something"),
        ("[[0, 1", "not JSON"),
    ],
)
def test_a_start_placement_that_cannot_be_used_is_named_at_start(location: str, sentence: str, folder: Path) -> None:
    config = attrs.evolve(random_model_config(folder), eplb=EplbConfig(slots=12, init_location=location))
    with pytest.raises(UsageError, match=sentence):
        logits(folder, [[1]], config)


def test_a_start_placement_with_more_replicas_than_are_allowed_is_wrong_input(folder: Path) -> None:
    slots = "[0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 1, 2]"
    config = attrs.evolve(random_model_config(folder), eplb=EplbConfig(slots=12, init_location=slots, max_replicas=2))
    with pytest.raises(UsageError, match="an expert with 3 replicas and 2 are allowed; set it to 3 or more"):
        logits(folder, [[1]], config)


@pytest.mark.parametrize(
    ("transport", "told"), [("nccl", "nccl needs GPUs"), ("peer", "peer needs GPUs of one machine")]
)
def test_a_transport_of_gpus_is_refused_on_cpu_ranks(
    transport: Literal["nccl", "peer"], told: str, folder: Path, rank_pool: Pool
) -> None:
    eplb = EplbConfig(enabled=True, slots=12, transport=transport)
    with pytest.raises(AssertionError, match=told):
        scored(rank_pool(2), folder, balanced(folder, ranks=2, attn_dp=2, eplb=eplb))


def test_without_balancing_no_memory_is_set_aside(folder: Path, rank_pool: Pool) -> None:
    found = scored(rank_pool(2), folder, balanced(folder, ranks=2, attn_dp=2, eplb=EplbConfig(slots=12)))
    assert "eplb_spare_bytes" not in found.capacity
    assert found.rebalances == ()
