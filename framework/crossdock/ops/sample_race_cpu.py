"""The exponential race of sampling by the C kernel of ``cpu/sample_race.c``: the draws of ``noise.py``, most of them only to float32."""

from __future__ import annotations

import ctypes

import torch

from crossdock.native_code import native_code


class _Arguments(ctypes.Structure):
    """``struct sample_race`` of ``cpu/sample_race.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "token_ids", "seeds", "positions", "winners")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "score_stride", "ids_stride")),
    )


def takes(scores: torch.Tensor) -> bool:
    """True when the kernel can run the race of these rows: float32 on the CPU, each row in one piece."""
    return (
        scores.dtype is torch.float32
        and not scores.is_cuda
        and scores.stride(-1) == 1
        and native_code().library is not None
    )


def sample_race_cpu(
    scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """The column of each row whose probability / draw is largest; only where ``takes``.

    The winner among the few columns that could win is found in float64, so it is the one that float64 finds among all of them.

    Args:
        scores: [S, C] float32 logits of the tokens, -inf for those that cannot be chosen.
        seeds: [S] int64.
        positions: [S] int64.
        token_ids: [C] or [S, C] int64.

    Returns:
        [S] int64 columns; that of the first NaN where a row has one.

    Raises:
        MemoryError: no scratch memory.
    """
    library = native_code().library
    assert library is not None, "takes() was asked first"
    token_ids = token_ids if token_ids.stride(-1) == 1 else token_ids.contiguous()
    seeds, positions = seeds.contiguous(), positions.contiguous()
    winners = torch.empty(scores.shape[0], dtype=torch.int64)
    arguments = _Arguments(
        scores=scores.data_ptr(),
        token_ids=token_ids.data_ptr(),
        seeds=seeds.data_ptr(),
        positions=positions.data_ptr(),
        winners=winners.data_ptr(),
        rows=scores.shape[0],
        columns=scores.shape[1],
        score_stride=scores.stride(0),
        ids_stride=token_ids.stride(0) if token_ids.dim() == 2 else 0,
    )
    if library.crossdock_sample_race(ctypes.byref(arguments)):
        raise MemoryError(f"sampling: no memory for {scores.shape[1]} tokens")
    return winners
