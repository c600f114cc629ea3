"""The sampler: exact greedy, filters, penalties, seeds that depend on nothing but themselves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from crossdock.sampler import SamplingRow, sample
from crossdock.token_scores import TokenScores
from crossdock.types.request import SamplingParams

VOCAB = 40


def row(position: int = 5, **values: object) -> SamplingRow:
    history = {key: values.pop(key) for key in ("prompt", "generated", "forbidden") if key in values}
    params = SamplingParams(max_new_tokens=8, **values)  # type: ignore[arg-type]
    return SamplingRow(params=params, position=position, **history)  # type: ignore[arg-type]


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def frequencies(logits: torch.Tensor, draws: int = 4000, **values: object) -> dict[int, float]:
    rows = [row(seed=seed, **values) for seed in range(draws)]
    counts = Counter(sample(logits.expand(draws, -1), rows).tolist())
    return {token: count / draws for token, count in counts.items()}


def test_greedy_is_the_exact_argmax_and_the_lowest_id_among_equals() -> None:
    logits = random_logits(6)
    logits[2, [7, 3, 30]] = 99.0
    rows = [row(temperature=0.0) for _ in range(6)]
    assert torch.equal(sample(logits, rows), logits.argmax(dim=-1))
    assert sample(logits, rows)[2] == 3


def test_top_k_one_and_a_tiny_temperature_are_greedy() -> None:
    logits = random_logits(2)
    chosen = sample(logits, [row(temperature=1.0, top_k=1), row(temperature=1e-9)])
    assert torch.equal(chosen, logits.argmax(dim=-1))


def test_zero_rows_give_zero_tokens() -> None:
    assert sample(torch.empty(0, VOCAB), []).shape == (0,)


def test_drawn_tokens_follow_the_softmax_at_the_temperature() -> None:
    logits = random_logits(1)
    for temperature in (0.7, 1.5):
        expected = torch.softmax(logits[0] / temperature, dim=-1)
        seen = frequencies(logits, temperature=temperature)
        for token in range(VOCAB):
            assert abs(seen.get(token, 0.0) - float(expected[token])) < 0.03


def test_a_seeded_row_gets_the_same_token_in_any_row_and_with_any_neighbours() -> None:
    logits = random_logits(8)
    seeded = row(seed=42, temperature=1.0)
    alone = sample(logits[:1], [seeded])
    for place in range(8):
        for kind in (
            {"seed": 7},
            {"temperature": 0.0},
            {"seed": 9, "top_p": 0.5},
            {"seed": 9, "top_k": 3, "min_p": 0.1},
        ):
            rows = [row(position=place, **kind) for _ in range(8)]  # type: ignore[arg-type]
            rows[place] = seeded
            batch = random_logits(8, seed=3)
            batch[place] = logits[0]
            assert sample(batch, rows)[place] == alone[0]


def test_a_filter_that_keeps_everything_does_not_change_the_draw() -> None:
    logits = random_logits(20)
    plain = sample(logits, [row(seed=s) for s in range(20)])
    filtered = sample(logits, [row(seed=s, top_k=VOCAB) for s in range(20)])
    assert torch.equal(plain, filtered)


def test_other_seeds_and_other_positions_draw_other_tokens() -> None:
    logits = torch.zeros(50, VOCAB)
    by_seed = sample(logits, [row(seed=s) for s in range(50)])
    by_position = sample(logits, [row(position=p) for p in range(50)])
    assert len(set(by_seed.tolist())) > 15
    assert len(set(by_position.tolist())) > 15
    assert sample(logits[:2], [row(seed=-1), row(seed=2**64 - 1)]).unique().numel() == 1


def test_top_k_draws_only_from_the_k_best() -> None:
    logits = random_logits(1)
    best = set(logits[0].topk(4).indices.tolist())
    assert set(frequencies(logits, draws=600, temperature=5.0, top_k=4)) == best


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, :4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(frequencies(logits, draws=600, top_p=0.8)) == {0, 1}
    assert set(frequencies(logits, draws=600, top_p=0.81)) == {0, 1, 2}
    assert set(frequencies(logits, draws=100, top_p=1e-9)) == {0}


def test_top_p_counts_the_mass_among_the_top_k() -> None:
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(frequencies(logits, draws=600, top_k=2, top_p=0.55)) == {0}


def test_min_p_drops_tokens_far_below_the_best() -> None:
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, :3] = torch.tensor([0.6, 0.3, 0.1]).log()
    assert set(frequencies(logits, draws=600, min_p=0.4)) == {0, 1}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens() -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 1], logits[0, 2], logits[0, 3] = 4.0, 3.0, -1.0
    penalised = row(temperature=0.0, repetition_penalty=2.0, prompt=[1], generated=[3])
    assert sample(logits, [penalised])[0] == 2
    only_negative = torch.full((1, VOCAB), -9.0)
    only_negative[0, 3], only_negative[0, 4] = -1.0, -1.5
    assert sample(only_negative, [penalised])[0] == 4


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 1], logits[0, 2] = 2.0, 1.0
    assert sample(logits, [row(temperature=0.0, presence_penalty=1.5, prompt=[1])])[0] == 1
    assert sample(logits, [row(temperature=0.0, presence_penalty=1.5, generated=[1])])[0] == 2
    assert sample(logits, [row(temperature=0.0, frequency_penalty=0.6, generated=[1])])[0] == 1
    assert sample(logits, [row(temperature=0.0, frequency_penalty=0.6, generated=[1, 1])])[0] == 2


def test_logit_bias_and_forbidden_ids_change_the_choice_and_nothing_else() -> None:
    logits = random_logits(3)
    before = logits.clone()
    best = int(logits[1].argmax())
    rows = [
        row(temperature=0.0, logit_bias=((11, 100.0),)),
        row(temperature=0.0, forbidden=[best]),
        row(temperature=0.0),
    ]
    chosen = sample(logits, rows)
    assert chosen[0] == 11
    assert chosen[1] == logits[1].topk(2).indices[1]
    assert chosen[2] == logits[2].argmax()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB, VOCAB + 3])
def test_logprobs_are_the_log_softmax_with_the_alternatives_in_order(count: int) -> None:
    logits = random_logits(2)
    entries = TokenScores(logits, torch.tensor([4, 9]), [count, 0]).entries()
    expected = torch.log_softmax(logits, dim=-1)
    assert abs(entries[0].logprob - float(expected[0, 4])) < 1e-6
    assert [token for token, _ in entries[0].top] == expected[0].argsort(descending=True)[:count].tolist()
    assert entries[0].rank == int((expected[0] > expected[0, 4]).sum())
    assert entries[1].top == ()
    assert TokenScores(torch.empty(0, VOCAB), torch.empty(0, dtype=torch.int64), []).entries() == []


@pytest.mark.parametrize("kind", [{"top_p": 0.3}, {"top_p": 0.999}, {"top_k": 20}, {"top_k": 3000}])
def test_a_large_vocabulary_is_filtered_as_if_all_of_it_were_sorted(kind: dict[str, float]) -> None:
    vocab = 5000
    for sharpness in (0.1, 4.0):
        logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)) * sharpness
        ordered, ids = torch.softmax(logits.double(), dim=-1)[0].sort(descending=True)
        kept = ids[: int(kind.get("top_k", vocab))]
        if "top_p" in kind:
            kept = ids[(ordered.cumsum(0) - ordered) < kind["top_p"]]
        rows = [row(seed=seed, **kind) for seed in range(300)]
        chosen = sample(logits.expand(300, -1), rows)
        plain = sample(logits.expand(300, -1), [row(seed=seed) for seed in range(300)])
        allowed = set(kept.tolist())
        assert set(chosen.tolist()) <= allowed
        agree = [int(a) == int(b) for a, b in zip(chosen, plain, strict=True) if int(b) in allowed]
        assert all(agree), "a filter changes the draw only when the plain draw is filtered out"
