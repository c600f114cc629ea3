"""The race in C picks the token that the race in torch operators picks."""

from __future__ import annotations

import pytest
import torch
from crossdock.native_code import native_code
from crossdock.noise import exponential_noise
from crossdock.ops.sample_race_cpu import sample_race_cpu, takes

pytestmark = pytest.mark.skipif(native_code().library is None, reason=f"no native kernels: {native_code().reason}")


def race_in_torch(
    scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    weights = (scores - scores.amax(dim=-1, keepdim=True)).double().exp()
    return (weights / exponential_noise(seeds, positions, ids)).argmax(dim=-1)


@pytest.mark.parametrize("columns", [1, 7, 16, 17, 1000, 8192])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 900.0])
def test_every_winner_is_that_of_the_race_in_float64(columns: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(columns)
    scores = spread * torch.randn(64, columns, generator=generator)
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    positions = torch.randint(0, 1 << 20, (64,), generator=generator)
    ids = torch.arange(columns)
    assert torch.equal(sample_race_cpu(scores, seeds, positions, ids), race_in_torch(scores, seeds, positions, ids))
    own = torch.stack([torch.randperm(columns, generator=generator) for _ in range(64)])
    assert torch.equal(sample_race_cpu(scores, seeds, positions, own), race_in_torch(scores, seeds, positions, own))


def test_tokens_at_minus_infinity_are_never_chosen_and_rows_may_be_strided() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(200, 90, generator=generator)[:, :40]
    scores[:, 5:] = -torch.inf
    seeds, positions = torch.arange(200), torch.arange(200)
    winners = sample_race_cpu(scores, seeds, positions, torch.arange(40))
    assert torch.equal(winners, race_in_torch(scores, seeds, positions, torch.arange(40)))
    assert set(winners.tolist()) == {0, 1, 2, 3, 4}


def test_frequencies_are_the_probabilities() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0]]).expand(20_000, 3)
    winners = sample_race_cpu(scores, torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64), torch.arange(3))
    found = torch.bincount(winners, minlength=3) / 20_000
    torch.testing.assert_close(found, scores[0].softmax(0), atol=0.015, rtol=0)


def test_a_row_with_nan_gives_its_column_and_no_rows_give_none() -> None:
    scores = torch.zeros(2, 9)
    scores[1, 6] = float("nan")
    zeros = torch.zeros(2, dtype=torch.int64)
    assert sample_race_cpu(scores, zeros, zeros, torch.arange(9))[1] == 6
    assert sample_race_cpu(scores[:0], zeros[:0], zeros[:0], torch.arange(9)).shape == (0,)
    assert not takes(scores.double())
