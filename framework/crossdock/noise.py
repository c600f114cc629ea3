"""Counter-based sampling noise: a pure function of (seed, position, token id).

The finaliser is SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): each draw
mixes a key made from the request's seed and the position of the token to be chosen with the token id as the counter. Nothing else goes in,
so the same request draws the same noise in any row, batch, rank, replica and after a restart. int64 products wrap around as needed.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)
_DRAW_BITS = 53


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64's own shift copies the sign bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, elementwise; a bijection of int64."""
    z = (z ^ _shift_right(z, 30)) * _MULTIPLY_1
    z = (z ^ _shift_right(z, 27)) * _MULTIPLY_2
    return z ^ _shift_right(z, 31)


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard exponential draws for each row and token.

    ``seeds`` [S] int64, ``positions`` [S] int64, ``token_ids`` [V] or [S, V] int64 -> [S, V] float64, all > 0. The argmax over tokens of
    probability / draw is a sample of the distribution (the exponential race, equal to the Gumbel-max trick).
    """
    keys = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    bits = _shift_right(_mix(keys.unsqueeze(1) + token_ids * _GOLDEN), 64 - _DRAW_BITS)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-_DRAW_BITS
    return uniform.log_().neg_()
