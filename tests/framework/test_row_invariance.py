"""``launch.row_invariant``: when it is on, what it refuses, and that a result then depends on nothing beside a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import structlog
from crossdock import row_invariance
from crossdock.config import CheckpointConfig, Config, LaunchConfig, PluginChoice
from crossdock.errors import SelectionRefused
from crossdock.native_code import NativeCode
from crossdock.offline import generate, logits, logits_job, new_tokens
from crossdock.rank_plan import plan_rank
from crossdock.testing.engine_ranks import run_on_pool
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.testing.world import RankPool
from crossdock.types.request import SamplingParams
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PROMPTS = [
    [(7 * place + 3 * index) % 96 for place in range(length)] for index, length in enumerate((5, 1, 63, 9, 2, 40))
]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: write_random_model(folder / family, family) for family in ("qwen3_moe", "deepseek_v3")}


def config_of(folder: Path, **launch: object) -> Config:
    config = random_model_config(folder)
    return attrs.evolve(config, launch=attrs.evolve(config.launch, **launch))


def is_on(config: Config) -> bool:
    return plan_rank(config, 0).selection.row_invariant


def test_it_is_on_by_default_on_a_cpu_in_float32(folders: Mapping[str, Path]) -> None:
    assert is_on(config_of(folders["qwen3_moe"]))
    assert not is_on(config_of(folders["qwen3_moe"], row_invariant="off"))


def test_in_another_dtype_it_is_off_or_refused(folders: Mapping[str, Path]) -> None:
    config = config_of(folders["qwen3_moe"])
    config = attrs.evolve(config, checkpoint=attrs.evolve(config.checkpoint, dtype="bfloat16"))
    assert not is_on(config)
    with pytest.raises(SelectionRefused, match="not on cpu in bfloat16") as refused:
        is_on(attrs.evolve(config, launch=LaunchConfig(row_invariant="on")))
    assert refused.value.codes == ("row_invariance_needs_cpu_float32",)


def test_experts_that_round_by_their_neighbours_are_refused(folders: Mapping[str, Path]) -> None:
    config = attrs.evolve(
        config_of(folders["qwen3_moe"]), experts=PluginChoice(name="torch", options={"form": "sorted"})
    )
    assert not is_on(config)
    with pytest.raises(SelectionRefused, match="experts 'torch' with these options") as refused:
        is_on(attrs.evolve(config, launch=LaunchConfig(row_invariant="on")))
    assert refused.value.codes == ("row_invariance_not_supported",)


def test_without_a_compiler_it_is_off_or_refused(folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_invariance, "native_code", lambda: NativeCode(library=None, reason="no C compiler found"))
    assert not is_on(config_of(folders["qwen3_moe"]))
    with pytest.raises(SelectionRefused, match="no C compiler found") as refused:
        is_on(config_of(folders["qwen3_moe"], row_invariant="on"))
    assert refused.value.codes == ("row_invariance_needs_compiler",)


def test_sizes_that_kernels_do_not_take_leave_it_off_but_in_tiny_models(tmp_path: Path) -> None:
    for hidden_size, expected in ((80, True), (160, True), (176, False)):
        folder = write_random_model(tmp_path / str(hidden_size), "qwen3_moe")
        fields = {
            **json.loads((folder / "config.json").read_text()),
            "hidden_size": hidden_size,
            "moe_intermediate_size": 32,
        }
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf8")
        checkpoint = CheckpointConfig(path=str(folder), dtype="float32", load_format="random")
        config = attrs.evolve(config_of(folder), checkpoint=checkpoint)
        assert is_on(config) == expected, hidden_size
        assert is_on(attrs.evolve(config, launch=LaunchConfig(row_invariant="on")))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_request_has_the_same_logits_alone_in_a_batch_and_in_chunks(folders: Mapping[str, Path], family: str) -> None:
    config = config_of(folders[family])
    together = logits(folders[family], PROMPTS, config)
    chunks = attrs.evolve(
        config, scheduler=attrs.evolve(config.scheduler, chunk_tokens=7, max_step_tokens=16, max_running_requests=16)
    )
    in_chunks = logits(folders[family], PROMPTS, chunks)
    for index, prompt in enumerate(PROMPTS):
        alone = logits(folders[family], [prompt], config)[0]
        assert np.array_equal(alone, together[index]), index
        assert np.array_equal(in_chunks[index], together[index]), index


STRATEGIES: dict[str, dict[str, object]] = {
    "two_batch": {"gate": "always"},
    "two_batch_mixed": {"gate": "always"},
    "single_batch": {"hides": "combine"},
}
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=6)
EXAMPLES = ([1], [30, 1], [1, 30], [10, 900, 20, 30], [1, 1, 1], [17])
"""Lengths that are cut in a way of their own: one token, one sequence, ends of one token, the golden ones of the facts."""


def logits_of(
    pool: RankPool, folder: Path, prompts: Sequence[Sequence[int]], strategy: str, options: dict[str, object]
) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any]]:
    """Of two replicas, as ``crossdock logits`` computes them; with the counts of overlap."""
    config = random_model_config(folder, ranks=2, attn_dp=2, dispatcher="alltoallv", chunk_tokens=512, kv_tokens=4096)
    config = attrs.evolve(config, strategy=PluginChoice(name=strategy, options=options))
    result = run_on_pool(pool, logits_job(folder, prompts, config))
    return result.logits, result.receipt["counts"]["overlap"]


def check_strategies(pool: RankPool, folder: Path, lengths: Sequence[int]) -> int:
    """Steps that overlapped, of all strategies."""
    prompts = [[(7 * place + 3 * index) % 96 for place in range(length)] for index, length in enumerate(lengths)]
    wanted, _ = logits_of(pool, folder, prompts, "sequential", {})
    overlapped = 0
    for strategy, options in STRATEGIES.items():
        found, counts = logits_of(pool, folder, prompts, strategy, options)
        overlapped += counts["on"]
        assert found.keys() == wanted.keys()
        for request, rows in wanted.items():
            assert np.array_equal(found[request], rows), (strategy, request)
    return overlapped


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(lengths=LENGTHS)
def test_every_strategy_gives_the_logits_of_sequential(
    rank_pool: Callable[[int], RankPool], folders: Mapping[str, Path], lengths: Sequence[int]
) -> None:
    check_strategies(rank_pool(2), folders["deepseek_v3"], lengths)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_so_it_does_for_lengths_that_are_cut_in_a_way_of_their_own(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, family: str
) -> None:
    folder = write_random_model(tmp_path, family, num_hidden_layers=2, max_position_embeddings=1024)
    overlapped = [check_strategies(rank_pool(2), folder, [*lengths, *lengths]) for lengths in EXAMPLES]
    assert sum(overlapped) > len(EXAMPLES)


def test_generated_tokens_and_their_scores_do_not_depend_on_the_batch(folders: Mapping[str, Path]) -> None:
    config = config_of(folders["qwen3_moe"])
    sampling = attrs.evolve(GREEDY, logprobs=2)
    together = generate(folders["qwen3_moe"], PROMPTS, sampling, config)
    for index, prompt in enumerate(PROMPTS):
        (alone,) = generate(folders["qwen3_moe"], [prompt], sampling, config)
        assert new_tokens(alone) == new_tokens(together[index])
        assert [output.logprobs for output in alone] == [output.logprobs for output in together[index]]


def test_a_reused_prefix_changes_no_token_and_no_score(folders: Mapping[str, Path]) -> None:
    config = config_of(folders["deepseek_v3"])
    shared = [(11 * place) % 96 for place in range(21)]
    prompts = [shared, [*shared, 5, 6, 7], [*shared[:13], 9], [*shared, 5, 6, 7]]
    sampling = attrs.evolve(GREEDY, logprobs=2)
    results: list[list[object]] = []
    for reuses in (True, False):
        scheduler = attrs.evolve(config.scheduler, max_running_requests=1, prefix_cache=reuses)
        outputs = generate(folders["deepseek_v3"], prompts, sampling, attrs.evolve(config, scheduler=scheduler))
        assert any(output.cached_tokens for each in outputs for output in each) == reuses
        results.append([[(output.token_ids, output.logprobs) for output in each] for each in outputs])
    assert results[0] == results[1]
