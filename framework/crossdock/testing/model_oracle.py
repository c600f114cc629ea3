"""A model against transformers' own class: prefill in one go, in chunks, token by token, and mixed with other sequences."""

from __future__ import annotations

from pathlib import Path

import torch

from crossdock.comm import local_comms
from crossdock.groups import rank_place, resolve_sizes
from crossdock.testing.model_driver import ModelDriver
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.tiny_models import oracle_logits

TOLERANCE = 1e-4
"""Of float32 logits, relative to the largest one; the oracle's own distance to float64 is about 1e-6."""
LENGTH = 23
CHUNKS = ((0, 7), (7, 8), (8, 17), (17, LENGTH))


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest wanted magnitude; infinite for NaN."""
    error = float((found - wanted).abs().max() / wanted.abs().max())
    return error if error == error else float("inf")


def one_rank_driver(choice: DriverChoice) -> ModelDriver:
    """The model in this process, alone."""
    sizes = resolve_sizes(ranks=1)
    return ModelDriver(choice, sizes, rank_place(sizes, 0), local_comms())


def oracle_errors(choice: DriverChoice, seed: int = 0) -> dict[str, float]:
    """Relative error of every way to run one prompt of a checkpoint, float32."""
    driver = one_rank_driver(choice)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(driver.info.vocab_size, (LENGTH,), generator=generator).tolist()
    wanted = oracle_logits(Path(choice.folder), ids)
    in_chunks = torch.cat([driver.step([{1: ids[start:stop]}])[1] for start, stop in CHUNKS])
    by_token = torch.cat([driver.step([{2: [token]}])[2] for token in ids])
    driver.step([{3: ids[:5], 4: ids[:2]}])
    mixed = driver.step([{3: ids[5:6], 5: ids[:9], 4: ids[2:4]}])
    return {
        "one_go": relative_error(driver.step([{0: ids}])[0], wanted),
        "chunks": relative_error(in_chunks, wanted),
        "tokens": relative_error(by_token, wanted),
        "mixed": max(
            relative_error(mixed[3], wanted[5:6]),
            relative_error(mixed[5], wanted[:9]),
            relative_error(mixed[4], wanted[2:4]),
        ),
    }
