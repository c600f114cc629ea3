"""The engine's answers on one rank: chunks, prefix cache, preemption and neighbours change nothing; scores are those of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import structlog
from crossdock.config import Config
from crossdock.errors import UsageError
from crossdock.offline import generate, logits, new_tokens
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.types.request import SamplingParams

FAMILIES = ("qwen3_moe", "deepseek_v3")
TOLERANCE = 1e-5
"""Relative to the largest logit: the same sums in another order, fp32."""
MARGIN = 1e-3
"""Best logits closer than this may swap when sums are taken in another order."""
PROMPTS = [[(7 * place + 3 * index) % 96 for place in range(length)] for index, length in enumerate((5, 1, 23, 9, 14))]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


def tokens(folder: Path, prompts: list[list[int]], sampling: SamplingParams, **scheduler: int) -> list[list[int]]:
    config = random_model_config(folder, **scheduler)
    return [new_tokens(outputs) for outputs in generate(folder, prompts, sampling, config)]


def distance(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def assert_greedy_equal(folder: Path, prompt: list[int], ours: list[int], theirs: list[int]) -> int:
    """Equal up to the first position whose two best logits are closer than the margin; returns how many tokens were left out."""
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine == other:
            continue
        (rows,) = logits(folder, [prompt + theirs[:place]], random_model_config(folder))
        best, second = np.sort(rows[-1])[::-1][:2]
        assert best - second < MARGIN, f"token {place} differs although the best logits are {best - second} apart"
        return len(ours) - place
    return 0


def test_logits_have_one_row_a_token_and_do_not_depend_on_neighbours(folder: Path) -> None:
    config = random_model_config(folder)
    together = logits(folder, PROMPTS, config)
    assert [array.shape for array in together] == [(len(prompt), 96) for prompt in PROMPTS]
    assert all(array.dtype == np.float32 for array in together)
    for prompt, array in zip(PROMPTS, together, strict=True):
        assert distance(array, logits(folder, [prompt], config)[0]) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_logits_in_chunks_are_those_in_one_go(folder: Path, chunk: int) -> None:
    whole = logits(folder, PROMPTS, random_model_config(folder))
    config = random_model_config(folder, chunk_tokens=chunk, max_step_tokens=9, max_running_requests=3)
    for array, expected in zip(logits(folder, PROMPTS, config), whole, strict=True):
        assert distance(array, expected) < TOLERANCE


def test_greedy_tokens_are_the_argmax_of_the_logits_of_what_came_before(folder: Path) -> None:
    config = random_model_config(folder)
    answers = tokens(folder, PROMPTS, GREEDY)
    full = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    for prompt, answer, array in zip(PROMPTS, answers, logits(folder, full, config), strict=True):
        predicted = array[len(prompt) - 1 : -1].argmax(axis=-1).tolist()
        assert_greedy_equal(folder, prompt, answer, predicted)


def test_greedy_tokens_of_mixed_batches_equal_those_of_each_request_alone(folder: Path) -> None:
    mixed = tokens(folder, PROMPTS, GREEDY, max_running_requests=4, max_step_tokens=8, chunk_tokens=5)
    left_out = 0
    for prompt, answer in zip(PROMPTS, mixed, strict=True):
        (alone,) = tokens(folder, [prompt], GREEDY)
        left_out += assert_greedy_equal(folder, prompt, answer, alone)
    total = len(PROMPTS) * GREEDY.max_new_tokens
    print(f"positions left out for small margins: {left_out} of {total}")
    assert left_out <= 0.02 * total


def test_preemption_by_recompute_changes_no_token(folder: Path) -> None:
    roomy = tokens(folder, PROMPTS, GREEDY)
    # 12 pages of 4 tokens hold the longest sequence (35 tokens) and little else.
    tight = tokens(folder, PROMPTS, GREEDY, kv_tokens=48, max_running_requests=4, max_step_tokens=16)
    left_out = sum(map(assert_greedy_equal, [folder] * 5, PROMPTS, tight, roomy))
    assert left_out <= 0.02 * len(PROMPTS) * GREEDY.max_new_tokens


def test_the_prefix_cache_changes_no_token(folder: Path) -> None:
    prompts = [PROMPTS[2], PROMPTS[2], [*PROMPTS[2][:13], 1, 2], PROMPTS[2][:8]]
    # One request at a time, so that each finds the pages of those before it.
    cached = generate(folder, prompts, GREEDY, random_model_config(folder, max_running_requests=1))
    assert [outputs[0].cached_tokens for outputs in cached] == [0, 20, 12, 4]
    config = random_model_config(folder, max_running_requests=1, prefix_cache=False)
    cold = generate(folder, prompts, GREEDY, config)
    assert [outputs[0].cached_tokens for outputs in cold] == [0, 0, 0, 0]
    for prompt, warm, expected in zip(prompts, cached, cold, strict=True):
        assert assert_greedy_equal(folder, prompt, new_tokens(warm), new_tokens(expected)) == 0


def test_a_seed_gives_the_same_tokens_in_any_batch_row_and_chunk_and_other_seeds_give_others(folder: Path) -> None:
    seeded = SamplingParams(max_new_tokens=10, temperature=1.0, seed=42, top_p=0.95)
    others = [SamplingParams(max_new_tokens=10, temperature=0.8, seed=seed) for seed in range(4)]
    config = random_model_config(folder)
    (alone,) = generate(folder, [PROMPTS[0]], seeded, config)
    for row in range(5):
        sampling = [*others[:row], seeded, *others[row:]]
        prompts = [*PROMPTS[1 : row + 1], PROMPTS[0], *PROMPTS[row + 1 :]]
        small = attrs.evolve(config, scheduler=attrs.evolve(config.scheduler, chunk_tokens=2 + row))
        batch = generate(folder, prompts, sampling, small)
        assert new_tokens(batch[row]) == new_tokens(alone)
    (different,) = generate(folder, [PROMPTS[0]], attrs.evolve(seeded, seed=43), config)
    assert new_tokens(different) != new_tokens(alone)


def log_softmax(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    exact = rows.astype(np.float64)
    exact -= exact.max(axis=-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("chunk", [4, 512])
def test_log_probabilities_are_those_of_the_logits(folder: Path, chunk: int) -> None:
    config = random_model_config(folder, chunk_tokens=chunk)
    prompt = PROMPTS[2]
    sampling = SamplingParams(max_new_tokens=3, temperature=0.0, logprobs=2, prompt_logprobs=3)
    (outputs,) = generate(folder, [prompt], sampling, config)
    answer = new_tokens(outputs)
    (rows,) = logits(folder, [prompt + answer], config)
    expected = log_softmax(rows)
    entries = outputs[0].prompt_logprobs
    assert entries[0] is None
    assert len(entries) == len(prompt)
    for place, entry in enumerate(entries[1:], start=1):
        assert entry is not None
        assert entry.token_id == prompt[place]
        assert abs(entry.logprob - expected[place - 1, prompt[place]]) < 1e-4
        assert [token for token, _ in entry.top] == np.argsort(-expected[place - 1])[:3].tolist()
    for place, output in enumerate(outputs):
        (entry,) = output.logprobs
        row = expected[len(prompt) - 1 + place]
        assert (entry.token_id, len(entry.top), entry.rank) == (answer[place], 2, 0)
        assert abs(entry.logprob - row[answer[place]]) < 1e-4


def test_scoring_alone_gives_the_prompt_log_probabilities_and_no_token(folder: Path) -> None:
    sampling = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
    (outputs,) = generate(folder, [PROMPTS[3]], sampling, random_model_config(folder))
    assert new_tokens(outputs) == []
    assert len(outputs[0].prompt_logprobs) == len(PROMPTS[3])
    assert outputs[-1].finish_reason == "length"


def test_an_end_token_ends_a_request_unless_it_is_ignored(tmp_path: Path) -> None:
    plain = write_random_model(tmp_path / "plain")
    answer = tokens(plain, [PROMPTS[0]], GREEDY)[0]
    end = answer[3]
    folder = write_random_model(tmp_path / "ending", eos_token_id=end)
    assert tokens(folder, [PROMPTS[0]], GREEDY)[0] == answer[: answer.index(end) + 1]
    assert tokens(folder, [PROMPTS[0]], attrs.evolve(GREEDY, ignore_eos=True))[0] == answer
    late = tokens(folder, [PROMPTS[0]], attrs.evolve(GREEDY, min_new_tokens=8))[0]
    assert end not in late[:8]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [([[1], []], "prompt 1 has length 0"), ([[96]], "token id 96 is outside"), ([[1] * 513], "the context holds 512")],
)
def test_prompts_that_cannot_run_are_refused_before_anything_is_loaded(
    folder: Path, prompts: list[list[int]], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        logits(folder, prompts, random_model_config(folder))


def test_more_prompts_than_the_queue_takes_are_no_problem_offline(folder: Path) -> None:
    config: Config = random_model_config(folder, max_queued_requests=1)
    assert len(logits(folder, [[1], [2], [3], [4]], config)) == 4
