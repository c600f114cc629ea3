"""The noise is a pure function of (seed, position, token) and exponentially distributed."""

from __future__ import annotations

import math

import torch
from crossdock.noise import exponential_noise

MASK = (1 << 64) - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def one_draw(seed: int, position: int, token: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) & MASK) + position * golden) & MASK)
    bits = mix((key + token * golden) & MASK) >> 11
    return -math.log((bits + 0.5) * 2.0**-53)


def test_the_draws_equal_splitmix64_in_python_integers() -> None:
    seeds, positions = torch.tensor([0, 42, -1]), torch.tensor([0, 5, 100_000])
    draws = exponential_noise(seeds, positions, torch.arange(40))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        expected = [one_draw(seed & MASK, position, token) for token in range(40)]
        torch.testing.assert_close(draws[row], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_a_row_alone_draws_what_it_draws_among_others() -> None:
    seeds, positions = torch.arange(6), torch.arange(6) * 7
    together = exponential_noise(seeds, positions, torch.arange(100))
    for row in range(6):
        alone = exponential_noise(seeds[row : row + 1], positions[row : row + 1], torch.arange(100))
        assert torch.equal(alone[0], together[row])


def test_draws_of_permuted_tokens_are_permuted_draws() -> None:
    seeds, positions = torch.tensor([3, 4]), torch.tensor([1, 1])
    order = torch.stack([torch.randperm(50, generator=torch.Generator().manual_seed(s)) for s in (1, 2)])
    straight = exponential_noise(seeds, positions, torch.arange(50))
    assert torch.equal(exponential_noise(seeds, positions, order), straight.gather(1, order))


def test_the_draws_are_positive_with_mean_one_and_the_exponential_tail() -> None:
    draws = exponential_noise(torch.arange(20), torch.arange(20), torch.arange(10_000))
    assert bool((draws > 0).all())
    assert abs(float(draws.mean()) - 1.0) < 0.01
    assert abs(float((draws > 2.0).double().mean()) - math.exp(-2.0)) < 0.003
